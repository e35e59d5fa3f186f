"""The models of a test module: those of its `CASES`, written once."""

from pathlib import Path

import pytest

from tests.models.architectures.both_files import write_cases


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cases(tmp_path_factory.mktemp("models"), request.module.CASES)
