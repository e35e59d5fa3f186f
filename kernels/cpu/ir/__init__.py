"""LLVM vector code of the kernels."""
