"""The machine: what `engine doctor` reports of it, what describes it beside a benchmark's result, and the limits that
speeds are held against.
"""

import datetime
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from quengine.models.hub.hub_cache import cache_dir
from quengine.parallel.sum_times import SumTimes, measure
from quengine.platform.device import MIN_CAPABILITY
from quengine.platform.machine import (
    CudaDevice,
    available_memory,
    cpu_model,
    cuda_devices,
    memory_bandwidth,
    memory_nodes,
    peak_memory,
    physical_cores,
    simd_features,
    total_memory,
    usable_cpus,
)

PACKAGES = (
    *("quengine", "torch", "triton", "numpy", "numba", "llvmlite", "safetensors", "tokenizers"),
    *("huggingface_hub", "gguf", "jinja2", "typer", "rich"),
)
"""The distributions whose versions matter when something goes wrong."""

_TIMED_PACKAGES = ("quengine", "torch", "triton", "numba")
"""The distributions that a speed depends on."""

MATRIX_SIZE = 8192
_COPY_BYTES = 2**30
_COPIES = 20
_PRODUCTS, _WARM_PRODUCTS = 10, 3


@dataclass(frozen=True)
class Diagnosis:
    """Everything `engine doctor` found. Memory in bytes, bandwidth in bytes per second. `sums`: over all GPUs, where
    there are several that a model may share."""

    versions: dict[str, str | None]
    platform: str
    cpu: str
    simd: tuple[str, ...]
    physical_cores: int
    usable_cpus: int
    threads: int
    numa_nodes: int
    total_memory: int
    available_memory: int
    memory_bandwidth: float
    cuda: list[CudaDevice]
    sums: SumTimes | None
    cache_dir: str
    cache_free: int


def diagnose(threads: int) -> Diagnosis:
    """Looks at the machine; the bandwidth is measured with `threads` CPU threads."""
    cache = cache_dir()
    devices = cuda_devices()
    usable = [each for each in devices if tuple(map(int, each.capability.split("."))) >= MIN_CAPABILITY]
    return Diagnosis(
        versions=versions(PACKAGES),
        platform=platform.platform(),
        cpu=cpu_model(),
        simd=simd_features(),
        physical_cores=physical_cores(),
        usable_cpus=len(usable_cpus()),
        threads=threads,
        numa_nodes=len(memory_nodes()),
        total_memory=total_memory(),
        available_memory=available_memory(),
        memory_bandwidth=memory_bandwidth(threads),
        cuda=devices,
        sums=measure("cuda", len(devices)) if len(usable) == len(devices) > 1 else None,
        cache_dir=str(cache),
        cache_free=shutil.disk_usage(_existing(cache)).free,
    )


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Python's version and those of the packages; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def bandwidth(device: torch.device, threads: int) -> float:
    """Bytes per second that the device moves from and to its memory: the yardstick of generation.

    On the CPU the best of many reads with `threads` threads, on CUDA the best of many copies (read and write counted).
    """
    return _copy_bandwidth(device) if device.type == "cuda" else memory_bandwidth(threads)


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(_device_seconds(lambda: target.copy_(source)) for _ in range(_COPIES))
    return 2 * _COPY_BYTES / best


def matrix_rate(device: torch.device) -> float:
    """Floating-point operations per second of one large fp16 product with fp32 sums, the yardstick of prompts.

    The best of several cuBLAS products (8192 x 8192 x 8192) of normal random numbers: zeros would go faster. CUDA only.
    """
    numbers = torch.Generator(device).manual_seed(1)
    a, b = (
        torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=numbers, device=device, dtype=torch.float16)
        for _ in range(2)
    )
    out = torch.empty_like(a)
    seconds = [_device_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(_WARM_PRODUCTS + _PRODUCTS)]
    return float(2 * MATRIX_SIZE**3 / min(seconds[_WARM_PRODUCTS:]))


def _device_seconds(work: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def reset_peak(device: torch.device) -> None:
    """Resets the peak, so that one model's is not reported for the next."""
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
    """The most bytes held since `reset_peak`: of the device's memory, or of this process's.

    On CUDA what the allocator held, in use or not; the driver's own share (context, loaded kernels) is not in it.
    """
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory()


def describe_machine(device: str) -> dict[str, Any]:
    """The description of the machine that a result needs to be comparable later: processor, memory, GPU, versions,
    time."""
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
        "versions": versions(_TIMED_PACKAGES),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
