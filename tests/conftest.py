"""Without a CUDA device, Triton kernels run in Triton's interpreter, on the CPU.

The variable must be set before anything imports triton, and pytest imports this file first.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
