"""LLVM instructions that the kernels share."""
