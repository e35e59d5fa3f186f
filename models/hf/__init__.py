"""Unquantized Hugging Face checkpoint folders."""
