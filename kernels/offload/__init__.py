"""Experts in host memory beside a CUDA device: the device holds those used most, the CPU computes the others."""
