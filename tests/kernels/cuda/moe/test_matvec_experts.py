"""The matmuls of each row's experts on the q-dot, against the definitions."""

import pytest
import torch

from quengine.kernels import activations as definition
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, RmsPartials, quantize_activations
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.moe import matvec_experts_add as add_module
from quengine.kernels.cuda.moe import matvec_experts_glu as glu_module
from quengine.kernels.cuda.moe.expert_weights import pack_experts, pack_gate_up_experts
from quengine.kernels.cuda.moe.matvec_experts_add import matvec_experts_add
from quengine.kernels.cuda.moe.matvec_experts_glu import matvec_experts_glu
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.geometry import Geometry
from quengine.kernels.cuda.weights.launch_table import experts_add_geometry
from quengine.kernels.cuda.weights.layout import PACKED_FORMATS
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm, rms_norm
from tests.kernels.cuda.moe.expert_runs import expected_add, expected_glu, experts_of, routing_of
from tests.kernels.cuda.weights import nmse, ordinary_activations

FP32_NOISE = 1e-12
EPS = 1e-5
CHOSEN = [[0, 2], [2, 3], [0, 3]]
"""Of four experts; nobody chooses expert 1."""


def assert_rounded_close(y: QuantizedActivations, exact: torch.Tensor) -> None:
    assert nmse(y.dequantize(), exact.flatten(0, 1)) < 1e-8
    assert torch.equal(y.sums.cpu(), y.ints().cpu().view(y.rows, -1, 16).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_gate_and_up_of_every_format(name: str, device: torch.device) -> None:
    gate, up = experts_of(name, 3, 32, 256), experts_of(name, 3, 32, 256, 1)
    x, routing = ordinary_activations(1, 256) * 0.1, routing_of([[0, 2]], device)
    weights = pack_gate_up_experts(gate, up, device)
    assert weights.paired
    y = matvec_experts_glu(quantize_activations(x.to(device)), routing, weights)
    assert (y.rows, y.cols) == (2, 32)
    assert_rounded_close(y, expected_glu(x, routing, gate, up, None, "silu"))


@pytest.mark.parametrize(
    ("formats", "activation"),
    [
        (("Q4_K", "Q4_K"), "silu"),
        (("Q4_K", "Q4_K"), "gelu_tanh"),
        (("Q4_K", "Q4_K"), "clamped_swish"),
        (("Q4_K", "Q6_K"), "clamped_swish"),
        (("BF16", "BF16"), "gelu_tanh"),
        (("F32", "Q4_K"), "silu"),
    ],
)
def test_gate_and_up_with_biases(
    formats: tuple[str, str], activation: Activation, device: torch.device
) -> None:
    gate, up = (experts_of(name, 4, 32, 256, seed) for seed, name in enumerate(formats))
    bias = torch.randn(4, 64)
    x, routing = ordinary_activations(3, 256) * 0.01, routing_of(CHOSEN, device)
    weights = pack_gate_up_experts(gate, up, device, bias.to(device))
    assert weights.paired == (formats == ("Q4_K", "Q4_K"))
    y = matvec_experts_glu(quantize_activations(x.to(device)), routing, weights, activation)
    assert_rounded_close(y, expected_glu(x, routing, gate, up, bias, activation))


@pytest.mark.parametrize("geometry", [(2, 2, 1), (4, 1, 2), (16, 1, 1), (1, 4, 1, 0, True)])
def test_every_geometry_of_gate_and_up_rounds_whole_groups(
    geometry: tuple[int, int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose programs have tiles behind an expert's last."""
    monkeypatch.setattr(glu_module, "experts_glu_geometry", lambda *_: Geometry(*geometry))
    gate, up = experts_of("Q4_K", 2, 64, 256), experts_of("Q4_K", 2, 64, 256, 1)
    x, routing = ordinary_activations(2, 256) * 0.1, routing_of([[1], [0]], device)
    scratch = QuantizationScratch.empty(2 * 64, device)
    weights = pack_gate_up_experts(gate, up, device)
    for _ in range(2):
        y = matvec_experts_glu(quantize_activations(x.to(device)), routing, weights, scratch=scratch)
        assert_rounded_close(y, expected_glu(x, routing, gate, up, None, "silu"))
    assert bool((scratch.words == -1).all())


def begun(x: torch.Tensor, device: torch.device, pieces: int = 3) -> QuantizedActivations:
    """x rounded, with the division by its root mean square left to do."""
    rounded = quantize_activations(x.to(device))
    cuts = torch.tensor_split(x.double().square(), pieces, dim=1)
    squares = torch.stack([cut.sum(1) for cut in cuts], 1).float().to(device)
    return QuantizedActivations(
        rounded.high, rounded.low, rounded.scale, rounded.sums, RmsPartials(squares, EPS)
    )


@pytest.mark.parametrize("formats", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("F16", "F16")])
def test_gate_and_up_end_the_norm_of_each_row(formats: tuple[str, str], device: torch.device) -> None:
    gate, up = (experts_of(name, 4, 32, 256, seed) for seed, name in enumerate(formats))
    x, routing = ordinary_activations(3, 256), routing_of(CHOSEN, device)
    y = matvec_experts_glu(begun(x, device), routing, pack_gate_up_experts(gate, up, device))
    normed = rms_norm(x.double(), torch.ones(256).double(), EPS)
    assert_rounded_close(y, expected_glu(normed, routing, gate, up, None, "silu"))


def gated_rows(rows: int, used: int, width: int) -> torch.Tensor:
    return ordinary_activations(rows * used, width, seed=7)


@pytest.mark.parametrize("name", list(FORMATS))
def test_down_of_every_format_is_weighted_and_added(name: str, device: torch.device) -> None:
    down, bias = experts_of(name, 4, 32, 256), torch.randn(4, 32)
    x, routing, residual = gated_rows(2, 2, 256), routing_of(CHOSEN[:2], device), torch.randn(2, 32)
    for given in (None, bias):
        weights = pack_experts(down, device, None if given is None else given.to(device))
        y = matvec_experts_add(quantize_activations(x.to(device)), routing, weights, residual.to(device))
        assert isinstance(y, torch.Tensor)
        wanted = expected_add(x.view(2, 2, 256), routing, down, given, residual)
        assert nmse(y, wanted) < FP32_NOISE


@pytest.mark.parametrize(
    ("chosen", "geometry", "slots"),
    [
        (CHOSEN[:2], (2, 2, 1), 1),
        ([[0, 1, 2]], (1, 2, 2), 2),
        ([[1]], (4, 2, 1), 1),
        ([[0, 2, 3]], (1, 4, 1, 0, True), 4),
    ],
)
def test_down_begins_the_next_norm(
    chosen: list[list[int]],
    geometry: tuple[int, int, int],
    slots: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers of experts that are no power of two, and tiles behind an expert's last, among them."""
    monkeypatch.setattr(add_module, "experts_add_geometry", lambda *_: (Geometry(*geometry), slots))
    rows, used = len(chosen), len(chosen[0])
    down, bias = experts_of("Q4_K", 4, 96, 256), torch.randn(4, 96)
    x, routing, residual = gated_rows(rows, used, 256), routing_of(chosen, device), torch.randn(rows, 96)
    norm = RMSNorm((torch.rand(96) + 0.5).to(device), EPS)
    scratch = QuantizationScratch.empty(rows * 96, device)
    weights = pack_experts(down, device, bias.to(device))
    for _ in range(2):
        y = matvec_experts_add(
            quantize_activations(x.to(device)), routing, weights, residual.to(device), norm, scratch
        )
        assert isinstance(y, RmsNormed) and isinstance(y.rms_normed, QuantizedActivations)
        wanted = expected_add(x.view(rows, used, 256), routing, down, bias, residual)
        assert nmse(y.hidden, wanted) < FP32_NOISE
        exact = rms_norm(wanted, norm.weight.double().cpu(), EPS)
        assert nmse(y.rms_normed.dequantize(), exact) < 1e-8
        ints = definition.quantize_activations((y.hidden * norm.weight).cpu())
        assert torch.equal(y.rms_normed.ints().cpu(), ints.a)
        assert torch.equal(y.rms_normed.sums.cpu(), ints.sums(16))
        assert bool((scratch.words == -1).all())


@pytest.mark.parametrize("used", [8, 9, 15, 16])
def test_down_takes_nine_to_fifteen_experts_at_once(used: int, device: torch.device) -> None:
    """As by 16, some of whose warps have none; 8 of 16 at a time."""
    down, chosen = experts_of("Q4_K", 17, 32, 256), [list(range(1, used + 1))]
    x, routing, residual = gated_rows(1, used, 256), routing_of(chosen, device), torch.randn(1, 32)
    weights = pack_experts(down, device)
    (part,) = weights.parts
    assert isinstance(part, PackedPart)
    assert experts_add_geometry(part, weights.expert_tiles, used)[1] == (16 if 8 < used < 16 else 8)
    y = matvec_experts_add(quantize_activations(x.to(device)), routing, weights, residual.to(device))
    assert isinstance(y, torch.Tensor)
    assert nmse(y, expected_add(x.view(1, used, 256), routing, down, None, residual)) < FP32_NOISE


@pytest.mark.parametrize("name", ["Q4_K", "F16"])
def test_outputs_that_are_no_whole_groups_begin_no_norm(name: str, device: torch.device) -> None:
    down = experts_of(name, 2, 40, 256)
    x, routing, residual = gated_rows(1, 2, 256), routing_of([[0, 1]], device), torch.randn(1, 40)
    norm = RMSNorm(torch.ones(40, device=device), EPS)
    weights = pack_experts(down, device)
    y = matvec_experts_add(quantize_activations(x.to(device)), routing, weights, residual.to(device), norm)
    assert isinstance(y, torch.Tensor)
    assert nmse(y, expected_add(x.view(1, 2, 256), routing, down, None, residual)) < FP32_NOISE


@pytest.mark.parametrize("chosen", [[[0, 2], [1, 2], [0, 1]], [[1, 2]] * 3])
def test_a_rows_bits_are_its_own(chosen: list[list[int]], device: torch.device) -> None:
    """Alone, among others, and with all rows on the same experts."""
    gate_up = pack_gate_up_experts(experts_of("Q4_K", 3, 32, 256), experts_of("Q4_K", 3, 32, 256, 1), device)
    down = pack_experts(experts_of("Q8_0", 3, 32, 32), device)
    x, residual = ordinary_activations(3, 256).to(device), torch.randn(3, 32, device=device)
    norm = RMSNorm(torch.rand(32, device=device), EPS)
    routing = routing_of(chosen, device)
    gated = matvec_experts_glu(quantize_activations(x), routing, gate_up)
    both = matvec_experts_add(gated, routing, down, residual, norm)
    assert isinstance(both, RmsNormed) and isinstance(both.rms_normed, QuantizedActivations)
    for row in range(3):
        one, pairs = slice(row, row + 1), slice(2 * row, 2 * row + 2)
        alone = Routing(routing.experts[one], routing.weights[one])
        of_row = matvec_experts_glu(quantize_activations(x[one]), alone, gate_up)
        assert torch.equal(of_row.ints(), gated.ints()[pairs])
        y = matvec_experts_add(of_row, alone, down, residual[one], norm)
        assert isinstance(y, RmsNormed) and isinstance(y.rms_normed, QuantizedActivations)
        assert torch.equal(y.hidden, both.hidden[one])
        assert torch.equal(y.rms_normed.dequantize(), both.rms_normed.dequantize()[one])


def test_every_expert_of_many_on_one_row(device: torch.device) -> None:
    down = experts_of("Q8_0", 20, 32, 32)
    x, routing, residual = gated_rows(1, 20, 32), routing_of([list(range(20))], device), torch.randn(1, 32)
    y = matvec_experts_add(
        quantize_activations(x.to(device)), routing, pack_experts(down, device), residual.to(device)
    )
    assert isinstance(y, torch.Tensor)
    assert nmse(y, expected_add(x.view(1, 20, 32), routing, down, None, residual)) < FP32_NOISE


def test_eight_rows_each_with_an_expert_of_its_own(device: torch.device) -> None:
    gate, up, down = (experts_of("Q4_0", 8, 32, 32, seed) for seed in range(3))
    routing = routing_of([[7 - row] for row in range(8)], device)
    x, residual = ordinary_activations(8, 32) * 0.1, torch.randn(8, 32)
    gated = matvec_experts_glu(
        quantize_activations(x.to(device)), routing, pack_gate_up_experts(gate, up, device)
    )
    assert_rounded_close(gated, expected_glu(x, routing, gate, up, None, "silu"))
    y = matvec_experts_add(gated, routing, pack_experts(down, device), residual.to(device))
    assert isinstance(y, torch.Tensor)
    exact = gated.dequantize().cpu().view(8, 1, 32)
    assert nmse(y, expected_add(exact, routing, down, None, residual)) < FP32_NOISE


def test_what_is_not_finite_shows_in_its_own_row(device: torch.device) -> None:
    gate, up = experts_of("Q4_K", 2, 32, 256), experts_of("Q4_K", 2, 32, 256, 1)
    x, routing = ordinary_activations(2, 256), routing_of([[0, 1], [0, 1]], device)
    x[1, 5] = float("nan")
    y = matvec_experts_glu(
        quantize_activations(x.to(device)), routing, pack_gate_up_experts(gate, up, device)
    )
    assert y.dequantize()[:2].isfinite().all() and not y.dequantize()[2:].isfinite().any()
    down = pack_experts(experts_of("Q4_0", 2, 32, 32), device)
    hidden = matvec_experts_add(y, routing, down, torch.zeros(2, 32, device=device))
    assert isinstance(hidden, torch.Tensor)
    assert hidden[0].isfinite().all() and not hidden[1].isfinite().any()


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    experts = experts_of("Q4_0", 2, 32, 64)
    weights, routing = pack_gate_up_experts(experts, experts, device), routing_of([[0, 1]], device)
    with pytest.raises(ValueError, match=r"\[1, 32\], for these experts \[1, 64\]"):
        matvec_experts_glu(QuantizedActivations.empty(1, 32, device), routing, weights)
    x = QuantizedActivations.empty(1, 64, device)
    wrong = Routing(routing.experts.long(), routing.weights)
    with pytest.raises(ValueError, match="a routing is contiguous int32"):
        matvec_experts_glu(x, wrong, weights)
    with pytest.raises(ValueError, match="scratch holds 32 values, needs 64"):
        matvec_experts_glu(x, routing, weights, scratch=QuantizationScratch.empty(32, device))
    gated = QuantizedActivations.empty(2, 64, device)
    with pytest.raises(ValueError, match="residual must be"):
        matvec_experts_add(gated, routing, pack_experts(experts, device), torch.zeros(2, 32, device=device))
