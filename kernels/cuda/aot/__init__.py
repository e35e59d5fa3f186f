"""Compiles every CUDA kernel ahead of time, without a GPU."""
