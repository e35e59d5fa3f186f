"""Drafts of several tokens that one step checks: look-up in the sequence itself, or a small model."""
