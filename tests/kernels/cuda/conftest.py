"""Without a CUDA device these tests run the Triton kernels in Triton's interpreter, on the CPU.

The variable must be set before triton is first imported, so it is set here, when pytest collects the folder.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    """Where the kernels under test run: the first GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
