"""Tells the user when Triton compiles kernels: the first run on a machine takes long, and must say why.

A later run finds them on disk (TRITON_CACHE_DIR, or ~/.triton) and nothing is reported.
"""

import logging
from threading import Lock
from typing import Any

_log = logging.getLogger(__name__)


class CompileNotice:
    """Triton's compilation listener (triton.knobs.compilation.listener): logs each kernel, and warns of the first."""

    def __init__(self, device_name: str) -> None:
        self.device_name = device_name
        self._warned = False
        self._lock = Lock()  # several threads compile

    def __call__(self, *, cache_hit: bool, metadata: dict[str, Any] | None = None, **facts: Any) -> None:
        del facts
        if cache_hit:
            return
        _log.info("compiled %s", (metadata or {}).get("name", "a kernel"))
        with self._lock:
            if self._warned:
                return
            self._warned = True
        _log.warning(
            "compiling kernels for %s, once; the first run takes up to a minute longer, later ones find them on disk",
            self.device_name,
        )


def announce_compilation(device_name: str) -> None:
    """From now on, tell the user of the first kernel that is not found on disk; once a process."""
    import triton

    if not isinstance(triton.knobs.compilation.listener, CompileNotice):
        triton.knobs.compilation.listener = CompileNotice(device_name)
