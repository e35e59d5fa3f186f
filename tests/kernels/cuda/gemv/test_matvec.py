"""The matvec kernels against the q-dot's definition, for every format."""

import pytest
import torch

from quengine.kernels import activations as definition
from quengine.kernels.activations import ACTIVATION_MAX
from quengine.kernels.block_formats import FORMATS, dequantize, unpack
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_glu import matvec_glu
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.gemv.q_dot import MOST_UNROLLED
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.geometry import Geometry
from quengine.kernels.cuda.weights.layout import PACKED_FORMATS, packed_layout
from quengine.kernels.cuda.weights.packed import PackedPart, pack
from quengine.kernels.glu import Activation, glu
from quengine.kernels.q_dot import q_dot
from quengine.kernels.quant_tensor import QuantTensor
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

FP32_NOISE = 1e-12
"""The squared relative error that fp32 sums in another order may have against the same sum in fp64."""


def expected(x: torch.Tensor, weights: list[QuantTensor]) -> torch.Tensor:
    """The definition, its integers summed in fp64."""
    rounded = definition.quantize_activations(x)
    dots = [q_dot(rounded, unpack(w.format, w.data), torch.float64) for w in weights]
    return torch.cat(dots, dim=1)


def use_geometry(monkeypatch: pytest.MonkeyPatch, *geometry: int) -> None:
    monkeypatch.setattr("quengine.kernels.cuda.gemv.matvec.matvec_geometry", lambda *_: Geometry(*geometry))


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_every_format_gives_the_definition(name: str, device: torch.device) -> None:
    weight, x = ordinary_weight(name, 21, 512), ordinary_activations(1, 512)
    y = matvec(quantize_activations(x.to(device)), pack(weight, device))
    assert y.dtype == torch.float32
    assert nmse(y, expected(x, [weight])) < FP32_NOISE


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
def test_widths_that_are_no_whole_chunks(name: str, device: torch.device) -> None:
    weight, x = ordinary_weight(name, 16, 576), ordinary_activations(1, 576)
    y = matvec(quantize_activations(x.to(device)), pack(weight, device))
    assert nmse(y, expected(x, [weight])) < FP32_NOISE


@pytest.mark.parametrize(
    "geometry",
    [
        (1, 1, 1),
        (1, 4, 1),
        (2, 2, 3),
        (4, 1, 2),
        (1, 8, 2),
        (1, 4, 1, 0, True),
        (1, 2, 2, 0, True),
        (2, 1, 2, 64, True),
    ],
)
def test_every_geometry_gives_the_definition(
    geometry: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_geometry(monkeypatch, *geometry)
    weight, x = ordinary_weight("Q4_K", 40, 1280), ordinary_activations(1, 1280)
    y = matvec(quantize_activations(x.to(device)), pack(weight, device))
    assert nmse(y, expected(x, [weight])) < FP32_NOISE


@pytest.mark.parametrize(("name", "k_warps", "chunks"), [("Q4_K", 1, 9), ("Q6_K", 2, 17)])
def test_more_chunks_a_warp_than_are_unrolled(
    name: str, k_warps: int, chunks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_geometry(monkeypatch, 1, k_warps, 2)
    assert -(-chunks // k_warps) > MOST_UNROLLED.value
    weight, x = ordinary_weight(name, 16, 256 * chunks), ordinary_activations(1, 256 * chunks)
    y = matvec(quantize_activations(x.to(device)), pack(weight, device))
    assert nmse(y, expected(x, [weight])) < FP32_NOISE


def test_parts_of_different_formats_lie_side_by_side(device: torch.device) -> None:
    weights = [
        ordinary_weight("Q4_K", 40, 512),
        ordinary_weight("Q4_K", 16, 512, 1),
        ordinary_weight("Q6_K", 24, 512, 2),
    ]
    x = ordinary_activations(1, 512)
    y = matvec(quantize_activations(x.to(device)), pack(weights, device))
    assert nmse(y, expected(x, weights)) < FP32_NOISE


def test_three_formats_take_more_than_one_launch(device: torch.device) -> None:
    weights = [ordinary_weight(name, 16, 256) for name in ("Q4_K", "Q6_K", "Q5_K")]
    x = ordinary_activations(1, 256)
    y = matvec(quantize_activations(x.to(device)), pack(weights, device))
    assert nmse(y, expected(x, weights)) < FP32_NOISE


def test_the_residual_is_added_in_place(device: torch.device) -> None:
    weight, x = ordinary_weight("Q6_K", 40, 256), ordinary_activations(1, 256)
    residual = 100 * ordinary_activations(1, 40, seed=5)
    y = residual.clone().to(device)
    assert matvec(quantize_activations(x.to(device)), pack(weight, device), residual=y, out=y) is y
    assert nmse(y, expected(x, [weight]) + residual) < FP32_NOISE


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swish"])
@pytest.mark.parametrize(("name", "width"), [("Q4_K", 32), ("Q4_0", 64), ("Q6_K", 32)])
def test_glu_is_rounded_like_the_definition(
    name: str, width: int, activation: Activation, device: torch.device
) -> None:
    gate, up = ordinary_weight(name, width, 256), ordinary_weight(name, width, 256, 1)
    x = ordinary_activations(1, 256) * 0.1
    weight = pack([gate, up], device, paired=True)
    assert weight.paired
    y = matvec_glu(quantize_activations(x.to(device)), weight, activation)
    exact = glu(expected(x, [gate, up]), activation)
    assert_rounded_close(y, exact)


def assert_rounded_close(y: QuantizedActivations, exact: torch.Tensor) -> None:
    assert nmse(y.dequantize(), exact) < 1e-8
    assert torch.equal(y.sums.cpu(), y.ints().cpu().view(y.rows, -1, 16).sum(-1, dtype=torch.int32))
    assert int(y.ints().abs().view(y.rows, -1, 32).amax(-1).min()) == ACTIVATION_MAX


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swish"])
def test_glu_of_formats_that_cannot_share_tiles(activation: Activation, device: torch.device) -> None:
    gate, up = ordinary_weight("Q4_K", 32, 256), ordinary_weight("Q6_K", 32, 256, 1)
    x = ordinary_activations(1, 256) * 0.1
    y = matvec_glu(quantize_activations(x.to(device)), pack([gate, up], device, paired=True), activation)
    assert_rounded_close(y, glu(expected(x, [gate, up]), activation))


def test_a_paired_weight_still_gives_its_rows_in_order(device: torch.device) -> None:
    gate, up = ordinary_weight("Q4_K", 24, 256), ordinary_weight("Q4_K", 24, 256, 1)
    x = ordinary_activations(1, 256)
    y = matvec(quantize_activations(x.to(device)), pack([gate, up], device, paired=True))
    assert nmse(y, expected(x, [gate, up])) < FP32_NOISE


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_floats(name: str, device: torch.device) -> None:
    weights = [ordinary_weight(name, 13, 576), ordinary_weight("Q8_0", 16, 576)]
    x = ordinary_activations(1, 576)
    y = matvec(quantize_activations(x.to(device)), pack(weights, device))
    floats = (
        definition.quantize_activations(x).values()
        @ dequantize(weights[0].format, weights[0].data).double().T
    )
    assert nmse(y, torch.cat([floats, expected(x, weights[1:])], 1)) < FP32_NOISE


def test_a_scale_that_is_not_finite_shows(device: torch.device) -> None:
    weight, x = ordinary_weight("Q4_0", 16, 256), ordinary_activations(1, 256)
    x[0, 3] = float("nan")
    assert not matvec(quantize_activations(x.to(device)), pack(weight, device)).isfinite().any()


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    packed = pack(ordinary_weight("Q4_0", 16, 256), device)
    with pytest.raises(ValueError, match="takes 1 row"):
        matvec(QuantizedActivations.empty(2, 256, device), packed)
    with pytest.raises(ValueError, match="width 128"):
        matvec(QuantizedActivations.empty(1, 128, device), packed)
    with pytest.raises(ValueError, match="out must be"):
        matvec(QuantizedActivations.empty(1, 256, device), packed, out=torch.empty(1, 8, device=device))


def test_the_default_geometry_fits_every_shape() -> None:
    for cols in (256, 4096, 14336, 53248):
        part = pack(ordinary_weight("Q4_K", 16, cols), "cpu").parts[0]
        for kind in ("rows", "swiglu"):
            geometry = launch_table.default_geometry(part, kind)
            assert geometry.warps <= 32
            assert -(-part.chunks // geometry.k_warps) <= 16


@pytest.mark.parametrize(
    ("rows", "cols", "registers"), [(28672, 4096, 72), (24576, 4096, 80), (16384, 2048, 64)]
)
def test_the_default_limits_registers_so_that_programs_take_few_waves(
    rows: int, cols: int, registers: int
) -> None:
    layout, plane = packed_layout(FORMATS["Q4_K"], cols), torch.empty(0)
    part = PackedPart(layout, rows, cols, plane, plane, plane, plane, 1.0, 1.0)
    assert launch_table.default_geometry(part, "swiglu") == Geometry(1, 4, 1, registers, True)


@pytest.mark.parametrize(
    ("cols", "tiles", "k_warps"), [(2048, 1, 8), (4096, 1, 8), (2560, 2, 2), (576, 4, 1)]
)
def test_an_output_matrix_has_a_tile_a_program_where_its_chunks_are_shared_evenly(
    cols: int, tiles: int, k_warps: int
) -> None:
    layout, plane = packed_layout(FORMATS["Q6_K"], cols), torch.empty(0)
    part = PackedPart(layout, 128256, cols, plane, plane, plane, plane, 1.0, 1.0)
    geometry = launch_table.default_geometry(part, "rows")
    assert (geometry.tiles, geometry.k_warps) == (tiles, k_warps)


@pytest.mark.parametrize("geometry", [(1, 2, 1), (2, 1, 1), (4, 1, 2), (8, 2, 1)])
def test_every_geometry_of_glu_rounds_whole_groups(
    geometry: tuple[int, int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_geometry(monkeypatch, *geometry)
    gate, up = ordinary_weight("Q4_K", 32, 256), ordinary_weight("Q4_K", 32, 256, 1)
    x = ordinary_activations(1, 256) * 0.1
    scratch = QuantizationScratch.empty(2 * 32, device)
    weight = pack([gate, up], device, paired=True)
    for _ in range(2):
        y = matvec_glu(quantize_activations(x.to(device)), weight, scratch=scratch)
        assert_rounded_close(y, glu(expected(x, [gate, up])))
    assert bool((scratch.words == -1).all())
