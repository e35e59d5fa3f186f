"""The line that explains a slow first run."""

import logging

import pytest

from quengine.compile_notice import CompileNotice


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
