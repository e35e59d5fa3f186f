"""Compares two runs of a model: logits, cache, text, operation by operation."""
