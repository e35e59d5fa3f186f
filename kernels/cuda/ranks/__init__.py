"""Sums and logits of several GPUs: pushed over peer memory in small kernels, which CUDA graphs capture."""
