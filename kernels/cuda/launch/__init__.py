"""How kernels are launched again, compiled ahead and cached."""
