"""Matrices times single rows of rounded activations."""
