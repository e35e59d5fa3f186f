"""How Triton kernels are launched (kernel.py), compiled ahead of a first request, and where they are cached."""
