"""Experts of more than one row on Hopper's matrix instruction: every size of block, launches that overlap, graphs."""

import pytest
import torch

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.attention.attention_prefill import is_hopper
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.moe import grouped as module
from quengine.kernels.cuda.moe import grouped_wgmma
from quengine.kernels.cuda.moe.grouped import grouped_add, grouped_glu
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.cuda.moe.expert_layer import Layer, on, routing_of
from tests.kernels.cuda.moe.routings import chosen
from tests.kernels.cuda.weights import nmse, ordinary_activations

FP16_ROUNDING = 5e-7
SIZES = {"Q4_K": (512, 768, 512), "MXFP4": (320, 352, 320), "two types": (256, 256, 256)}
"""Columns that are whole blocks; columns, rows of the unit and tiles that fill none."""


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")


def layer_of(name: str) -> tuple[Layer, Activation]:
    if name == "two types":
        return Layer(("Q5_K", "Q6_K", "Q3_K"), SIZES[name], 6), "gelu_tanh"
    if name == "MXFP4":
        return Layer(("MXFP4", "MXFP4", "MXFP4"), SIZES[name], 6, bias=True), "clamped_swish"
    return Layer(("Q4_K", "Q4_K", "Q6_K"), SIZES[name], 6), "silu"


def run(
    layer: Layer,
    activation: Activation,
    x: torch.Tensor,
    routing: Routing,
    room: MatmulWorkspace,
    pdl: bool,
    exact: bool,
) -> torch.Tensor:
    """The sum over a row's experts, without a residual."""
    gate_up, down = layer.packed_gate_up(room.device), layer.packed_down(room.device)
    gated = grouped_glu(x, routing, gate_up, room, activation, pdl, exact)
    residual = torch.zeros(len(x), down.expert_rows, device=room.device)
    norm = RMSNorm(torch.ones(down.expert_rows, device=room.device), 1e-5)
    made = grouped_add(gated, routing, down, room, residual, norm, pdl, exact)
    assert isinstance(made, RmsNormed)
    return made.hidden


@pytest.mark.parametrize("name", ["Q4_K", "MXFP4", "two types"])
@pytest.mark.parametrize("exact", [False, True])
def test_every_block_is_right_and_gives_the_same_bits(
    exact: bool, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, activation = layer_of(name)
    made = []
    for rows in (100, 700):
        x, routing = 0.1 * ordinary_activations(rows, layer.gate[0].cols), routing_of(chosen(rows, 2, 6))
        expected = layer.exact_add(
            layer.exact_glu(x, routing, activation), routing, torch.zeros(rows, layer.down[0].rows)
        )
        for block in (8, 16, 32, 64, 128, 256):
            monkeypatch.setattr(module, "grouped_block", lambda *_, block=block: block)
            room = MatmulWorkspace(0, device)
            made.append(run(layer, activation, x.to(device), on(routing, device), room, True, exact))
            assert nmse(made[-1], expected) < 6 * FP16_ROUNDING
            assert torch.equal(made[-1], made[0])
        made.clear()


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.is_quantized])
def test_a_ring_of_weights_gives_the_bits_that_registers_give(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either instruction. Columns that fill no turn of 256 where the type allows it."""
    layer = Layer((name, name, name), (768 if FORMATS[name].block == 256 else 640, 40, 16), 5, width=256)
    gate_up, made = layer.packed_gate_up(device), []
    x, routing = (
        ordinary_activations(9, layer.gate[0].cols).to(device),
        on(routing_of(chosen(9, 2, 5)), device),
    )
    for ring, per_warp in ((0, False), (3, False), (0, True), (3, True)):
        geometry = WgmmaGeometry(4, 1, 2, False, 128, 256, ring, per_warp, block=8)
        monkeypatch.setattr(grouped_wgmma, "grouped_wgmma_geometry", lambda *_, geometry=geometry: geometry)
        gated = grouped_glu(x, routing, gate_up, MatmulWorkspace(0, device), "silu", True, False)
        made.append(gated.rows.dequantize(40)[gated.groups.positions.long()])
    assert all(torch.equal(each, made[0]) for each in made)
    assert made[0].isfinite().all() and made[0].any()


@pytest.mark.parametrize("name", ["Q4_K", "MXFP4"])
@pytest.mark.parametrize("rows", [2, 30, 200])
def test_launches_that_overlap_give_what_launches_in_turn_give(
    rows: int, name: str, device: torch.device
) -> None:
    """Layer upon layer in the same buffers, each with a routing and rows of its own."""
    layer, activation = layer_of(name)
    xs = [0.1 * ordinary_activations(rows, layer.gate[0].cols, seed).to(device) for seed in range(5)]
    routings = [on(routing_of(chosen(rows, 3, 6, seed)), device) for seed in range(5)]
    room = MatmulWorkspace(0, device)
    expected = [run(layer, activation, x, r, room, False, False) for x, r in zip(xs, routings, strict=True)]
    for _ in range(20):
        made = [run(layer, activation, x, r, room, True, False) for x, r in zip(xs, routings, strict=True)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(made, expected, strict=True))


def test_a_graph_follows_the_routing(device: torch.device) -> None:
    layer, activation = layer_of("Q4_K")
    gate_up, down = layer.packed_gate_up(device), layer.packed_down(device)
    x, room = 0.1 * ordinary_activations(40, 512).to(device), MatmulWorkspace(0, device)
    routing, residual = on(routing_of(chosen(40, 2, 6)), device), torch.zeros(40, 512, device=device)

    def step() -> None:
        gated = grouped_glu(x, routing, gate_up, room, activation, True, False)
        grouped_add(gated, routing, down, room, residual, None, True, False)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(5):
        routing.experts.copy_(chosen(40, 2, 6, seed) if seed else torch.tensor([[0, 5]] * 40))
        residual.zero_()
        graph.replay()
        by_graph = residual.clone()
        residual.zero_()
        step()
        assert torch.equal(by_graph, residual)
