"""Runs the self-tests of a device: on the CPU one after the other, on a GPU in several processes.

On a GPU nearly all of the time is the compilation of kernels, which processes share; each has a context of its own on
the device.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from quengine.diagnostics.harness import KernelCheck, failure
from quengine.diagnostics.selftest.self_test import USES, check_use
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
from quengine.kernels.backend import Backend
from quengine.kernels.block_formats import FORMATS
from quengine.platform.machine import usable_cpus

SAMPLING, SETTINGS = "sampling", ("greedy", "sampled", "penalties", "no top-k", "typical")
"""The settings of self_test_sampling, which imports what only a GPU needs."""

PROCESS_BYTES = 2**30
"""Device memory that one process takes: the driver's own, kernels, and weights of less than a megabyte."""

MAX_PROCESSES = 16

Unit = tuple[str, str]
"""A subject and one of its tests, or "" for all of them: what one process does at a time."""

QUICK_FORMAT = "Q4_K"
"""The format of weights that stands for the others in a quick test: the one that most models are in."""


class Kind(NamedTuple):
    """Subjects that are checked alike.

    check: called with a backend, a subject and what `tests` has for one of its tests ("": all of them at once).
    on_gpu: only a GPU has what they check.
    """

    subjects: Iterable[str]
    check: Callable[..., KernelCheck | Iterable[KernelCheck]]
    tests: Mapping[str, tuple[Any, ...]] = {"": ()}
    on_gpu: bool = False


def kinds() -> tuple[Kind, ...]:
    """All kinds of subjects, in the order of the report."""
    return (
        Kind(FORMATS, check_use, {use.name: (use,) for use in USES}),
        Kind(OPERATIONS, check_operation),
        Kind(PAGED, check_operation, on_gpu=True),
        Kind(STATES, check_state),
        Kind(LATENTS, check_latent),
        Kind((VISION,), check_vision),
        Kind(SUBJECTS, check_experts, {use.name: (use,) for use in EXPERT_USES}),
        Kind((ROUTER,), check_router, {name: (name,) for name in ROUTERS}),
        Kind((SAMPLING,), _check_sampling, {name: (name,) for name in SETTINGS}, on_gpu=True),
    )


def units(on_gpu: bool, quick: bool = False) -> list[Unit]:
    """The units that are tested on the CPU, or on a GPU. `quick`: only one format of weights, and one router."""
    others = {*FORMATS, *SUBJECTS} - {QUICK_FORMAT, f"experts {QUICK_FORMAT}"} if quick else ()
    routers = list(ROUTERS)[1:] if quick else ()
    return [
        (subject, test)
        for kind in kinds()
        for subject in kind.subjects
        for test in kind.tests
        if (on_gpu or not kind.on_gpu) and subject not in others and test not in routers
    ]


def check_unit(backend: Backend[Any], unit: Unit) -> Iterator[KernelCheck]:
    """The checks of one unit."""
    subject, test = unit
    kind = next(kind for kind in kinds() if subject in kind.subjects)
    found = kind.check(backend, subject, *kind.tests[test])
    yield from [found] if isinstance(found, KernelCheck) else found


def _check_sampling(backend: Backend[Any], subject: str, name: str) -> KernelCheck:
    from quengine.diagnostics.selftest.self_test_sampling import check_sampling
    from quengine.kernels.cuda.backend import CudaBackend

    assert isinstance(backend, CudaBackend)
    return check_sampling(backend, subject, name)


def check_cpu(threads: int, quick: bool = False) -> Iterator[KernelCheck]:
    """Tests the CPU's kernels, the `quick` ones (`units`) or all. The first run on a machine takes longer: it compiles
    them."""
    from quengine.kernels.cpu.backend import CpuBackend

    backend = CpuBackend(threads)
    for unit in units(on_gpu=False, quick=quick):
        yield from check_unit(backend, unit)


def check_cuda(index: int, free_memory: int, quick: bool = False) -> Iterator[KernelCheck]:
    """Tests the kernels of one GPU with `free_memory` bytes to spare, in a fixed order, the `quick` ones or all.

    If a process dies, the units that it was testing and those that were waiting fail, too.
    """
    from quengine.kernels.cuda.launch.triton_cache import use_private_cache

    wanted = units(on_gpu=True, quick=quick)
    use_private_cache()  # once for all processes, which inherit it
    processes = max(1, min(MAX_PROCESSES, len(usable_cpus()), free_memory // PROCESS_BYTES))
    # Forked from a server that has imported everything and holds no device: a process is there at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [__name__, "quengine.diagnostics.selftest.self_test_sampling", "quengine.kernels.cuda.backend"]
    )
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        running = {unit: pool.submit(partial(check_on_gpu, index), unit) for unit in _longest_first(wanted)}
        for unit in wanted:
            try:
                yield from running[unit].result()
            except Exception as error:  # the process died, or the device cannot be had
                yield failure(unit[0], unit[1] or "run", error)


def check_on_gpu(index: int, unit: Unit) -> list[KernelCheck]:
    """The checks of one unit, in this process."""
    from quengine.kernels.cuda.backend import CudaBackend

    # The CPU's part of a test is small; many processes with many threads each would only compete.
    torch.set_num_threads(1)
    # A new one each time: a backend takes all of a model's weights before it is used.
    return list(check_unit(CudaBackend(torch.device("cuda", index)), unit))


def _longest_first(units: Sequence[Unit]) -> list[Unit]:
    """The units; those with the most to compile are not left to the end."""
    order = dict.fromkeys((SAMPLING, *PAGED, *OPERATIONS), 0)
    return sorted(units, key=lambda unit: order.get(unit[0], 2 - unit[1].startswith("ffn")))
