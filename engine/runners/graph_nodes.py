"""What a captured CUDA graph holds, counted by the driver.

Does not know: what the nodes compute, or how long they take.
Reference: CUDA driver API, "Graph Management" (cuGraphGetNodes, cuGraphNodeGetType).
"""

import ctypes
from dataclasses import dataclass

from quengine.errors import CannotRunError

KERNEL, MEMCPY, MEMSET = 0, 1, 2
"""CUgraphNodeType of what a step may launch."""


@dataclass(frozen=True)
class GraphNodes:
    """How many nodes of each kind one launch of a graph runs."""

    kernels: int
    copies: int
    fills: int
    others: int


def count_nodes(graph: int) -> GraphNodes:
    """Count the nodes of a CUgraph, given its address (torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph()).

    Raises CannotRunError where the driver refuses, with its error number.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t(0)
    handle = ctypes.c_void_p(graph)
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)), "cuGraphGetNodes")
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), "cuGraphNodeGetType")
        kinds.append(kind.value)
    return from_kinds(kinds)


def from_kinds(kinds: list[int]) -> GraphNodes:
    """The counts of a list of CUgraphNodeType numbers."""
    kernels, copies, fills = (kinds.count(kind) for kind in (KERNEL, MEMCPY, MEMSET))
    return GraphNodes(kernels, copies, fills, len(kinds) - kernels - copies - fills)


def _check(status: int, call: str) -> None:
    if status != 0:
        raise CannotRunError(f"the CUDA driver refused {call} with error {status}")
