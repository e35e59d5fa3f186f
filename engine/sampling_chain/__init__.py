"""Samplers in any order: what the fixed order of `kernels.sampling.sample`, and so a CUDA graph, does not compute.

DRY, top-n-sigma, XTC, dynamic temperature, Mirostat, a request's own order, and the probabilities after the samplers.
They compute what llama.cpp's `src/llama-sampler.cpp` does, which the tests compare with, on the host, a sequence at a
time.
"""
