"""Where the kernels under test run; tests/conftest.py chooses the interpreter where there is no GPU."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.cuda_kernel)


@pytest.fixture
def device() -> torch.device:
    """Where the kernels under test run: the first GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
