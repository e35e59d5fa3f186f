"""Kernels under test run on all threads but where a test says how many."""

from collections.abc import Iterator

import pytest

from quengine.kernels import cpu


@pytest.fixture(autouse=True)
def all_threads_afterwards() -> Iterator[None]:
    yield
    cpu.set_threads(cpu.max_threads())
