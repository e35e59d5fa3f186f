"""Operations on a CUDA device, in Triton: one operation per file, its torch definition in the folder above."""
