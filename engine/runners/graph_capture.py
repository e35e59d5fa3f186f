"""Captures a step's launches as one CUDA graph, and counts its kernels.

Reference: CUDA driver API, "Graph Management" (cuGraphGetNodes, cuGraphNodeGetType).
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from quengine.errors import CannotRunError
from quengine.kernels.cuda.launch.one_capture import CAPTURING
from quengine.platform.collector import paused

KERNEL = 0
"""CUgraphNodeType of a kernel."""


class Graph(Protocol):
    """A CUDA graph."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class CapturedStep:
    """A captured step, with its logits, which each replay overwrites, and the number of its kernels."""

    graph: Graph
    logits: Tensor
    kernels: int


@dataclass(frozen=True)
class FollowedGraph:
    """A graph whose replay the host follows with work of its own."""

    replay: Callable[[], None]


def capture_step(warm: Callable[[], object], step: Callable[[], Tensor], pool: Any = None) -> CapturedStep:
    """Captures `step`, which returns its logits.

    `warm` runs first, uncaptured, and compiles and loads every kernel. Graphs of one `pool`
    (torch.cuda.graph_pool_handle) share memory: one graph's intermediate results are lost when another is replayed.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be counted
    stream = _capture_stream(torch.cuda.current_device())
    # A collection may destroy CUDA objects of an engine that is gone, which no thread may do during a capture. The
    # launches of the thread that encodes images are no part of this capture.
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with CAPTURING, paused(), capture:
        logits = step()
    graph.instantiate()
    return CapturedStep(graph, logits, count_kernels(graph.raw_cuda_graph()))


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One capture stream for all graphs of a device: they share memory only if captured on the same stream,
    and torch's own is on the device that was current at its first use. Its launches come before those of the stream
    that encodes images.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call, no-any-return]


def count_kernels(graph: int) -> int:
    """Counts the kernels of a CUgraph, given its address (torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph()).

    Raises CannotRunError with the driver's error number if a call fails.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t(0)
    handle = ctypes.c_void_p(graph)
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)), "cuGraphGetNodes")
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    kernels = 0
    for node in nodes:
        kind = ctypes.c_int(-1)
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), "cuGraphNodeGetType")
        kernels += kind.value == KERNEL
    return kernels


def _check(status: int, call: str) -> None:
    if status != 0:
        raise CannotRunError(f"the CUDA driver refused {call} with error {status}")
