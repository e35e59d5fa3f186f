"""The kernels of the host's side of an exchange (exchange.py)."""

from __future__ import annotations

from quengine.kernels.cpu.moe.exchange import ExchangeArguments
from quengine.kernels.cpu.runtime.atomics import atomic_load, atomic_store, pause, yield_cpu
from quengine.kernels.cpu.runtime.compiled import compile_kernel

# Pauses of the thread that waits for the device, after which each turn yields the CPU: some 20 us, the time of a
# layer's attention.
_YIELD_AFTER = 1_000


def await_rows_kernel() -> bytes:
    """One task: takes the next rows once they are sent."""

    def await_rows(args: ExchangeArguments, _task: int) -> None:
        wanted = atomic_load(args.taken) + 1
        turns = 0
        while atomic_load(args.sent) < wanted and atomic_load(args.stopped) == 0:
            turns += 1
            if turns > _YIELD_AFTER:
                yield_cpu()
            else:
                pause()
        atomic_store(args.taken, wanted)

    return compile_kernel(await_rows, ExchangeArguments)


def sums_ready_kernel() -> bytes:
    """One task: the sums of all rows taken are there."""

    def sums_ready(args: ExchangeArguments, _task: int) -> None:
        atomic_store(args.summed, atomic_load(args.taken))

    return compile_kernel(sums_ready, ExchangeArguments)
