"""Quantization of GGUF files: the type of each tensor, imatrix files, and the file that is written."""
