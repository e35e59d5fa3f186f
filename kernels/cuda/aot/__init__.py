"""The CUDA backend without a GPU: launches on tensors without data, and their kernels compiled and examined."""
