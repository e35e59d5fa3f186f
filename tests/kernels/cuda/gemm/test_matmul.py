"""The prefill matmuls against the exact product of what is stored, for every format."""

from collections.abc import Callable

import pytest
import torch

from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.cuda.gemm import matmul as module
from quengine.kernels.cuda.gemm import matmul_fused, matmul_wgmma
from quengine.kernels.cuda.gemm import workspace as workspace_module
from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    operand_shape,
    to_fp16_operand,
    to_wgmma_layout,
)
from quengine.kernels.cuda.gemm.matmul import matmul, matmul_glu, matmul_norm, paired_matmul
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.cuda.rms_norm import rms_norm_fp16
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.dequantize import dequantize_part
from quengine.kernels.cuda.weights.geometry import FusedGeometry, WgmmaGeometry
from quengine.kernels.cuda.weights.launch_table import wgmma_geometry
from quengine.kernels.cuda.weights.layout import PACKED_FORMATS, packed_layout
from quengine.kernels.cuda.weights.packed import PackedPart, pack
from quengine.kernels.glu import Activation, glu
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm, rms_norm
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

FP16_ROUNDING = 5e-7
"""Two operands of 11 bits: about 2 * 2^-24 / 3 of the squared size, with room for small sums of large terms."""


ROUNDED_ONCE = 8e-8
"""One operand of 11 bits: a last bit's square over 12, 2^-20 / 12 of the squared size where mantissas are near 1."""


def expected(x: torch.Tensor, weights: list[QuantTensor]) -> torch.Tensor:
    return x.double() @ torch.cat([dequantize(w.format, w.data) for w in weights]).double().T


def workspace(device: torch.device, weights: int = 1 << 16) -> MatmulWorkspace:
    return MatmulWorkspace(weights, device)


@pytest.fixture
def hopper_takes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[[WgmmaGeometry], None]:
    """Gives Hopper's matmul a geometry."""
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    return lambda geometry: monkeypatch.setattr(matmul_wgmma, "wgmma_geometry", lambda *_: geometry)


@pytest.fixture(params=["fused", "wgmma", "dequantized"])
def way(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "wgmma" and not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    if request.param == "fused":
        monkeypatch.setattr(workspace_module, "is_hopper", lambda *_: False)
    monkeypatch.setattr(
        workspace_module, "fused_limit", lambda _: 0 if request.param == "dequantized" else 64
    )
    return str(request.param)


@pytest.mark.parametrize("name", PACKED_FORMATS)
@pytest.mark.usefixtures("way")
def test_every_format_within_fp16_rounding(name: str, device: torch.device) -> None:
    weight, x = ordinary_weight(name, 21, 256), ordinary_activations(9, 256)
    y = matmul(x.to(device), pack(weight, device), workspace(device))
    assert nmse(y, expected(x, [weight])) < FP16_ROUNDING


@pytest.mark.parametrize("name", PACKED_FORMATS)
@pytest.mark.usefixtures("way")
def test_of_an_exact_matmul_weights_are_rounded_once(name: str, device: torch.device) -> None:
    """The rest of the error is that of the rows, which are kept from rounding here."""
    weight, x = ordinary_weight(name, 21, 256), ordinary_activations(9, 256).half().float()
    y = matmul(x.to(device), pack(weight, device), workspace(device), exact=True)
    assert nmse(y, expected(x, [weight])) < ROUNDED_ONCE


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_expanded_weights_are_rounded_once(name: str, device: torch.device) -> None:
    weight = ordinary_weight(name, 21, 256)
    (part,) = pack(weight, device).parts
    assert isinstance(part, PackedPart)
    out = torch.empty(21, 256, dtype=torch.float16, device=device)
    exact = dequantize(weight.format, weight.data) * part.weight_scale
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


def test_a_small_workspace_dequantizes_some_rows_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "fused_limit", lambda _: 0)
    weight, x = ordinary_weight("Q4_K", 72, 256), ordinary_activations(9, 256)
    y = matmul(x.to(device), pack(weight, device), workspace(device, 40 * 256))
    assert nmse(y, expected(x, [weight])) < FP16_ROUNDING
    with pytest.raises(ValueError, match="workspace dequantizes"):
        matmul(x.to(device), pack(weight, device), workspace(device, 15 * 256))


def test_parts_of_different_size_share_one_product(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "fused_limit", lambda _: 0)
    products = []
    multiply = module._multiply
    monkeypatch.setattr(
        module, "_multiply", lambda x, w, *rest: products.append(w.shape) or multiply(x, w, *rest)
    )
    weights = [ordinary_weight("Q4_K", 32, 256), ordinary_weight("Q6_K", 21, 256)]
    packed = pack(weights, device)
    assert len({part.weight_scale for part in packed.parts if isinstance(part, PackedPart)}) == 2
    x = ordinary_activations(9, 256)
    y = matmul(x.to(device), packed, workspace(device))
    assert nmse(y, expected(x, weights)) < FP16_ROUNDING
    assert products == [(53, 256)]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize("room", [1 << 16, 20 * 256])
@pytest.mark.usefixtures("way")
def test_glu_of_a_paired_weight(activation: Activation, room: int, device: torch.device) -> None:
    gate, up = ordinary_weight("Q4_K", 24, 256), ordinary_weight("Q4_K", 24, 256, 1)
    x = ordinary_activations(9, 256) * 0.1
    weight = pack([gate, up], device, paired=True)
    y = matmul_glu(x.to(device), weight, workspace(device, room), activation)
    rows = y.dequantize(24) if isinstance(y, Fp16Operand) else y
    assert nmse(rows, glu(expected(x, [gate, up]), activation)) < 4 * FP16_ROUNDING


@pytest.mark.parametrize(("size", "width"), [(1e-12, 24), (1e-4, 128), (0.02, 24), (0.02, 128)])
@pytest.mark.usefixtures("way")
def test_the_clamped_swish_of_rows_of_any_size(size: float, width: int, device: torch.device) -> None:
    """Near the clamps, fp16's error of a gate is large beside its product."""
    gate, up = ordinary_weight("Q4_K", width, 256), ordinary_weight("Q4_K", width, 256, 1)
    x = size * ordinary_activations(9, 256)
    weight = pack([gate, up], device, paired=True)
    y = matmul_glu(x.to(device), weight, workspace(device), "clamped_swish")
    rows = y.dequantize(width) if isinstance(y, Fp16Operand) else y
    exact = glu(expected(x, [gate, up]), "clamped_swish")
    assert (exact.abs().max() > 30) == (size == 0.02)
    assert nmse(rows, exact) < 10 * FP16_ROUNDING


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.usefixtures("way")
def test_glu_of_rows_of_any_size(activation: Activation, size: float, device: torch.device) -> None:
    """One row is all in one column, as far from the bound that scales the result as a row can be; one is zero."""
    gate, up = ordinary_weight("Q4_K", 24, 256), ordinary_weight("Q4_K", 24, 256, 1)
    x = ordinary_activations(9, 256)
    x[3] *= 1e-3
    x[3, 17] = 100.0
    x[4] = 0.0
    weight = pack([gate, up], device, paired=True)
    y = matmul_glu((size * x).to(device), weight, workspace(device), activation)
    rows = y.dequantize(24) if isinstance(y, Fp16Operand) else y
    exact = glu(expected(size * x, [gate, up]), activation)
    live = [0, 1, 2, 3, 5, 6, 7, 8]
    assert nmse(rows[live], exact[live]) < 20 * FP16_ROUNDING and not rows[4].any()


@pytest.mark.parametrize("rows", [9, 33])
@pytest.mark.usefixtures("way")
def test_the_norm_behind_a_matmul(rows: int, device: torch.device) -> None:
    weight, x = ordinary_weight("Q4_K", 64, 256), ordinary_activations(rows, 256)
    residual, norm = torch.randn(rows, 64), torch.rand(64) + 0.5
    exact = expected(x, [weight]) + residual
    hidden, normed = matmul_norm(
        x.to(device),
        pack(weight, device),
        workspace(device),
        residual.to(device),
        RMSNorm(norm.to(device), 1e-5),
    )
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
    monkeypatch.setattr(workspace_module, "is_hopper", lambda *_: False)
    monkeypatch.setattr(matmul_fused, "fused_geometry", lambda *_: geometry)
    weight, x = ordinary_weight(name, 24, 512), ordinary_activations(9, 512)
    residual = ordinary_activations(9, 24, 3)
    room = workspace(device)
    for _ in range(2):  # the second launch finds the arrivals as the first one found them
        y = matmul(x.to(device), pack(weight, device), room, residual.to(device))
        assert nmse(y, expected(x, [weight]) + residual) < FP16_ROUNDING


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "F16"])
@pytest.mark.parametrize(
    ("rows", "geometry"),
    [
        (3, WgmmaGeometry(4, 1, 4, True)),
        (17, WgmmaGeometry(4, 3, 4, False)),
        (64, WgmmaGeometry(8, 2, 3, False)),
        (127, WgmmaGeometry(8, 5, 3, True)),
        (40, WgmmaGeometry(16, 1, 6, False, 128)),
        (5, WgmmaGeometry(4, 8, 2, True, 0, 256)),
        (32, WgmmaGeometry(4, 2, 3, False, 128, 256)),
        (61, WgmmaGeometry(4, 8, 3, False, 128)),  # eight programs add 8 rows each
        (127, WgmmaGeometry(4, 6, 3, True)),  # of six programs four
    ],
)
def test_hopper_shares_a_product_too(
    rows: int,
    geometry: WgmmaGeometry,
    name: str,
    device: torch.device,
    hopper_takes: Callable[[WgmmaGeometry], None],
) -> None:
    hopper_takes(geometry)
    weight, x = ordinary_weight(name, 200, 2048), ordinary_activations(rows, 2048)
    residual, room = ordinary_activations(rows, 200, 3), workspace(device, 1 << 20)
    for _ in range(2):
        y = matmul(x.to(device), pack(weight, device), room, residual.to(device))
        assert nmse(y, expected(x, [weight]) + residual) < FP16_ROUNDING


@pytest.mark.parametrize("rows", [17, 64, 127])
@pytest.mark.parametrize("splits", [3, 8])
def test_the_bits_are_the_same_where_no_program_waits(
    rows: int,
    splits: int,
    device: torch.device,
    hopper_takes: Callable[[WgmmaGeometry], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a part of a GPU that runs too few programs; both ways leave the counters as they found them."""
    hopper_takes(WgmmaGeometry(4, splits, 3, False, 128))
    weight, x = pack(ordinary_weight("Q4_K", 200, 4096), device), ordinary_activations(rows, 4096).to(device)
    room, results = workspace(device, 1 << 20), list[torch.Tensor]()
    for together in (True, False, True, False):
        monkeypatch.setattr(matmul_wgmma, "runs_together", lambda _, together=together: together)
        results.append(matmul(x, weight, room).clone())
        assert not room.scratch.arrivals.any()
    assert all(torch.equal(results[0], y) for y in results)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
@pytest.mark.usefixtures("way")
def test_scales_of_zero_are_zero_whatever_they_multiply(name: str, device: torch.device) -> None:
    """Nothing bounds the super-scale of a block whose scales are all zero: it says nothing about the weights."""
    weight, x = ordinary_weight(name, 64, 512), ordinary_activations(20, 512)
    blocks = weight.data.view(64, 2, -1)
    huge = torch.tensor([60000.0, -60000.0], dtype=torch.float16).view(torch.uint8)
    blocks[:, 1, :4], blocks[:, 1, 4:16] = huge, 0
    y = matmul(x.to(device), pack(weight, device), workspace(device))
    assert nmse(y, expected(x, [weight])) < FP16_ROUNDING


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("rows", "geometry"),
    [
        (70, WgmmaGeometry(4, 4, 3, True, 0, 128)),
        (127, WgmmaGeometry(8, 5, 3, True)),
        (300, WgmmaGeometry(8, 4, 3, block=256, groups=True)),
        (300, WgmmaGeometry(4, 2, 3, block=128)),
    ],
    ids=str,
)
def test_a_norm_adds_the_rows_of_splits(
    rows: int,
    geometry: WgmmaGeometry,
    exact: bool,
    device: torch.device,
    hopper_takes: Callable[[WgmmaGeometry], None],
) -> None:
    """The bits are those of the launches one by one, twice, and where the sum is stored elsewhere."""
    hopper_takes(geometry)
    weight, x = pack(ordinary_weight("Q4_K", 200, 2048), device), ordinary_activations(rows, 2048).to(device)
    residual, room = ordinary_activations(rows, 200, 3).to(device), workspace(device, 1 << 20)
    norm = RMSNorm((torch.rand(200) + 0.5).to(device), 1e-5)
    total = matmul(x, weight, room, residual, True, exact)
    normed = rms_norm_fp16(total, norm.weight, norm.eps, room.fp16_operand(rows, 200)).dequantize(200)
    for _ in range(2):
        kept = residual.clone()
        hidden, following = matmul_norm(x, weight, room, kept, norm, True, exact)
        assert hidden is kept
        assert torch.equal(hidden, total) and torch.equal(following.dequantize(200), normed)


@pytest.mark.parametrize("names", [("Q4_K", "Q6_K"), ("IQ4_NL",), ("Q8_0", "F16")], ids="+".join)
@pytest.mark.parametrize(
    "geometry",
    [
        WgmmaGeometry(8, 1, 3, True, block=256),
        WgmmaGeometry(8, 1, 2, False, block=256),
        WgmmaGeometry(8, 1, 3, True, block=128),
        WgmmaGeometry(4, 1, 3, True, block=128),
        WgmmaGeometry(8, 3, 3, True, block=128, in_turn=True),
        WgmmaGeometry(8, 1, 3, block=256, groups=True),
        WgmmaGeometry(8, 2, 3, block=256, whole=1, groups=True),
        WgmmaGeometry(8, 3, 3, block=256),
        WgmmaGeometry(4, 2, 3, block=128, whole=3),
    ],
    ids=str,
)
def test_on_hopper_many_rows_are_multiplied_in_blocks(
    geometry: WgmmaGeometry,
    names: tuple[str, ...],
    device: torch.device,
    hopper_takes: Callable[[WgmmaGeometry], None],
) -> None:
    """More blocks than multiprocessors, and fewer; rows and weights that fill none; a residual in its place."""
    hopper_takes(geometry)
    for rows, sizes in ((130, (200, 2048)), (300, (1000, 512)), (1500, (4500, 256)), (257, (72, 128))):
        known = [name for name in names if sizes[1] % FORMATS[name].block == 0]
        weights = [ordinary_weight(name, *sizes, seed=seed) for seed, name in enumerate(known)]
        if not weights:
            continue
        x = ordinary_activations(rows, sizes[1])
        weight, room = pack(weights, device), workspace(device, 1 << 20)
        exact = (x.to(device).double() @ expected(torch.eye(sizes[1]), weights).to(device)).cpu()
        assert nmse(matmul(x.to(device), weight, room, pdl=True), exact) < FP16_ROUNDING
        residual = ordinary_activations(rows, weight.rows, 3).to(device)
        kept = residual.clone()
        norm = torch.ones(weight.rows, device=device)
        hidden, _ = matmul_norm(x.to(device), weight, room, residual, RMSNorm(norm, 1e-5), pdl=True)
        assert nmse(hidden, exact + kept.cpu()) < FP16_ROUNDING


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize(
    ("rows", "geometry"),
    [
        (3, WgmmaGeometry(4, 1, 2, True, 0, 256)),
        (17, WgmmaGeometry(4, 2, 2, False, 128, 256)),
        (64, WgmmaGeometry(4, 1, 3, False, 128)),
        (40, WgmmaGeometry(8, 2, 3, False)),
        (64, WgmmaGeometry(4, 2, 3, False, 128)),
        (127, WgmmaGeometry(16, 1, 3, True)),
    ],
)
def test_on_hopper_glu_of_few_rows(
    rows: int,
    geometry: WgmmaGeometry,
    name: str,
    activation: Activation,
    device: torch.device,
    hopper_takes: Callable[[WgmmaGeometry], None],
) -> None:
    """Every place of the result is written, and none behind its rows."""
    hopper_takes(geometry)
    for width in (128, 1408):
        gate, up = ordinary_weight(name, width, 512), ordinary_weight(name, width, 512, 1)
        x, room = ordinary_activations(rows, 512) * 0.1, workspace(device, 1 << 20)
        room.glu_operand(rows, width).values.fill_(float("nan"))
        weight = pack([gate, up], device, paired=True)
        made = matmul_glu(x.to(device), weight, room, activation, pdl=True)
        assert isinstance(made, Fp16Operand) and made.is_wgmma and made.values[rows:].isnan().all()
        assert nmse(made.dequantize(width), glu(expected(x, [gate, up]), activation)) < 4 * FP16_ROUNDING


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_two_groups_of_warps_take_every_type(
    name: str, device: torch.device, hopper_takes: Callable[[WgmmaGeometry], None]
) -> None:
    hopper_takes(WgmmaGeometry(8, 2, 3, block=256, whole=3, groups=True))
    weight, x = ordinary_weight(name, 520, 1024), ordinary_activations(300, 1024)
    y = matmul(x.to(device), pack(weight, device), workspace(device, 1 << 20), pdl=True)
    assert nmse(y, expected(x, [weight])) < FP16_ROUNDING


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize(
    "geometry",
    [
        *(WgmmaGeometry(warps, 1, 3, True, block=block) for warps in (4, 8) for block in (128, 256)),
        WgmmaGeometry(8, 2, 3, block=256, whole=5, groups=True),
    ],
    ids=str,
)
def test_on_hopper_glu_of_many_rows(
    geometry: WgmmaGeometry, activation: Activation, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(matmul_wgmma, "wgmma_geometry", lambda *_: geometry)
    for rows, width in ((130, 384), (1000, 3328)):
        gate, up = ordinary_weight("Q4_K", width, 256), ordinary_weight("Q4_K", width, 256, 1)
        x = ordinary_activations(rows, 256) * 0.1
        weight = pack([gate, up], device, paired=True)
        made = matmul_glu(x.to(device), weight, workspace(device, 1 << 20), activation, pdl=True)
        assert isinstance(made, Fp16Operand) and made.is_wgmma
        exact = glu(expected(x, [gate, up]), activation)
        assert nmse(made.dequantize(width), exact) < 4 * FP16_ROUNDING
        assert torch.equal(
            made.values[:rows], Fp16Operand(made.row_major(width), made.row_scale).as_wgmma().values[:rows]
        )


def test_on_hopper_blocks_of_rows_have_the_same_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    weight, x = pack(ordinary_weight("Q6_K", 3000, 2048), device), ordinary_activations(700, 2048).to(device)
    made = []
    geometries = [
        *(WgmmaGeometry(warps, 1, 3, True, block=block) for warps, block in ((8, 256), (8, 128), (4, 128))),
        WgmmaGeometry(8, 1, 3, block=256, groups=True),
    ]
    for geometry in geometries:
        monkeypatch.setattr(matmul_wgmma, "wgmma_geometry", lambda *_, g=geometry: g)
        made += [matmul(x, weight, workspace(device), pdl=True) for _ in range(5)]
    assert all(torch.equal(each, made[0]) for each in made)


def test_on_hopper_a_row_of_up_to_64_does_not_depend_on_how_many_there_are(device: torch.device) -> None:
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    for shape in (("Q4_K", 4096, 4096), ("Q4_K", 4096, 14336), ("Q6_K", 4096, 14336), ("Q6_K", 300, 2048)):
        weight = pack(ordinary_weight(*shape), device)
        x, room = ordinary_activations(64, shape[2]).to(device), workspace(device)
        most = matmul(x, weight, room)
        for rows in (1, 2, 9, 30, 63):
            assert torch.equal(matmul(x[:rows].contiguous(), weight, room), most[:rows])


def test_on_hopper_parts_of_a_matrix_run_beside_each_other(device: torch.device) -> None:
    """The second part does not wait for the first, but for what both read, here the norm in front of them, and for the
    room for their sums: all parts have several shares."""
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    parts = [
        ordinary_weight(*shape) for shape in (("Q4_K", 512, 2048), ("Q6_K", 256, 2048), ("Q5_0", 80, 2048))
    ]
    weight, norm = pack(parts, device), torch.ones(2048, device=device)
    x, room = ordinary_activations(30, 2048).to(device), workspace(device)
    rows = [x * 2.0**i + i for i in range(5)]
    exact = [
        matmul(rms_norm_fp16(row, norm, 1e-5, room.fp16_operand(30, 2048)), weight, room) for row in rows
    ]
    for _ in range(20):
        made = []
        for row in rows:
            normed = rms_norm_fp16(row, norm, 1e-5, room.fp16_operand(30, 2048), pdl=True)
            made.append(matmul(normed, weight, room, pdl=True))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(made, exact, strict=True))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rows", [2, 16, 30, 64, 127])
def test_on_hopper_a_matrix_of_two_parts_is_one_launch(
    rows: int, exact: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(module, "launch_wgmma", None)
    room = workspace(device)
    for shapes in (
        (("Q4_K", 5120), ("Q6_K", 1024)),
        (("Q6_K", 72), ("IQ4_NL", 200)),
        (("Q8_0", 16), ("Q4_K", 640)),
    ):
        parts = [ordinary_weight(name, count, 1024, seed) for seed, (name, count) in enumerate(shapes)]
        weight, x = pack(parts, device), ordinary_activations(rows, 1024)
        made = [matmul(x.to(device), weight, room, pdl=True, exact=exact) for _ in range(3)]
        assert nmse(made[0], expected(x, parts)) < FP16_ROUNDING
        assert all(torch.equal(each, made[0]) for each in made)


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    weight, x = pack(ordinary_weight("Q4_K", 32, 512), device), ordinary_activations(6, 512)
    other = x.clone()
    other[:4] *= 1e6
    room = workspace(device)
    ours, again = matmul(x.to(device), weight, room), matmul(other.to(device), weight, room)
    assert torch.equal(ours[4:], again[4:])


@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (9, 576), (17, 256)])
def test_the_mma_layout_holds_the_rows(rows: int, cols: int, device: torch.device) -> None:
    x = ordinary_activations(rows, cols).to(device)
    plain, tiled = (
        to_fp16_operand(x),
        to_fp16_operand(x, Fp16Operand.empty(rows, cols, device, OperandLayout.MMA)),
    )
    assert torch.equal(tiled.row_major(cols), plain.values) and torch.equal(tiled.row_scale, plain.row_scale)
    assert torch.equal(plain.as_mma().row_major(cols), plain.values)


def test_the_wgmma_layout_holds_the_rows(device: torch.device) -> None:
    x = ordinary_activations(9, 384).to(device)
    plain, ordered = (
        to_fp16_operand(x),
        to_fp16_operand(x, Fp16Operand.empty(9, 384, device, OperandLayout.WGMMA)),
    )
    assert torch.equal(ordered.row_major(384), plain.values)
    assert torch.equal(plain.as_wgmma().values[:9], ordered.values[:9])
    lane, instruction = 2, 13  # columns of one lane of the quad in one instruction of 16
    first = instruction // 8 * 128 + lane * 32 + instruction % 8 * 4
    at = 16 * instruction + 2 * lane
    assert torch.equal(ordered.values[:9, [at, at + 1, at + 8, at + 9]], plain.values[:, first : first + 4])


def test_short_batches_keep_their_room_when_a_long_prompt_comes(device: torch.device) -> None:
    room = workspace(device)
    few = room.fp16_operand(3, 256)
    room.fp16_operand(2048, 256)
    assert room.fp16_operand(100, 256).values.data_ptr() == few.values.data_ptr()


def test_a_longer_chunk_takes_the_room_of_a_shorter_one_along(device: torch.device) -> None:
    room = workspace(device)
    for rows, width in ((512, 64), (512, 96), (2048, 64)):
        room.product(rows, width).fill_(rows)
    long, short = room.product(2048, 64), room.product(512, 64)
    assert (long == 2048).all() and (short == 2048).all()
    assert short.data_ptr() == long.data_ptr() and short.shape == (512, 64)
    for rows in range(129, 300):  # more lengths than views are kept of
        assert room.product(rows, 64).data_ptr() == long.data_ptr()


def test_operands_fill_the_range_of_fp16(device: torch.device) -> None:
    x = ordinary_activations(4, 96)
    x[1] *= 1e-20
    x[2] *= 1e20
    x[3] = 0
    half = to_fp16_operand(x.to(device))
    peaks = half.values.cpu().float().abs().amax(1)
    assert ((peaks[:3] >= 2**13) & (peaks[:3] <= 2**14)).all()
    assert nmse(half.values.cpu().double()[1] * half.row_scale.cpu().double()[1], x[1]) < 1e-7
    assert not half.values[3].any()


def test_row_major_values_are_copied_to_the_wgmma_layout(device: torch.device) -> None:
    rows, cols = 9, 1280
    plain = to_fp16_operand(ordinary_activations(rows, cols).to(device))
    room = torch.zeros(operand_shape(rows, cols, OperandLayout.WGMMA), dtype=torch.float16, device=device)
    ordered = to_wgmma_layout(plain, room)
    assert ordered.is_wgmma and torch.equal(ordered.values[:rows], plain.as_wgmma().values[:rows])
    assert ordered.row_scale is plain.row_scale and torch.equal(ordered.row_major(cols), plain.values)


def test_weights_have_a_buffer_once_some_are_dequantized(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x, room = (
        pack(ordinary_weight("Q4_0", 16, 64), device), ordinary_activations(3, 64).to(device), workspace(device)
    )  # fmt: skip
    for limit in (64, 0):
        monkeypatch.setattr(workspace_module, "fused_limit", lambda _, limit=limit: limit)
        held = room.nbytes
        matmul(x, weight, room)
        assert (room.nbytes - held >= 2 * room.max_weights) == (limit == 0)


@pytest.mark.parametrize(("packed", "form"), [(True, OperandLayout.MMA), (False, OperandLayout.ROW_MAJOR)])
def test_many_rows_of_a_model_of_floats_stay_in_order(
    packed: bool, form: OperandLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "fused_limit", lambda _: 4096)
    room = MatmulWorkspace(0, "cpu", packed=packed)
    assert room.layout(129) is form and room.layout(128) is OperandLayout.MMA


@pytest.mark.parametrize(
    ("sizes", "rows", "batch_invariant", "chosen"),
    [
        ((6144, 4096), 512, False, WgmmaGeometry(8, 1, 3, block=256, whole=96, groups=True)),
        ((4096, 4096), 130, False, WgmmaGeometry(4, 2, 3, block=128)),  # else half of the places are left
        ((28672, 4096), 256, False, WgmmaGeometry(8, 1, 3, block=256, whole=224, groups=True)),
        (
            (28672, 4096),
            512,
            False,
            WgmmaGeometry(8, 2, 3, block=256, whole=396, groups=True),
        ),  # behind three waves
        (
            (28672, 4096),
            384,
            False,
            WgmmaGeometry(4, 4, 3, block=128, whole=1320),
        ),  # 256 rows would be half a block
        ((4096, 14336), 256, False, WgmmaGeometry(8, 4, 3, block=256, groups=True)),
        (
            (28672, 4096),
            512,
            True,
            WgmmaGeometry(8, 1, 3, block=256, whole=448, groups=True),
        ),  # all columns at once
        ((4096, 4096), 1024, True, WgmmaGeometry(8, 8, 3, block=128, in_turn=True)),
        ((4096, 4096), 256, True, WgmmaGeometry(4, 8, 3, block=128, in_turn=True)),
        ((4096, 4096), 128, True, WgmmaGeometry(4, 8, 3)),
        ((4096, 4096), 128, False, WgmmaGeometry(4, 4, 3)),  # two programs a multiprocessor, in one wave
        ((10240, 8192), 100, False, WgmmaGeometry(4, 1, 3)),
        ((10240, 8192), 64, False, WgmmaGeometry(4, 3, 2, False, 128)),
    ],
)
def test_many_rows_are_cut_by_how_many_programs_that_makes(
    sizes: tuple[int, int],
    rows: int,
    batch_invariant: bool,
    chosen: WgmmaGeometry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_table, "table_key", lambda: "a GPU without a table")
    assert wgmma_geometry(empty_part("Q4_K", *sizes), "rows", rows, batch_invariant) == chosen


def test_two_parts_in_one_launch_share_a_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_table, "table_key", lambda: "a GPU without a table")
    part = empty_part("Q4_K", 5120, 4096)
    splits = [wgmma_geometry(part, "rows", 128, False, False, beside).splits for beside in (0, 1024)]
    assert splits == [3, 2]


@pytest.mark.parametrize(("consumer", "chosen"), [(False, (4, 128)), (True, (8, 256))])
def test_a_pdl_consumer_keeps_few_multiprocessors_busy_rather_than_many_for_less_long(
    consumer: bool, chosen: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """attn_v in Q6_K: alone 256 small programs, two a multiprocessor; in the last wave of attn_q and attn_k 64."""
    monkeypatch.setattr(launch_table, "table_key", lambda: "a GPU without a table")
    geometry = wgmma_geometry(empty_part("Q6_K", 1024, 4096), "rows", 2048, consumer=consumer)
    assert (geometry.warps, geometry.block) == chosen


def empty_part(name: str, rows: int, cols: int) -> PackedPart:
    plane = torch.empty(0, dtype=torch.uint8)
    return PackedPart(packed_layout(FORMATS[name], cols), rows, cols, plane, plane, plane, plane, 1.0, 1.0)


def test_buffers_of_few_rows_stay_where_more_of_a_wider_layer_come_later() -> None:
    """As captured steps of fewer rows write to them; those of many rows are counted and given back."""
    room = MatmulWorkspace(0, "cpu")
    few = room.product(4, 64).data_ptr()
    room.product(512, 64)
    before = room.rooms_left
    room.product(128, 256)
    assert room._outgrown[0].data_ptr() == few and room.rooms_left == before
    room.product(512, 256)
    assert room.rooms_left == before + 1
    assert room.nbytes == 4 * (128 * 64 + 128 * 256 + 512 * 256)


@pytest.mark.parametrize("rows", [1, 5])
def test_gate_and_up_apart_take_some_tiles_at_a_time(device: torch.device, rows: int) -> None:
    gate, up = (ordinary_weight("Q4_K", 40, 512, seed) for seed in (1, 2))
    weight = pack([gate, up], device, paired=True)
    assert weight.paired
    x = ordinary_activations(rows, 512)
    operand = to_fp16_operand(x.to(device))
    y = paired_matmul(operand, weight, MatmulWorkspace(32 * 512, device))
    exact = torch.cat([x.double() @ dequantize(w.format, w.data).double().T for w in (gate, up)], 1)
    assert nmse(y.cpu(), exact) < 1e-6
