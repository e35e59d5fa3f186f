"""The prefill matmuls against the exact product of what is stored, for every format."""

import pytest
import torch

from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda import matmul as module
from quengine.kernels.cuda import matmul_fused
from quengine.kernels.cuda.expand import dequantize_part
from quengine.kernels.cuda.half import HalfRows, half_rows, half_rows_in_place
from quengine.kernels.cuda.launch_table import FusedGeometry
from quengine.kernels.cuda.layout import PACKED_FORMATS
from quengine.kernels.cuda.matmul import (
    MatmulWorkspace,
    matmul,
    matmul_norm,
    matmul_swiglu,
)
from quengine.kernels.cuda.packed import PackedPart, pack
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.swiglu import swiglu
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

FP16_ROUNDING = 5e-7
"""Two operands of 11 bits: about 2 * 2^-24 / 3 of the squared size, with room for small sums of large terms."""


def expected(x: torch.Tensor, weights: list[QuantTensor]) -> torch.Tensor:
    return x.double() @ torch.cat([dequantize(w.format, w.data) for w in weights]).double().T


def workspace(device: torch.device, weights: int = 1 << 16) -> MatmulWorkspace:
    return MatmulWorkspace(weights, device)


@pytest.fixture(params=["fused", "expanded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "fused_limit", lambda: 64 if request.param == "fused" else 0)
    return str(request.param)


@pytest.mark.parametrize("name", PACKED_FORMATS)
@pytest.mark.usefixtures("way")
def test_every_format_within_fp16_rounding(name: str, device: torch.device) -> None:
    weight, x = ordinary_weight(name, 21, 256), ordinary_activations(9, 256)
    y = matmul(x.to(device), pack(weight, device), workspace(device))
    assert nmse(y, expected(x, [weight])) < FP16_ROUNDING


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_expanded_weights_are_rounded_once(name: str, device: torch.device) -> None:
    weight = ordinary_weight(name, 21, 256)
    (part,) = pack(weight, device).parts
    assert isinstance(part, PackedPart)
    out = torch.empty(21, 256, dtype=torch.float16, device=device)
    exact = dequantize(weight.format, weight.data) * part.gain
    assert torch.allclose(dequantize_part(part, False, out).cpu().float(), exact, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
@pytest.mark.usefixtures("way")
def test_rows_of_any_size_keep_their_accuracy(scale: float, device: torch.device) -> None:
    weight, x = ordinary_weight("Q4_0", 16, 64), ordinary_activations(3, 64)
    x[1] *= scale
    y = matmul(x.to(device), pack(weight, device), workspace(device))
    for ours, exact in zip(y, expected(x, [weight]), strict=True):
        assert nmse(ours, exact) < FP16_ROUNDING


@pytest.mark.parametrize("shape", [(10, 576), (17, 640)])
@pytest.mark.usefixtures("way")
def test_widths_that_are_no_whole_chunks(shape: tuple[int, int], device: torch.device) -> None:
    weight, x = ordinary_weight("Q5_1", 24, shape[1]), ordinary_activations(*shape)
    y = matmul(x.to(device), pack(weight, device), workspace(device))
    assert nmse(y, expected(x, [weight])) < FP16_ROUNDING


@pytest.mark.usefixtures("way")
def test_parts_and_residual(device: torch.device) -> None:
    weights = [
        ordinary_weight("Q4_K", 32, 256),
        ordinary_weight("Q6_K", 16, 256),
        ordinary_weight("F16", 5, 256),
    ]
    x, residual = ordinary_activations(9, 256), ordinary_activations(9, 53, seed=4)
    y = matmul(x.to(device), pack(weights, device), workspace(device), residual=residual.to(device))
    assert nmse(y, expected(x, weights) + residual) < FP16_ROUNDING


def test_a_small_workspace_expands_some_rows_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "fused_limit", lambda: 0)
    weight, x = ordinary_weight("Q4_K", 72, 256), ordinary_activations(9, 256)
    y = matmul(x.to(device), pack(weight, device), workspace(device, 40 * 256))
    assert nmse(y, expected(x, [weight])) < FP16_ROUNDING
    with pytest.raises(ValueError, match="workspace expands"):
        matmul(x.to(device), pack(weight, device), workspace(device, 15 * 256))


def test_parts_of_different_size_share_one_product(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "fused_limit", lambda: 0)
    products = []
    multiply = module._products
    monkeypatch.setattr(module, "_products", lambda x, w: products.append(w.shape) or multiply(x, w))
    weights = [ordinary_weight("Q4_K", 32, 256), ordinary_weight("Q6_K", 21, 256)]
    packed = pack(weights, device)
    assert len({part.gain for part in packed.parts if isinstance(part, PackedPart)}) == 2
    x = ordinary_activations(9, 256)
    y = matmul(x.to(device), packed, workspace(device))
    assert nmse(y, expected(x, weights)) < FP16_ROUNDING
    assert products == [(53, 256)]


@pytest.mark.parametrize("room", [1 << 16, 20 * 256])
@pytest.mark.usefixtures("way")
def test_swiglu_of_a_paired_weight(room: int, device: torch.device) -> None:
    gate, up = ordinary_weight("Q4_K", 24, 256), ordinary_weight("Q4_K", 24, 256, 1)
    x = ordinary_activations(9, 256) * 0.1
    y = matmul_swiglu(x.to(device), pack([gate, up], device, paired=True), workspace(device, room))
    rows = y.dequantize(24) if isinstance(y, HalfRows) else y
    assert nmse(rows, swiglu(expected(x, [gate, up]))) < 4 * FP16_ROUNDING


@pytest.mark.parametrize("rows", [9, 33])
@pytest.mark.usefixtures("way")
def test_the_norm_behind_a_matmul(rows: int, device: torch.device) -> None:
    weight, x = ordinary_weight("Q4_K", 64, 256), ordinary_activations(rows, 256)
    residual, norm = torch.randn(rows, 64), torch.rand(64) + 0.5
    hidden, normed = matmul_norm(
        x.to(device), pack(weight, device), workspace(device), residual.to(device), norm.to(device), 1e-5
    )
    exact = expected(x, [weight]) + residual
    assert nmse(hidden, exact) < FP16_ROUNDING
    assert nmse(normed.dequantize(64), rms_norm(exact, norm.double(), 1e-5)) < 4 * FP16_ROUNDING


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        ("Q4_K", FusedGeometry(1, 2, 2, 1)),
        ("Q6_K", FusedGeometry(1, 1, 1, 1, splits=2)),
        ("Q8_0", FusedGeometry(2, 2, 1, 2, splits=2, ahead=False)),
    ],
)
def test_every_way_to_share_a_product_gives_it(
    geometry: FusedGeometry, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_fused, "fused_geometry", lambda *_: geometry)
    weight, x = ordinary_weight(name, 24, 512), ordinary_activations(9, 512)
    residual = ordinary_activations(9, 24, 3)
    room = workspace(device)
    for _ in range(2):  # the second launch finds the tickets as the first one found them
        y = matmul(x.to(device), pack(weight, device), room, residual.to(device))
        assert nmse(y, expected(x, [weight]) + residual) < FP16_ROUNDING


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    weight, x = pack(ordinary_weight("Q4_K", 32, 512), device), ordinary_activations(6, 512)
    other = x.clone()
    other[:4] *= 1e6
    room = workspace(device)
    ours, again = matmul(x.to(device), weight, room), matmul(other.to(device), weight, room)
    assert torch.equal(ours[4:], again[4:])


@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (9, 576), (17, 256)])
def test_tiled_rows_are_the_rows(rows: int, cols: int, device: torch.device) -> None:
    x = ordinary_activations(rows, cols).to(device)
    plain, tiled = half_rows(x), half_rows(x, HalfRows.empty_tiled(rows, cols, device))
    assert torch.equal(tiled.row_major(cols), plain.values) and torch.equal(tiled.unscale, plain.unscale)
    assert torch.equal(plain.as_tiled().row_major(cols), plain.values)


def test_short_batches_keep_their_room_when_a_long_prompt_comes(device: torch.device) -> None:
    room = workspace(device)
    few = room.half_rows(3, 256)
    room.half_rows(2048, 256)
    assert room.half_rows(100, 256).values.data_ptr() == few.values.data_ptr()


@pytest.mark.parametrize("cols", [96, 576, 4160])
def test_half_rows_over_the_rows_themselves(cols: int, device: torch.device) -> None:
    x = ordinary_activations(5, cols).to(device)
    wanted = half_rows(x)
    found = half_rows_in_place(x, torch.empty(5, device=device))
    assert torch.equal(found.values, wanted.values) and torch.equal(found.unscale, wanted.unscale)


def test_half_rows_fill_the_range_of_fp16(device: torch.device) -> None:
    x = ordinary_activations(4, 96)
    x[1] *= 1e-20
    x[2] *= 1e20
    x[3] = 0
    half = half_rows(x.to(device))
    peaks = half.values.cpu().float().abs().amax(1)
    assert ((peaks[:3] >= 2**13) & (peaks[:3] <= 2**14)).all()
    assert nmse(half.values.cpu().double()[1] * half.unscale.cpu().double()[1], x[1]) < 1e-7
    assert not half.values[3].any()
