"""The operations of a decoder: torch definitions (the oracle), CPU and CUDA kernels, packed weights."""
