"""Matmuls of more than one row: mma.sync, and Hopper's warp-group matrix instruction."""
