"""Image files as pixels: decoding within limits, in a process that reaches nothing else."""
