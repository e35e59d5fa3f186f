"""Matvecs of decode: weight rows times quantized activations."""
