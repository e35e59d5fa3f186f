"""Nodes of a captured graph: kinds told apart, and counted truly on a GPU."""

import pytest
import torch

from quengine.runners.graph_capture import KERNEL, MEMCPY, MEMSET, GraphNodes, count_nodes, from_kinds


def test_kinds_are_counted_and_unknown_ones_not_hidden() -> None:
    kinds = [KERNEL, KERNEL, MEMCPY, MEMSET, KERNEL, 7, 11]
    assert from_kinds(kinds) == GraphNodes(kernels=3, copies=1, fills=1, others=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_of_two_kernels_a_copy_and_a_fill_is_counted_so() -> None:
    x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.add_(1)
        x.mul_(2)
        y.copy_(x)
        y.zero_()
    nodes = count_nodes(graph.raw_cuda_graph())
    assert nodes.kernels >= 2
    assert nodes.kernels + nodes.copies + nodes.fills == 4
    assert nodes.others == 0
