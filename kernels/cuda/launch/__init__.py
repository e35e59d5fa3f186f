"""Launching Triton kernels (kernel.py), compiling them ahead of the first request, and caching them."""
