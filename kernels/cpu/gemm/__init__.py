"""Matrices times the rows of a prompt: fp32 tiles, AMX, 16-bit integers."""
