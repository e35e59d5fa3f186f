"""What `engine doctor` reports beside the self-test: versions, processor, memory, devices, cache."""

import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from quengine.models.hub.hub_cache import cache_dir
from quengine.parallel.sum_times import SumTimes, measure
from quengine.platform.device import MIN_CAPABILITY
from quengine.platform.machine import (
    CudaDevice,
    available_memory,
    cpu_model,
    cuda_devices,
    memory_bandwidth,
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
