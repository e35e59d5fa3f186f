"""Runs the self-tests of a device: on the CPU one after the other, on a GPU in several processes.

On a GPU nearly all of the time is the compilation of kernels, which processes share; each has a context of its own on
the device.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from quengine.diagnostics.selftest.self_test import USES, KernelCheck, check_use, failure
from quengine.diagnostics.selftest.self_test_attention import OPERATIONS, PAGED, check_operation
from quengine.diagnostics.selftest.self_test_experts import (
    EXPERT_USES,
    ROUTER,
    ROUTERS,
    SUBJECTS,
    check_experts,
    check_router,
)
from quengine.diagnostics.selftest.self_test_latent import LATENTS, check_latent
from quengine.diagnostics.selftest.self_test_states import STATES, check_state
from quengine.diagnostics.selftest.self_test_vision import VISION, check_vision
from quengine.kernels.block_formats import FORMATS
from quengine.platform.machine import usable_cpus

SAMPLING = {"sampling": ("greedy", "sampled", "penalties", "no top-k", "typical")}
"""The settings of self_test_sampling, which imports what only a GPU needs."""

PROCESS_BYTES = 2**30
"""Device memory that one process takes: the driver's own, kernels, and weights of less than a megabyte."""

MAX_PROCESSES = 16

Unit = tuple[str, str]
"""A subject and one of its tests, or "" for all of them: what one process does at a time."""

GPU_UNITS: tuple[Unit, ...] = (
    *((name, use.name) for name in FORMATS for use in USES),
    *((name, "") for name in (*OPERATIONS, *PAGED, *STATES, *LATENTS, VISION)),
    *((name, use.name) for name in SUBJECTS for use in EXPERT_USES),
    *((ROUTER, name) for name in ROUTERS),
    *((name, test) for name, tests in SAMPLING.items() for test in tests),
)
"""In the order of the report."""

QUICK_FORMAT = "Q4_K"
"""The format of weights that stands for the others in a quick test: the one that most models are in."""


def quick_units() -> tuple[Unit, ...]:
    """One of each kind of GPU_UNITS: every use of one format, every operation, one router."""
    layers = {*OPERATIONS, *PAGED, *STATES, *LATENTS, VISION}
    kinds = {QUICK_FORMAT, *layers, f"experts {QUICK_FORMAT}", *SAMPLING}
    return tuple(unit for unit in GPU_UNITS if unit[0] in kinds or unit == (ROUTER, next(iter(ROUTERS))))


def check_cpu(threads: int, quick: bool = False) -> Iterator[KernelCheck]:
    """Tests the CPU's kernels, `quick` one of each kind. The first run on a machine compiles them: a while."""
    from quengine.kernels.cpu.backend import CpuBackend

    backend = CpuBackend(threads)
    for name in (QUICK_FORMAT,) if quick else FORMATS:
        for use in USES:
            yield check_use(backend, name, use)
    for name in OPERATIONS:
        yield from check_operation(backend, name)
    for name in STATES:
        yield from check_state(backend, name)
    for name in LATENTS:
        yield from check_latent(backend, name)
    yield from check_vision(torch.device("cpu"))
    for name in (f"experts {QUICK_FORMAT}",) if quick else SUBJECTS:
        for use in EXPERT_USES:
            yield check_experts(backend, name, use)
    for name in list(ROUTERS)[:1] if quick else ROUTERS:
        yield from check_router(backend, name)


def check_cuda(index: int, free_memory: int, quick: bool = False) -> Iterator[KernelCheck]:
    """Tests the kernels of one GPU with `free_memory` bytes to spare, in a fixed order, `quick` one of each kind.

    A process that dies takes what it was testing, and what was waiting, with it: those are failures, too.
    """
    from quengine.kernels.cuda.launch.triton_cache import use_private_cache

    units = quick_units() if quick else GPU_UNITS
    use_private_cache()  # once for all processes, which inherit it
    processes = max(1, min(MAX_PROCESSES, len(usable_cpus()), free_memory // PROCESS_BYTES))
    # Forked from a server that has imported everything and holds no device: a process is there at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [__name__, "quengine.diagnostics.selftest.self_test_sampling", "quengine.kernels.cuda.backend"]
    )
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        running = {unit: pool.submit(partial(check_on_gpu, index), unit) for unit in _longest_first(units)}
        for unit in units:
            try:
                yield from running[unit].result()
            except Exception as error:  # the process died, or the device cannot be had
                yield failure(unit[0], unit[1] or "run", error)


def check_on_gpu(index: int, unit: Unit) -> list[KernelCheck]:
    """The checks of one unit, in this process."""
    from quengine.diagnostics.selftest.self_test_sampling import check_sampling
    from quengine.kernels.cuda.backend import CudaBackend

    # The CPU's part of a test is small; many processes with many threads each would only compete.
    torch.set_num_threads(1)
    # A new one each time: a backend takes all of a model's weights before it is used.
    backend = CudaBackend(torch.device("cuda", index))
    subject, test = unit
    if subject in SAMPLING:
        return [check_sampling(backend.device, backend.pdl, test)]
    if subject in FORMATS:
        return [check_use(backend, subject, use) for use in USES if use.name == test]
    if subject in SUBJECTS:
        return [check_experts(backend, subject, use) for use in EXPERT_USES if use.name == test]
    if subject == ROUTER:
        return list(check_router(backend, test))
    if subject in STATES:
        return list(check_state(backend, subject))
    if subject in LATENTS:
        return list(check_latent(backend, subject))
    if subject == VISION:
        return list(check_vision(backend.device))
    return list(check_operation(backend, subject))


def _longest_first(units: Sequence[Unit]) -> list[Unit]:
    """The units; those with the most to compile are not left to the end."""
    order = dict.fromkeys((*SAMPLING, *PAGED, *OPERATIONS), 0)
    return sorted(units, key=lambda unit: order.get(unit[0], 2 - unit[1].startswith("ffn")))
