"""Times models, and profiles their kernels."""
