"""Operations on a CUDA device, through Triton: one operation a file, its torch definition in the folder above."""
