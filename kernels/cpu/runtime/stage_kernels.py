"""The kernel that runs others one after another (stage.py).

Does not know: what the kernels compute.
"""

from __future__ import annotations

from quengine.kernels.cpu.ir.row_ir import get
from quengine.kernels.cpu.runtime.atomics import atomic_store, call_kernel, fetch_add
from quengine.kernels.cpu.runtime.compiled import compile_kernel


def chain_kernel() -> bytes:
    """Task i: task i of each of some kernels; the last task to finish runs other kernels as a whole.

    0 address of the counter of finished tasks, with their number 64 bytes on; 1 kernels per task; 2 kernels at the
    end; from 3 on, for each: its code, its context, its tasks.
    """

    def chain(context: int, task: int) -> None:
        entry = context + 24
        for _ in range(get(context, 1)):
            call_kernel(get(entry, 0), get(entry, 1), task)
            entry += 24
        finals = get(context, 2)
        if finals == 0:
            return
        counter = get(context, 0)
        if fetch_add(counter, 1) + 1 < get(counter, 8):
            return
        atomic_store(counter, 0)
        for _ in range(finals):
            for i in range(get(entry, 2)):
                call_kernel(get(entry, 0), get(entry, 1), i)
            entry += 24

    return compile_kernel(chain)
