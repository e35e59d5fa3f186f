"""What holds for all tests: Triton's interpreter without a CUDA device, no notice of kernels being compiled.

The interpreter's variable must be set before anything imports triton, and pytest imports this file first.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _kernels_compile_quietly() -> None:
    """A fresh checkout compiles kernels in whichever test comes first; its output must not depend on that."""
    from quengine.kernels.cpu import compiled

    compiled._say_once()
