"""Experts of more than one row against the torch definition on what is stored, for every stored type."""

import pytest
import torch

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.attention.attention_prefill import is_hopper
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, to_fp16_operand
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.moe import grouped as module
from quengine.kernels.cuda.moe.grouped import grouped_add, grouped_glu
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm, rms_norm
from tests.kernels.cuda.moe.expert_layer import Layer, add_of, glu_of, grouped, on, routing_of
from tests.kernels.cuda.moe.routings import chosen
from tests.kernels.cuda.weights import nmse, ordinary_activations

FP16_ROUNDING = 5e-7
ROUNDED_ONCE = 8e-8
"""See test_matmul.py."""


@pytest.fixture(params=["mma", "wgmma"], autouse=True)
def way(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "mma":
        monkeypatch.setattr(module, "is_hopper", lambda *_: False)
    elif not is_hopper(device):
        pytest.skip("needs a Hopper GPU")


def assert_right(
    layer: Layer, experts: torch.Tensor, device: torch.device, activation: Activation = "silu"
) -> None:
    """Each of the two operations alone."""
    rows, used = experts.shape
    routing, room = routing_of(experts), MatmulWorkspace(0, device)
    x = 0.1 * ordinary_activations(rows, layer.gate[0].cols)
    made = glu_of(layer.packed_gate_up(device), x, routing, room, activation)
    assert nmse(made, layer.exact_glu(x, routing, activation)) < 4 * FP16_ROUNDING
    gated = ordinary_activations(rows * used, layer.width, 4).view(rows, used, -1)
    residual = ordinary_activations(rows, layer.down[0].rows, 8)
    total = add_of(layer.packed_down(device), gated, routing, residual, room)
    assert isinstance(total, torch.Tensor)
    assert nmse(total, layer.exact_add(gated, routing, residual)) < FP16_ROUNDING


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, device: torch.device) -> None:
    cols = max(64, FORMATS[name].block)
    assert_right(Layer((name, name, name), (cols, 8, 21), 2, width=cols), chosen(5, 1, 2), device)


ROUTINGS = {
    "one row": chosen(1, 2, 5),
    "an expert never chosen": chosen(13, 2, 4),
    "all rows to one expert": torch.full((21, 1), 3, dtype=torch.int32),
    "all experts": torch.arange(5, dtype=torch.int32).repeat(4, 1),
    "many rows": chosen(131, 1, 3),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing(name: str, device: torch.device) -> None:
    assert_right(Layer(("Q4_0", "Q4_0", "Q8_0"), (64, 8, 16), 5, width=32), ROUTINGS[name], device)


def test_gpt_oss_has_biases_a_clamp_and_columns_that_fill_no_block(device: torch.device) -> None:
    layer = Layer(("MXFP4", "MXFP4", "MXFP4"), (192, 16, 24), 2, bias=True, width=160)
    assert_right(layer, chosen(12, 1, 2), device, "clamped_swish")


PAIRED, UNPAIRED = ("Q4_0", "Q4_0", "Q8_0"), ("Q4_0", "Q8_0", "Q4_1")


@pytest.mark.parametrize(
    ("types", "activation", "bias"),
    [
        (PAIRED, "gelu_tanh", False),
        (PAIRED, "silu", True),
        (PAIRED, "clamped_swish", True),
        (UNPAIRED, "clamped_swish", True),
        (("F16", "F16", "Q8_0"), "gelu_tanh", True),
        (("BF16", "Q8_0", "F32"), "clamped_swish", False),
    ],
)
def test_units_of_one_type_and_of_two(
    types: tuple[str, str, str], activation: Activation, bias: bool, device: torch.device
) -> None:
    assert_right(Layer(types, (64, 8, 21), 3, bias, 32), chosen(3, 2, 3), device, activation)


def test_products_are_held_some_blocks_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_PRODUCTS", 3 * 8 * 16)
    layer = Layer(("Q4_0", "Q8_0", "F16"), (64, 8, 16), 5, width=32)
    assert_right(layer, chosen(14, 2, 5), device)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_rows_of_any_size(size: float, device: torch.device) -> None:
    layer = Layer(("Q4_0", "Q4_0", "Q4_0"), (64, 8, 16), 3, width=32)
    x, routing = ordinary_activations(9, 64), routing_of(chosen(9, 2, 3))
    x[3], x[4] = 0.0, size * x[4]
    made = glu_of(layer.packed_gate_up(device), x, routing, MatmulWorkspace(0, device))
    assert nmse(made[4], layer.exact_glu(x, routing)[4]) < 20 * FP16_ROUNDING and not made[3].any()


def test_an_expert_that_nobody_chose_is_not_read(device: torch.device) -> None:
    """Its scales are infinite; a product with them would be no number."""
    layer, room = Layer(("Q8_0", "Q8_0", "Q8_0"), (64, 8, 16), 4, width=32), MatmulWorkspace(0, device)
    gate_up = layer.packed_gate_up(device)
    (part,) = gate_up.parts
    assert isinstance(part, PackedPart)
    infinite = torch.tensor([0, 0x7C], dtype=torch.uint8).repeat(part.scales.shape[-1] // 2)
    part.scales[3 * gate_up.expert_tiles :] = infinite.to(device)
    x = ordinary_activations(9, 64)
    assert glu_of(gate_up, x, routing_of(chosen(9, 2, 4)), room).isfinite().all()
    assert not glu_of(gate_up, x, routing_of(torch.full((9, 1), 3, dtype=torch.int32)), room).isfinite().any()


@pytest.mark.parametrize("rows", [3, 34])
def test_the_norm_that_reads_the_sum_is_made_with_it(rows: int, device: torch.device) -> None:
    layer, room = Layer(("Q4_0", "Q4_0", "Q4_0"), (64, 8, 64), 2, width=32), MatmulWorkspace(0, device)
    gated, residual = ordinary_activations(rows, 32).view(rows, 1, 32), ordinary_activations(rows, 64, 8)
    routing, norm = routing_of(chosen(rows, 1, 2)), RMSNorm((torch.rand(64) + 0.5).to(device), 1e-5)
    made = add_of(layer.packed_down(device), gated, routing, residual, room, norm)
    assert isinstance(made, RmsNormed) and isinstance(made.rms_normed, Fp16Operand)
    assert nmse(made.hidden, layer.exact_add(gated, routing, residual)) < FP16_ROUNDING
    normed = rms_norm(made.hidden.double(), norm.weight.double(), 1e-5)
    assert nmse(made.rms_normed.dequantize(64), normed) < FP16_ROUNDING


def test_both_operations_follow_each_other(device: torch.device) -> None:
    layer, room = Layer(("Q4_0", "Q4_0", "Q8_0"), (64, 32, 64), 3), MatmulWorkspace(0, device)
    x, routing = 0.1 * ordinary_activations(6, 64), routing_of(chosen(6, 2, 3))
    residual, moved = torch.randn(6, 64), on(routing, device)
    stream = residual.to(device, copy=True)
    for _ in range(2):  # the second layer's buffers are those of the first
        gated = grouped_glu(x.to(device), moved, layer.packed_gate_up(device), room, "silu", False, False)
        room.fp16_operand(6, 64).values.fill_(float("nan"))  # as the shared expert writes in between
        room.glu_rows(6, 64).fill_(float("nan"))
        made = grouped_add(gated, moved, layer.packed_down(device), room, stream, None, False, False)
    exact = layer.exact_add(layer.exact_glu(x, routing), routing, residual)
    exact = layer.exact_add(layer.exact_glu(x, routing), routing, exact)
    assert isinstance(made, torch.Tensor) and made.data_ptr() == stream.data_ptr()
    assert nmse(made, exact) < 4 * FP16_ROUNDING


def test_rows_may_come_as_an_fp16_operand_and_stay(device: torch.device) -> None:
    gate_up = Layer(("Q4_0", "Q4_0", "Q4_0"), (128, 8, 16), 3, width=32).packed_gate_up(device)
    x, routing = ordinary_activations(11, 128).to(device), on(routing_of(chosen(11, 2, 3)), device)
    room = MatmulWorkspace(0, device)
    made = [glu_of(gate_up, x, routing, room)]
    operand = to_fp16_operand(x, room.fp16_operand(11, 128))
    kept = operand.dequantize(128)
    gated = grouped_glu(operand, routing, gate_up, room, "silu", False, False)
    made.append(gated.rows.dequantize(128)[gated.groups.positions.long(), :8].view(11, 2, 8))
    assert torch.equal(*made) and torch.equal(operand.dequantize(128), kept)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q5_0", "F16")], ids="+".join)
def test_a_rows_bits_depend_on_nothing_but_the_row(types: tuple[str, str, str], device: torch.device) -> None:
    """Alone, among few rows, and among so many that blocks are larger; with other rows at other experts."""
    layer, room = Layer(types, (256, 8, 16), 3, width=256), MatmulWorkspace(0, device, batch_invariant=True)
    gate_up, down = layer.packed_gate_up(device), layer.packed_down(device)
    x, residual, routing = ordinary_activations(12, 256), torch.randn(12, 16), routing_of(chosen(12, 2, 3))
    rows_of_down, made = ordinary_activations(24, 256, 4).view(12, 2, 256), []
    for rows in (slice(0, 12), slice(5, 6), slice(3, 8)):
        some = Routing(routing.experts[rows].contiguous(), routing.weights[rows].contiguous())
        gated = glu_of(gate_up, x[rows].contiguous(), some, room)
        made.append((gated, add_of(down, rows_of_down[rows], some, residual[rows], room)))
    for (gated, total), rows in zip(made[1:], (slice(5, 6), slice(3, 8)), strict=True):
        assert torch.equal(gated, made[0][0][rows]) and torch.equal(total, made[0][1][rows])


def test_exact_products_have_weights_rounded_once(device: torch.device) -> None:
    """The rest of the error is that of the rows, which are kept from rounding here."""
    layer, room = Layer(("Q4_K", "Q4_K", "Q4_K"), (256, 8, 32), 3, width=256), MatmulWorkspace(0, device)
    gated, routing = ordinary_activations(18, 256).half().float().view(9, 2, 256), routing_of(chosen(9, 2, 3))
    down, residual, errors = layer.packed_down(device), torch.zeros(9, 32), []
    for exact in (False, True):
        rows, moved = grouped(gated, routing, 3, room), on(routing, device)
        total = grouped_add(rows, moved, down, room, residual.to(device, copy=True), None, False, exact)
        assert isinstance(total, torch.Tensor)
        errors.append(nmse(total, layer.exact_add(gated, routing, residual)))
    assert errors[1] < ROUNDED_ONCE and errors[1] < errors[0]


def test_graphs_of_few_rows_keep_their_buffers(device: torch.device) -> None:
    layer, room = Layer(("Q4_0", "Q4_0", "Q4_0"), (64, 32, 64), 4), MatmulWorkspace(0, device)
    gate_up, places = layer.packed_gate_up(device), []
    for rows in (2, 300, 128, 40, 9):
        _, gated = module._buffers(rows, 2, gate_up, gate_up.expert_rows // 2, room)
        products = room.of_experts("rows", torch.float32, rows, (gated.groups.rows, 64), 0)
        tensors = (
            gated.rows.values,
            gated.rows.row_scale,
            gated.groups.blocks,
            gated.groups.positions,
            products,
        )
        places += [[tensor.data_ptr() for tensor in tensors]] if rows <= 128 else []
    assert all(each == places[0] for each in places)


def test_rows_of_another_width_are_refused(device: torch.device) -> None:
    gate_up = Layer(("Q4_0", "Q4_0", "Q4_0"), (64, 32, 16), 3).packed_gate_up(device)
    with pytest.raises(ValueError, match="for experts of 64 columns"):
        glu_of(gate_up, torch.zeros(4, 96), routing_of(chosen(4, 2, 3)), MatmulWorkspace(0, device))
