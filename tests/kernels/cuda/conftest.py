"""Where the kernels under test run; tests/conftest.py chooses the interpreter where there is no GPU."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cuda_kernel)


@pytest.fixture
def device() -> torch.device:
    """Where the kernels under test run: the first GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
