"""The searches of kernels/quantize, compiled: 16 blocks at a time, the same bits as the definitions."""
