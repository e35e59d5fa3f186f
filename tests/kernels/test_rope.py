"""RoPE tables and rotation against complex arithmetic and the published scaling rules."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from quengine.errors import EngineError
from quengine.kernels.rope import (
    RopeSpec,
    apply_rope,
    inverse_frequencies,
    llama3_freq_factors,
    rope_table,
    yarn_magnitude,
)


def rotate_complex(x: torch.Tensor, angles: torch.Tensor, layout: str) -> torch.Tensor:
    """Reference: a pair is a complex number, its rotation a multiplication with exp(i angle)."""
    half = angles.shape[-1]
    first = x[..., 0 : 2 * half : 2] if layout == "pairs" else x[..., :half]
    second = x[..., 1 : 2 * half : 2] if layout == "pairs" else x[..., half : 2 * half]
    turned = torch.complex(first, second) * torch.exp(1j * angles)[:, None, :]
    out = x.clone()
    if layout == "pairs":
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = turned.real, turned.imag
    else:
        out[..., :half], out[..., half : 2 * half] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("layout", ["pairs", "halves"])
@pytest.mark.parametrize("head_dim,dim", [(64, 64), (80, 20), (128, 96)])
def test_rotation_is_complex_multiplication(layout: str, head_dim: int, dim: int) -> None:
    spec = RopeSpec(dim=dim, layout=layout)
    cos, sin = rope_table(spec, 50)
    x = torch.randn(4, 3, head_dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    positions = torch.tensor([0, 7, 31, 49])
    out = apply_rope(x, cos[positions], sin[positions], spec.layout)
    expected = rotate_complex(x, positions[:, None].double() * inverse_frequencies(spec), layout)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert torch.equal(out[..., dim:], x[..., dim:])
    assert torch.equal(out[0], x[0])


def test_scores_depend_on_the_distance_only() -> None:
    cos, sin = rope_table(RopeSpec(dim=32), 200)
    q, k = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = []
    for start in (0, 60, 150):
        rotated_q = apply_rope(q, cos[start + 9 : start + 10], sin[start + 9 : start + 10], "pairs")
        rotated_k = apply_rope(k, cos[start : start + 1], sin[start : start + 1], "pairs")
        scores.append(float((rotated_q * rotated_k).sum()))
    assert max(scores) - min(scores) < 1e-5


def test_far_positions_are_exact() -> None:
    cos, _ = rope_table(RopeSpec(dim=2), 100_001)
    assert float(cos[100_000, 0]) == pytest.approx(math.cos(100_000.0), abs=1e-7)


def test_linear_scaling_divides_positions() -> None:
    plain, _ = rope_table(RopeSpec(dim=16), 10)
    stretched, _ = rope_table(RopeSpec(dim=16, scaling="linear", factor=4.0), 40)
    torch.testing.assert_close(stretched[::4], plain, rtol=0, atol=1e-7)


def test_yarn_keeps_fast_dimensions_and_interpolates_slow_ones() -> None:
    spec = RopeSpec(dim=128, scaling="yarn", factor=8.0, original_context=4096)
    plain, scaled = inverse_frequencies(RopeSpec(dim=128)), inverse_frequencies(spec)
    turns = 4096 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns > 40], plain[turns > 40])
    torch.testing.assert_close(scaled[turns < 0.8], plain[turns < 0.8] / 8.0)
    between = (turns < 20) & (turns > 2)
    assert between.any()
    assert bool((scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all())


def test_yarns_limits_are_rounded_outwards_unless_it_says_otherwise() -> None:
    """The limits are places among the frequencies: where a frequency would turn 32 times, and once."""
    spec = RopeSpec(dim=64, scaling="yarn", factor=32.0, original_context=4096, base=150000.0)
    low, high = (32 * math.log(4096 / (turns * 2 * math.pi), 150000.0) for turns in (32, 1))
    plain = inverse_frequencies(RopeSpec(dim=64, base=150000.0))
    places = torch.arange(32, dtype=torch.float64)
    for truncate, first, last in ((True, math.floor(low), math.ceil(high)), (False, low, high)):
        kept = 1.0 - ((places - first) / (last - first)).clamp(0.0, 1.0)
        scaled = inverse_frequencies(replace(spec, truncate=truncate))
        torch.testing.assert_close(scaled, plain * (kept + (1.0 - kept) / 32.0))


def test_yarn_multiplies_the_magnitude() -> None:
    spec = RopeSpec(dim=64, scaling="yarn", factor=16.0, original_context=2048)
    cos, sin = rope_table(spec, 3)
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full((3, 32), 0.1 * math.log(16.0) + 1.0))
    assert yarn_magnitude(1.0) == 1.0
    fixed, _ = rope_table(RopeSpec(dim=64, attention_factor=1.5), 1)
    assert torch.equal(fixed, torch.full((1, 32), 1.5))


def test_freq_factors_divide_each_frequency() -> None:
    factors = tuple(float(i + 1) for i in range(8))
    scaled = inverse_frequencies(RopeSpec(dim=16, freq_factors=factors))
    torch.testing.assert_close(scaled * torch.tensor(factors), inverse_frequencies(RopeSpec(dim=16)))


def test_llama3_factors_are_one_for_short_waves_and_full_for_long_ones() -> None:
    factors = llama3_freq_factors(128, 500000.0, 8.0, 1.0, 4.0, 8192)
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(8.0)
    assert all(a <= b for a, b in itertools.pairwise(factors))
    assert any(1.0 < f < 8.0 for f in factors)


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"dim": 63}, "63"),
        ({"dim": 64, "scaling": "yarn", "factor": 2.0}, "original context"),
        ({"dim": 64, "freq_factors": (1.0,)}, "1 frequency factors for 32"),
        ({"dim": 64, "layout": "neox"}, "neox"),
    ],
)
def test_bad_specs_say_what_is_wrong(fields: dict[str, object], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        RopeSpec(**fields)  # type: ignore[arg-type]
