"""Quantizers: a row of floats as blocks of a stored type, with the least weighted error that the search finds."""
