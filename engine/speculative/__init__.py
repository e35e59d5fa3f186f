"""Speculative decoding: tokens drafted by look-up in the sequence itself or by a small model, verified in one step."""
