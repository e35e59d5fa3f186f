"""Matvecs of decode: q-dot of one row on integer matrix units."""
