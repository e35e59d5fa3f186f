"""What this machine is and has: processor, memory, CUDA devices, and how fast memory is read.

Honours the limits that a container or a job sets on processors and memory. torch is loaded only by the functions
that need it.
"""

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quengine.errors import EngineError

PROC = Path("/proc")
SYS = Path("/sys")

_SIMD = (
    *(
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512_vnni",
        "avx512_bf16",
    ),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""The instruction sets that matter to the CPU kernels, as Linux names them: x86-64, then Arm."""

BANDWIDTH_BUFFER = 256 * 2**20
"""Bytes read by one pass of the bandwidth measurement, or four times the largest cache, if that is more."""


@dataclass(frozen=True)
class CudaDevice:
    """One CUDA device; memory in bytes, `capability` as in "9.0"."""

    index: int
    name: str
    capability: str
    total_memory: int
    free_memory: int
    multiprocessors: int


@cache
def cpu_model() -> str:
    """The processor's name, as it reports it."""
    for key in ("model name", "Model", "Hardware"):
        for line in _cpuinfo():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return platform.processor() or platform.machine()


@cache
def simd_features() -> tuple[str, ...]:
    """The instruction sets of this processor that the kernels care about, by Linux's names."""
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            has = set(value.split())
            return tuple(feature for feature in _SIMD if feature in has)
    return ()


def _cpuinfo() -> list[str]:
    path = PROC / "cpuinfo"
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def usable_cpus() -> set[int]:
    """The logical processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def thread_count(asked: int | None) -> int:
    """The number of CPU threads to compute with: the requested one, or one for each physical core.

    Raises:
        EngineError: fewer than 1, or more than this process has processors. A pool of very many threads ends in a
            segmentation fault.
    """
    if asked is None:
        return physical_cores()
    most = len(usable_cpus())
    if not 1 <= asked <= most:
        raise EngineError(f"{asked} threads requested; this machine allows 1 to {most}")
    return asked


def physical_cores() -> int:
    """Cores this process can use: the threads of one core count once, and a container's quota is kept to."""
    cores = set()
    for cpu in usable_cpus():
        topology = SYS / f"devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "thread_siblings_list") or _read(topology / "core_cpus_list")
        cores.add(siblings or cpu)
    if not (SYS / "devices/system/cpu").is_dir():
        import psutil  # type: ignore[import-untyped]

        return int(psutil.cpu_count(logical=False) or len(cores))
    quota = cpu_quota()
    return max(1, len(cores) if quota is None else min(len(cores), round(quota)))


def cpu_quota() -> float | None:
    """The processors that the control group grants, or None where it sets no limit."""
    shares = []
    for folder in _cgroup_folders("cpu"):
        limit = (_read(folder / "cpu.max") or "").split()
        if not limit:
            limit = [_read(folder / "cpu.cfs_quota_us") or "max", _read(folder / "cpu.cfs_period_us") or "0"]
        if limit[0] not in ("max", "-1") and int(limit[1]) > 0:
            shares.append(int(limit[0]) / int(limit[1]))
    return min(shares, default=None)


def memory_nodes() -> tuple[int, ...]:
    """The NUMA nodes of the processors that this process may use; empty where the system does not tell."""
    usable, nodes = usable_cpus(), list[int]()
    for folder in (SYS / "devices/system/node").glob("node[0-9]*"):
        if usable & set(_cpu_list(_read(folder / "cpulist") or "")):
            nodes.append(int(folder.name.removeprefix("node")))
    return tuple(sorted(nodes))


def _cpu_list(text: str) -> Iterator[int]:
    """The processors in a list such as 0-3,8."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def largest_cache() -> int:
    """Bytes of the largest cache of a processor; 0 where the system does not tell."""
    sizes = [0]
    for path in (SYS / "devices/system/cpu/cpu0/cache").glob("index*/size"):
        number, unit = (text := _read(path) or "0")[:-1], text[-1:]
        if number.isdigit() and unit in "KM":
            sizes.append(int(number) << (10 if unit == "K" else 20))
    return max(sizes)


def total_memory() -> int:
    """Bytes of memory this process may use at most: the machine's, or the control group's limit."""
    import psutil  # type: ignore[import-untyped]

    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits())])


def available_memory() -> int:
    """Bytes that can be allocated now without swapping; what the page cache holds counts as free."""
    import psutil  # type: ignore[import-untyped]

    return max(
        0, min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _memory_limits())])
    )


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of each control group over this process with a limit."""
    for folder in _cgroup_folders("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit is None or used is None or limit == "max" or int(limit) >= 1 << 60:
            continue
        stat = dict(
            line.split()
            for line in (_read(folder / "memory.stat") or "").splitlines()
            if line.count(" ") == 1
        )
        files = sum(
            int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("active_file", "inactive_file")
        )
        yield int(limit), max(0, int(used) - files)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """This process's control group and those above it, of version 2 or, where that has none, version 1."""
    mount = SYS / "fs/cgroup"
    for line in (_read(PROC / "self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        root = mount if number == "0" else mount / controller
        if number != "0" and controller not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def peak_memory() -> int:
    """The most bytes of memory this process has held so far, mapped files that were touched included."""
    for line in (_read(PROC / "self/status") or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if platform.system() == "Darwin" else int(peak) * 1024


def memory_bandwidth(threads: int | None = None, seconds: float = 0.4) -> float:
    """How fast this machine reads memory, in bytes per second: the best of many passes over one large buffer.

    Args:
        threads: the CPU threads that read; None: the physical cores.
        seconds: how long to measure.

    Raises:
        EngineError: more threads than `thread_count` allows.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(thread_count(threads))
    try:
        room = max(BANDWIDTH_BUFFER, 4 * largest_cache())
        room = max(2**24, min(room, available_memory() // 8))
        columns = 2**12
        weight = torch.ones((room // 4 // columns, columns), dtype=torch.float32)
        vector = torch.ones(columns, dtype=torch.float32)
        best = float("inf")
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until or best == float("inf"):
            torch.mv(weight, vector)
            best = min(best, time.perf_counter() - began)
        return weight.numel() * 4 / best
    finally:
        torch.set_num_threads(before)


def cuda_devices() -> list[CudaDevice]:
    """The CUDA devices that torch can use, in its order; empty without any."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            CudaDevice(
                index=index,
                name=properties.name,
                capability=f"{properties.major}.{properties.minor}",
                total_memory=total,
                free_memory=free,
                multiprocessors=properties.multi_processor_count,
            )
        )
    return found
