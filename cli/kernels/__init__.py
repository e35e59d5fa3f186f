"""`engine kernels`: packs of compiled CUDA kernels, and Triton's cache."""
