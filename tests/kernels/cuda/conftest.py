"""Where the kernels under test run; tests/conftest.py chooses the interpreter where there is no GPU."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernels under test run: the first GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
