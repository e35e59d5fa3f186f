"""Matrices times one to eight rows: the q-dot on integer matrix units."""
