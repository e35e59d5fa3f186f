"""The line that explains a slow first run."""

import logging

import pytest

from quengine.platform.device import CompileNotice


def test_the_first_kernel_that_is_not_on_disk_is_told_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    notice = CompileNotice("GPU X")
    with caplog.at_level(logging.WARNING, "quengine"):
        notice(src=None, metadata={}, cache_hit=True)
        assert caplog.messages == []
        for _ in range(3):
            notice(src=None, metadata={}, cache_hit=False)
    (line,) = caplog.messages
    assert line.startswith("compiling kernels for GPU X, once")
    assert "\n" not in line


def test_every_kernel_that_is_compiled_is_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    notice = CompileNotice("GPU X")
    with caplog.at_level(logging.INFO, "quengine"):
        notice(src=None, metadata={"name": "matvec"}, cache_hit=False)
        notice(src=None, metadata={"name": "rope"}, cache_hit=False)
        notice(src=None, metadata={"name": "norm"}, cache_hit=True)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert told == ["compiled matvec", "compiled rope"]
