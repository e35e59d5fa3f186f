"""Samplers in any order, for requests that `kernels.sampling.sample`, and so a CUDA graph, does not compute.

These are DRY, top-n-sigma, XTC, dynamic temperature, Mirostat, a request's own order, and the probabilities after the
samplers. They run on the host, one sequence at a time, and compute the same as llama.cpp's `src/llama-sampler.cpp`,
with which the tests compare them.
"""
