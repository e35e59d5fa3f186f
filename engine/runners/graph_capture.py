"""Recording a step's launches as one CUDA graph. Does not know what the step computes."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def capture(
    warm: Callable[[], object], step: Callable[[], Result], pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of `step`, and what it returned while it was recorded: where each replay leaves its results.

    `warm` runs first, in earnest, and compiles and loads every kernel. Graphs of one `pool`
    (torch.cuda.graph_pool_handle) share memory: what one leaves is lost when another is replayed.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be counted
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    graph.instantiate()
    return graph, result
