"""Attention over the paged cache, rotation and cache write."""
