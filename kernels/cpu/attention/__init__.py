"""Attention over the paged cache."""
