"""Element-wise operations: norms, rotation, SwiGLU, sampling."""
