"""What the searches of kernels/quantize take longest for, on CUDA."""
