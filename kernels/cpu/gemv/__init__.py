"""Matrices times single rows of quantized activations."""
