"""Matrices times many rows: mma.sync, and Hopper's warp-group matrix units."""
