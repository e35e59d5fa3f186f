"""Ranges for profilers: silent without CUDA, opened and closed with it."""

import pytest
import torch

from quengine.platform.ranges import ProfilerRange


def test_nothing_is_called_before_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda _: pytest.fail("called"))
    with ProfilerRange("decode step"):
        pass


def test_a_range_is_closed_when_an_error_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with pytest.raises(ValueError), ProfilerRange("prefill chunk"):
        raise ValueError
    assert calls == ["prefill chunk", "pop"]
