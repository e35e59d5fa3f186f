"""The projection that begins an RMSNorm, and the matmuls that end it, against the definitions."""

import pytest
import torch

from quengine.kernels import activations as definition
from quengine.kernels.block_formats import unpack
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, RmsPartials, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_glu import matvec_glu
from quengine.kernels.cuda.gemv.matvec_norm import can_begin_norm, matvec_norm
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.geometry import Geometry
from quengine.kernels.cuda.weights.packed import pack
from quengine.kernels.glu import glu
from quengine.kernels.q_dot import q_dot
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import rms_norm
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

EPS = 1e-5


def product(x: torch.Tensor, weight: QuantTensor) -> torch.Tensor:
    """The q-dot of x rounded, fp64."""
    rounded = definition.quantize_activations(x)
    return q_dot(rounded, unpack(weight.format, weight.data), torch.float64)


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        ("Q4_K", (2, 2, 1)),
        ("Q6_K", (4, 1, 1)),
        ("Q8_0", (2, 1, 2)),
        ("Q4_1", None),
        ("Q4_K", (1, 2, 1)),
        ("Q6_K", (1, 1, 1)),
    ],
)
def test_gives_the_residual_stream_and_its_norm(
    name: str,
    geometry: tuple[int, int, int] | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if geometry is not None:
        monkeypatch.setattr(
            "quengine.kernels.cuda.gemv.matvec_norm.matvec_geometry", lambda *_: Geometry(*geometry)
        )
    weight = ordinary_weight(name, 96, 512)
    x = ordinary_activations(1, 512)
    residual, norm = torch.randn(1, 96), torch.rand(96) + 0.5
    normed = matvec_norm(
        quantize_activations(x.to(device)), pack(weight, device), residual.to(device), norm.to(device), EPS
    )
    hidden = product(x, weight) + residual.double()
    assert nmse(normed.hidden, hidden) < 1e-12
    assert nmse(normed.rms_normed.dequantize(), rms_norm(hidden, norm.double(), EPS)) < 1e-8
    # The integers are the definition's for the values before the division by the root mean square.
    wanted = definition.quantize_activations(normed.hidden.cpu() * norm)
    assert torch.equal(normed.rms_normed.ints().cpu(), wanted.a)
    assert torch.equal(normed.rms_normed.sums.cpu(), wanted.sums(16))


@pytest.mark.parametrize("geometry", [(2, 2, 1), (1, 2, 1)])
def test_a_bias_is_added_to_the_product(
    geometry: tuple[int, int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quengine.kernels.cuda.gemv.matvec_norm.matvec_geometry", lambda *_: Geometry(*geometry)
    )
    weight, x = ordinary_weight("Q8_0", 96, 512), ordinary_activations(1, 512)
    residual, norm, bias = torch.randn(1, 96), torch.rand(96) + 0.5, torch.randn(96)
    quantized, packed = quantize_activations(x.to(device)), pack(weight, device)
    residual_on, norm_on = residual.to(device), norm.to(device)
    normed = matvec_norm(quantized, packed, residual_on, norm_on, EPS, bias=bias.to(device))
    hidden = product(x, weight) + bias.double() + residual.double()
    assert nmse(normed.hidden, hidden) < 1e-12
    assert nmse(normed.rms_normed.dequantize(), rms_norm(hidden, norm.double(), EPS)) < 1e-8
    with pytest.raises(ValueError, match=r"bias must be fp32 \[96\]"):
        matvec_norm(quantized, packed, residual_on, norm_on, EPS, bias=bias[:32].to(device))


def test_programs_that_share_a_group_leave_its_words_as_they_found_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quengine.kernels.cuda.gemv.matvec_norm.matvec_geometry", lambda *_: Geometry(1, 1, 1)
    )
    weight = pack(ordinary_weight("Q4_0", 64, 128), device)
    x, norm = ordinary_activations(1, 128).to(device), torch.ones(64, device=device)
    scratch = QuantizationScratch.empty(64, device)
    first, second = (
        matvec_norm(quantize_activations(x), weight, torch.zeros(1, 64, device=device), norm, EPS, scratch)
        for _ in range(2)
    )
    assert bool((scratch.words == -1).all())
    assert torch.equal(first.rms_normed.dequantize(), second.rms_normed.dequantize())
    with pytest.raises(ValueError, match="scratch holds"):
        small = QuantizationScratch.empty(32, device)
        matvec_norm(quantize_activations(x), weight, torch.zeros(1, 64, device=device), norm, EPS, small)


def begun(x: torch.Tensor, device: torch.device, pieces: int = 3) -> QuantizedActivations:
    """x rounded, with the division by its root mean square left to do."""
    rounded = quantize_activations(x.to(device))
    cuts = torch.tensor_split(x.double().square(), pieces, dim=1)
    squares = torch.stack([cut.sum(1) for cut in cuts], 1).float().to(device)
    return QuantizedActivations(
        rounded.high, rounded.low, rounded.scale, rounded.sums, RmsPartials(squares, EPS)
    )


def test_a_matmul_ends_the_norm(device: torch.device) -> None:
    weights = [ordinary_weight("Q4_K", 48, 256), ordinary_weight("Q6_K", 16, 256, 1)]
    x, bias = ordinary_activations(1, 256), torch.randn(1, 64)
    y = matvec(begun(x, device), pack(weights, device), residual=bias.to(device))
    factors = torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS)
    wanted = torch.cat([product(x, w) for w in weights], 1) * factors + bias.double()
    assert nmse(y, wanted) < 1e-12


def test_a_float_matrix_ends_the_norm(device: torch.device) -> None:
    weight = ordinary_weight("F16", 48, 256)
    x = ordinary_activations(1, 256)
    y = matvec(begun(x, device), pack(weight, device))
    wanted = rms_norm(x.double(), torch.ones(256).double(), EPS) @ weight.data.view(torch.float16).double().T
    assert nmse(y, wanted) < 1e-8


def test_glu_ends_the_norm(device: torch.device) -> None:
    gate, up = ordinary_weight("Q4_K", 64, 256), ordinary_weight("Q4_K", 64, 256, 1)
    x = ordinary_activations(1, 256)
    y = matvec_glu(begun(x, device), pack([gate, up], device, paired=True))
    factors = torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS)
    wanted = glu(torch.cat([product(x, gate), product(x, up)], 1) * factors)
    assert nmse(y.dequantize(), wanted) < 1e-8


def test_only_whole_groups_of_one_packed_part_can_begin_a_norm(device: torch.device) -> None:
    assert can_begin_norm(pack(ordinary_weight("Q4_K", 64, 256), device))
    assert not can_begin_norm(pack(ordinary_weight("Q4_K", 48, 256), device))
    assert not can_begin_norm(pack(ordinary_weight("F16", 64, 256), device))
    two = pack([ordinary_weight("Q4_K", 32, 256), ordinary_weight("Q6_K", 32, 256)], device)
    assert not can_begin_norm(two)
    x = quantize_activations(ordinary_activations(1, 256).to(device))
    with pytest.raises(ValueError, match="2 parts cannot begin a norm"):
        matvec_norm(x, two, torch.zeros(1, 64, device=device), torch.ones(64, device=device), EPS)


def test_the_default_geometry_keeps_groups_whole(device: torch.device) -> None:
    """Whole groups of 32 outputs a program, or half of one, which the kernel puts together."""
    for cols in (256, 576, 4096, 14336):
        part = pack(ordinary_weight("Q4_0", 64, cols), device).parts[0]
        geometry = launch_table.default_geometry(part, "norm")
        assert geometry.tiles == 1 or geometry.tiles % 2 == 0
        assert geometry.k_warps <= part.chunks
