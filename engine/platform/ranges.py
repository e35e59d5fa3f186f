"""Named ranges for a profiler that watches the process (NVTX: Nsight Systems and others).

Does nothing until CUDA is in use, and costs under a microsecond a range while no profiler is attached.
"""

from types import TracebackType

import torch


class ProfilerRange:
    """`with ProfilerRange("decode step"): ...` shows as a bar of that name on the host's timeline. Ranges nest."""

    __slots__ = ("_name", "_open")

    def __init__(self, name: str) -> None:
        self._name = name
        self._open = False

    def __enter__(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]
            self._open = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
            self._open = False
