"""The kernels of a captured graph, counted on a GPU."""

import pytest
import torch

from quengine.runners.graph_capture import count_kernels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_of_a_graph_are_counted() -> None:
    x = torch.ones(64, device="cuda")
    x.add_(1)
    x.mul_(2)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.add_(1)
        x.mul_(2)
    assert count_kernels(graph.raw_cuda_graph()) == 2
