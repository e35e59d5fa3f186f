"""Sums and logits over several GPUs: pushed over peer memory by small kernels, which CUDA graphs capture."""
