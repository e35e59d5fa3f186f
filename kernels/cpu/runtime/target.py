"""The processor that kernels are compiled for, as LLVM names it.

numba determines it from the machine, NUMBA_CPU_NAME and NUMBA_CPU_FEATURES; the answer is stored with the kernels, so
that numba need not be imported for it again.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from quengine.kernels.cpu.gemm.tiles import Tile, tile_for
from quengine.kernels.cpu.runtime.code_store import code_store


class Target(NamedTuple):
    """features: "+avx2,-sse4a,...", all features that LLVM lists, or those that the user set."""

    triple: str
    cpu: str
    features: str


@cache
def host_target() -> Target:
    """The target of this process's kernels."""
    kept = code_store().read("target")
    if kept is not None:
        return Target(*kept.decode().split("\n"))
    from numba.core.registry import cpu_target

    target = Target(*cpu_target.target_context.codegen().magic_tuple())
    code_store().write("target", "\n".join(target).encode())
    return target


@cache
def host_tile() -> Tile:
    """The tile of the processor that kernels are compiled for."""
    return tile_for(host_target().triple, host_target().features)
