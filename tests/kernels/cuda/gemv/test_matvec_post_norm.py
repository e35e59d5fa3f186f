"""The projection that ends with a norm of its own, against the definitions and the launches that it replaces."""

import pytest
import torch

from quengine.kernels import activations as definition
from quengine.kernels.backend import Branch
from quengine.kernels.block_formats import unpack
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_post_norm import can_end_with_norm, matvec_post_norm
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.post_norm import post_norm_add
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.geometry import Geometry
from quengine.kernels.cuda.weights.packed import pack
from quengine.kernels.q_dot import q_dot
from quengine.kernels.rms_norm import RMSNorm, rms_norm
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

EPS = 1e-6
WIDTH, COLUMNS = 96, 512


def norm_of(seed: int, device: torch.device, residual_scale: float = 1.0) -> RMSNorm:
    weight = torch.rand(WIDTH, generator=torch.Generator().manual_seed(seed)) + 0.5
    return RMSNorm(weight.to(device), EPS, residual_scale=residual_scale)


def exact(y: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    return rms_norm(y.double(), norm.weight.double().cpu(), norm.eps)


@pytest.mark.parametrize(
    ("name", "geometry"),
    [("Q4_K", (2, 2, 1)), ("Q6_K", (1, 1, 1)), ("Q8_0", (4, 1, 2)), ("Q4_K", None)],
)
@pytest.mark.parametrize("has_branch", [False, True])
def test_gives_the_stream_and_its_next_norm(
    name: str,
    geometry: tuple[int, int, int] | None,
    has_branch: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if geometry is not None:
        monkeypatch.setattr(
            "quengine.kernels.cuda.gemv.matvec_post_norm.matvec_geometry", lambda *_: Geometry(*geometry)
        )
    weight, x = ordinary_weight(name, WIDTH, COLUMNS), ordinary_activations(1, COLUMNS)
    residual, other = torch.randn(1, WIDTH), torch.randn(1, WIDTH)
    post, following = norm_of(1, device, residual_scale=0.75), norm_of(2, device)
    first, second = norm_of(3, device), norm_of(4, device)
    scratch = QuantizationScratch.empty(WIDTH, device)
    branch = Branch(other.to(device), second, first) if has_branch else None
    quantized, packed = quantize_activations(x.to(device)), pack(weight, device)
    found = [
        matvec_post_norm(quantized, packed, residual.to(device, copy=True), post, following, branch, scratch)
        for _ in range(2)
    ]
    y = q_dot(definition.quantize_activations(x), unpack(weight.format, weight.data), torch.float64)
    if has_branch:
        y = exact(y, first) + exact(other, second)
    hidden = 0.75 * residual.double() + exact(y, post)
    for normed in found:  # the second time with the words that the first has left
        assert isinstance(normed, RmsNormed) and isinstance(normed.rms_normed, QuantizedActivations)
        assert nmse(normed.hidden, hidden) < 1e-12
        assert nmse(normed.rms_normed.dequantize(), exact(hidden, following)) < 1e-8
    assert bool((scratch.words == -1).all())
    assert torch.equal(found[0].hidden, found[1].hidden)  # type: ignore[union-attr]


@pytest.mark.parametrize("normed", [False, True])
def test_its_bits_are_those_of_two_launches(
    normed: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = Geometry(1, 1, 1)  # as many warps as the row's own launch has
    for module in ("matvec", "matvec_post_norm"):
        monkeypatch.setattr(f"quengine.kernels.cuda.gemv.{module}.matvec_geometry", lambda *_: geometry)
    weight = pack(ordinary_weight("Q4_K", WIDTH, COLUMNS), device)
    x = quantize_activations(ordinary_activations(1, COLUMNS).to(device))
    residual, post = torch.randn(1, WIDTH, device=device), norm_of(1, device)
    following = norm_of(2, device) if normed else None
    apart = residual.clone()
    quantized = QuantizedActivations.empty(1, WIDTH, device) if normed else None
    post_norm_add(matvec(x, weight), apart, post, following, quantized)
    found = matvec_post_norm(x, weight, residual, post, following)
    hidden = found.hidden if isinstance(found, RmsNormed) else found
    assert torch.equal(hidden, apart) and hidden.data_ptr() == residual.data_ptr()
    if quantized is not None:
        assert isinstance(found, RmsNormed) and isinstance(found.rms_normed, QuantizedActivations)
        assert torch.equal(found.rms_normed.ints(), quantized.ints())
        assert torch.equal(found.rms_normed.scale, quantized.scale)
        assert torch.equal(found.rms_normed.sums, quantized.sums)


def test_refuses_what_it_cannot_compute(device: torch.device) -> None:
    post = norm_of(1, device)
    x = quantize_activations(ordinary_activations(1, 256).to(device))
    odd = pack(ordinary_weight("Q4_K", 48, 256), device)
    with pytest.raises(ValueError, match="48 rows in 1 parts cannot end with a norm"):
        matvec_post_norm(x, odd, torch.zeros(1, 48, device=device), post)
    weight = pack(ordinary_weight("Q4_K", WIDTH, 256), device)
    with pytest.raises(ValueError, match=r"residual must be contiguous \[1, 96\]"):
        matvec_post_norm(x, weight, torch.zeros(1, 64, device=device), post)


def test_a_row_wider_than_the_last_program_holds_is_refused(device: torch.device) -> None:
    """One warp per program, as a matrix of few columns has, holds 512 values of a row, and not 1,024."""
    narrow, wide = (pack(ordinary_weight("Q8_0", rows, 64), device) for rows in (512, 1024))
    assert can_end_with_norm(narrow) and not can_end_with_norm(wide)
    x = quantize_activations(torch.randn(1, 64, device=device))
    with pytest.raises(ValueError, match="1024 rows in 1 parts cannot end with a norm"):
        matvec_post_norm(x, wide, torch.zeros(1, 1024, device=device), norm_of(0, device))
