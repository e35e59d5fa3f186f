"""Captured steps: CUDA graphs with their static inputs and slots, and the CPU's compiled lists of kernels."""
