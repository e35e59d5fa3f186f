"""Compiling without running: launches are only noted, and everything is as before afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from quengine.kernels.cuda.launch.compile_ahead import compiling_only, marker


def test_launches_ask_for_compilation_with_all_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def run(self: object, *args: object, **options: object) -> None:
        calls.append({"self": self, "args": args, **options})

    monkeypatch.setattr(JITFunction, "run", run)
    with compiling_only(2):
        JITFunction.run("kernel", 1, 2, grid=(3,), warmup=False, num_warps=4)
    assert calls == [{"self": "kernel", "args": (1, 2), "grid": (3,), "warmup": True, "num_warps": 4}]
    assert JITFunction.run is run


def test_a_launch_that_takes_the_same_machine_code_is_not_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[object, ...]] = []

    def run(self: object, *args: object, **options: object) -> None:
        calls.append((self, *args, options["WIDTH"]))

    monkeypatch.setattr(JITFunction, "run", run)
    x, y, half = torch.zeros(4), torch.ones(8), torch.zeros(4).half()
    different = [
        ("one", x, 32, 8), ("two", x, 32, 8), ("one", half, 32, 8), ("one", x[1:], 32, 8), ("one", x, 33, 8),
        ("one", x, 1, 8), ("one", x, 2**40, 8), ("one", x, 0.5, 8), ("one", x, 32, 16),
    ]  # fmt: skip
    same = [("one", y, 64, 8), ("one", x, 35, 8), ("one", y, 2.5, 8)]
    with compiling_only(1):
        for kernel, tensor, number, width in (*different, *same):
            JITFunction.run(kernel, tensor, number, grid=(len(calls),), warmup=False, WIDTH=width)
    assert len(calls) == len(different)


def test_launching_is_put_back_after_an_error() -> None:
    before = JITFunction.run
    with pytest.raises(ZeroDivisionError), compiling_only(1):
        raise ZeroDivisionError
    assert JITFunction.run is before
    with compiling_only(1):
        pass


def test_a_marker_lies_in_the_cache_and_names_what_it_was_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    one = marker("GPU X", (4096, 32))
    assert one.parent == tmp_path
    assert one == marker("GPU X", (4096, 32))
    assert len({one, marker("GPU Y", (4096, 32)), marker("GPU X", (4096, 33))}) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_kernel_is_ready_afterwards_and_has_not_run() -> None:
    @triton.jit
    def set_to(pointer, value, ADDED: tl.constexpr):
        tl.store(pointer, value + ADDED)

    @triton.jit
    def broken(pointer, ADDED: tl.constexpr):
        tl.static_assert(ADDED > 5)
        tl.store(pointer, ADDED)

    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    with compiling_only(4):
        for added in (1, 2, 3):
            set_to[(1,)](x, 40, ADDED=added)
        broken[(1,)](x, ADDED=1)
    assert x.item() == 0
    for added in (1, 2, 3):
        set_to[(1,)](x, 40, ADDED=added)
        assert x.item() == 40 + added
    with pytest.raises(Exception, match="static"):
        broken[(1,)](x, ADDED=1)
