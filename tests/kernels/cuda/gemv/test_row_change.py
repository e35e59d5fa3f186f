"""What adapters add to the product of one row, within its launch, against the definition."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda.backend import has_dependent_launch
from quengine.kernels.cuda.gemm.matmul import matmul
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, RmsPartials, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_glu import matvec_glu
from quengine.kernels.cuda.gemv.matvec_norm import matvec_norm
from quengine.kernels.cuda.gemv.matvec_post_norm import matvec_post_norm
from quengine.kernels.cuda.lora.low_rank import CudaChanges
from quengine.kernels.cuda.weights.geometry import Geometry
from quengine.kernels.cuda.weights.packed import pack
from quengine.kernels.glu import glu
from quengine.kernels.lora.change import LowRank
from quengine.kernels.lora.low_rank import add_changes, stacked
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm, rms_norm
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

EPS, K = 1e-5, 512
SCALES = ([1.0, 0.0], [-0.5, 2.0], [0.0, 0.0])
"""Of both adapters, for launches one after the other."""


def changes_of(parts: list[int], device: torch.device, ranks: tuple[int, int] = (16, 40)) -> CudaChanges:
    draw = torch.Generator().manual_seed(len(parts))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    found: list[list[LowRank | None]] = [
        [LowRank(drawn(r, K) * K**-0.5, drawn(n, r) * 0.3, 0.5) for r in ranks] for n in parts
    ]
    return CudaChanges.of(stacked(found, parts, K), device)


def row(device: torch.device, pending: bool = False) -> tuple[QuantizedActivations, Tensor]:
    """A row, and its values in float64."""
    x = quantize_activations(ordinary_activations(1, K).to(device))
    if pending:
        x = replace(x, rms=RmsPartials(torch.full((1, 3), 0.4 * K, device=device), EPS))
    return x, x.dequantize().double().cpu()


def wanted(x: Tensor, weights: list[QuantTensor], changes: CudaChanges, scales: Tensor) -> Tensor:
    product = torch.cat([x @ dequantize(w.format, w.data).reshape(w.shape).double().T for w in weights], 1)
    plain = replace(changes, a=changes.a.cpu(), b=changes.b.cpu())
    return add_changes(product, x, plain, scales.cpu())


def use_geometry(monkeypatch: pytest.MonkeyPatch, kernel: str, *geometry: int) -> None:
    monkeypatch.setattr(
        f"quengine.kernels.cuda.gemv.{kernel}.matvec_geometry", lambda *_: Geometry(*geometry)
    )


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0",)])
def test_a_product(types: tuple[str, ...], pending: bool, device: torch.device) -> None:
    rows = [72, 24, 40][: len(types)]
    weights = [ordinary_weight(name, n, K) for name, n in zip(types, rows, strict=True)]
    changes, packed = changes_of(rows, device), pack(weights, device)
    x, values = row(device, pending)
    residual = torch.randn(1, sum(rows), device=device)
    for given in SCALES:
        scales = torch.tensor(given, device=device).view(-1, 1)
        y = matvec(x, replace(packed, change=changes.of_row(scales)), residual)
        expected = wanted(values, weights, changes, scales) + residual.double().cpu()
        assert nmse(y, expected) < 1e-11


@pytest.mark.parametrize("geometry", [(4, 1, 1), (2, 2, 1)])
def test_gate_and_up(
    geometry: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_geometry(monkeypatch, "matvec_glu", *geometry)
    gate, up = (ordinary_weight("Q4_K", 96, K) for _ in range(2))
    changes, packed = changes_of([96, 96], device), pack([gate, up], device, paired=True)
    assert packed.paired
    x, values = row(device, True)
    for given in SCALES:
        scales = torch.tensor(given, device=device).view(-1, 1)
        y = matvec_glu(x, replace(packed, change=changes.of_row(scales)))
        expected = glu(wanted(values, [gate, up], changes, scales), "silu")
        assert nmse(y.dequantize(), expected) < 1e-8


@pytest.mark.parametrize("geometry", [(2, 2, 1), (1, 2, 1)])
def test_a_projection_that_begins_a_norm(
    geometry: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_geometry(monkeypatch, "matvec_norm", *geometry)
    weight = ordinary_weight("Q8_0", 96, K)
    changes, packed = changes_of([96], device), pack(weight, device)
    x, values = row(device)
    residual, norm = torch.randn(1, 96), torch.rand(96) + 0.5
    for given in SCALES:
        scales = torch.tensor(given, device=device).view(-1, 1)
        changed = replace(packed, change=changes.of_row(scales))
        normed = matvec_norm(x, changed, residual.to(device), norm.to(device), EPS)
        hidden = wanted(values, [weight], changes, scales) + residual.double()
        assert nmse(normed.hidden, hidden) < 1e-11
        assert nmse(normed.rms_normed.dequantize(), rms_norm(hidden, norm.double(), EPS)) < 1e-8


def test_one_weight_in_launches_of_several_kinds(device: torch.device) -> None:
    """Their numbers of programs differ, and so do the numbers of launches so far."""
    weight = ordinary_weight("Q4_K", 96, K)
    changes, packed = changes_of([96], device), pack(weight, device)
    x, values = row(device)
    residual, norm = torch.randn(1, 96, device=device), torch.ones(96, device=device)
    for launch in range(4):
        scales = torch.tensor([[1.0], [float(launch)]], device=device)
        changed = replace(packed, change=changes.of_row(scales))
        expected = wanted(values, [weight], changes, scales) + residual.double().cpu()
        if launch % 3 == 0:
            assert nmse(matvec_norm(x, changed, residual, norm, EPS).hidden, expected) < 1e-11
        else:
            assert nmse(matvec(x, changed, residual), expected) < 1e-11


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_follows_the_scales(device: torch.device) -> None:
    """Launches that overlap, replayed and not, count on: each waits for the words of its own."""
    weights, pdl = [ordinary_weight("Q8_0", K, K) for _ in range(2)], has_dependent_launch(device)
    changes, scales = [changes_of([K], device) for _ in weights], torch.ones(2, 1, device=device)
    changed = [
        replace(pack(weight, device), change=change.of_row(scales))
        for weight, change in zip(weights, changes, strict=True)
    ]
    x, values = row(device)
    out, residual, norm = (torch.zeros(1, K, device=device) for _ in range(3))

    def step() -> None:
        begun = matvec_norm(x, changed[0], residual, norm[0] + 1.0, EPS, pdl=pdl)
        matvec(begun.rms_normed, changed[1], out=out, pdl=pdl)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(40):
        scales.copy_(torch.tensor(SCALES[turn % 3]).view(-1, 1) * (1.0 + turn))
        step() if turn % 4 == 3 else graph.replay()
        hidden = wanted(values, [weights[0]], changes[0], scales)
        expected = wanted(rms_norm(hidden, torch.ones(K), EPS), [weights[1]], changes[1], scales)
        assert nmse(out, expected) < 1e-7, turn


def test_a_weight_of_several_launches_has_no_change(device: torch.device) -> None:
    weights = [ordinary_weight(name, 32, K) for name in ("Q4_K", "Q6_K", "Q8_0")]
    changes, packed = changes_of([32] * 3, device), pack(weights, device)
    x, _ = row(device)
    changed = replace(packed, change=changes.of_row(torch.ones(2, 1, device=device)))
    with pytest.raises(ValueError, match="a weight of 3 parts has a change"):
        matvec(x, changed)


def test_no_product_leaves_a_change_out(device: torch.device) -> None:
    changes, packed = changes_of([96], device), pack(ordinary_weight("Q8_0", 96, K), device)
    changed = replace(packed, change=changes.of_row(torch.ones(2, 1, device=device)))
    with pytest.raises(ValueError, match="a weight with a change cannot end with a norm"):
        norm = RMSNorm(torch.ones(96, device=device), EPS)
        matvec_post_norm(row(device)[0], changed, torch.zeros(1, 96, device=device), norm)
    with pytest.raises(ValueError, match="a change is of one quantized row"):
        matmul(torch.zeros(1, K, device=device), changed, MatmulWorkspace(96 * K, device))
