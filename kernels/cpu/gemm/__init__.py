"""Matrices times the rows of a prompt: fp32 tiles, AMX, int16."""
