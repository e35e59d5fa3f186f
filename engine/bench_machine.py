"""What a benchmark is measured against: the speed and the peak use of the memory that a device computes from.

Knows devices, no models and no tests. The machine itself is described by `machine`.
"""

import datetime
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from quengine.machine import (
    cpu_model,
    cuda_devices,
    memory_bandwidth,
    peak_memory,
    physical_cores,
    simd_features,
    total_memory,
)

_PACKAGES = ("quengine", "torch", "triton", "numba")
_COPY_BYTES = 2**30
_COPIES = 20


def bandwidth(device: torch.device, threads: int) -> float:
    """Bytes per second that the device moves from and to its memory: the yardstick of generation.

    On the CPU the best of many reads with `threads` threads, on CUDA the best of many copies (read and write counted).
    """
    return _copy_bandwidth(device) if device.type == "cuda" else memory_bandwidth(threads)


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(_COPIES):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        target.copy_(source)
        after.record()
        after.synchronize()
        best = min(best, before.elapsed_time(after) / 1e3)
    return 2 * _COPY_BYTES / best


def forget_peak(device: torch.device) -> None:
    """Start the peak anew, so that one model's is not reported for the next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        # Writing 5 resets VmHWM (Linux, proc(5)); elsewhere the peak is that of the whole process so far.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak(device: torch.device) -> int:
    """The most bytes held since `forget_peak`: of the device's memory, or of this process's."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()


def describe_machine(device: str) -> dict[str, Any]:
    """What a result must carry to mean something later: processor, memory, GPU, versions, time."""
    index = int(device.partition(":")[2] or 0)
    return {
        "machine": {
            "cpu": cpu_model(),
            "simd": list(simd_features()),
            "cores": physical_cores(),
            "memory_bytes": total_memory(),
            "system": platform.platform(),
            "gpu": asdict(cuda_devices()[index]) if device.startswith("cuda") else None,
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
