"""The slowest part of the searches of kernels/quantize, on CUDA."""
