"""The kernel that chains others (stage.py)."""

from __future__ import annotations

from quengine.kernels.cpu.ir.row_ir import int64_at
from quengine.kernels.cpu.runtime.argument_types import arguments_at
from quengine.kernels.cpu.runtime.arguments import size_of
from quengine.kernels.cpu.runtime.atomics import atomic_store, call_kernel, fetch_add
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.cpu.runtime.stage import ChainArguments, ChainEntry


def chain_kernel() -> bytes:
    """Task i: task i of each of the chained kernels; the last task to finish also runs the final kernels."""
    entry_at, entry_bytes = arguments_at(ChainEntry), size_of(ChainEntry)

    def chain(args: ChainArguments, task: int) -> None:
        for i in range(args.parts):
            entry = entry_at(args.entries + i * entry_bytes)
            call_kernel(entry.kernel, entry.arguments, task)
        if args.finals == 0:
            return
        if fetch_add(args.counter, 1) + 1 < int64_at(args.counter, 8):
            return
        atomic_store(args.counter, 0)
        for i in range(args.parts, args.parts + args.finals):
            entry = entry_at(args.entries + i * entry_bytes)
            for part in range(entry.tasks):
                call_kernel(entry.kernel, entry.arguments, part)

    return compile_kernel(chain, ChainArguments)
