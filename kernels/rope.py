"""Rotary position embedding: angle tables and the torch definition of the rotation.

A table is built once, at load, in fp64 and rounded once to fp32; angles are not computed again.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from quengine.errors import EngineError

RopeLayout = Literal["pairs", "halves"]
RopeScaling = Literal["none", "linear", "yarn"]


@dataclass(frozen=True)
class RopeSpec:
    """The parameters of a rotary embedding.

    dim: number of leading elements of a head that are rotated (even; the rest pass through).
    base: theta of the frequencies `base^(-2i/dim)`.
    layout: "pairs" rotates elements (2i, 2i+1), as GGUF's llama family stores Q and K; "halves" rotates
        (i, i + dim/2), as GPT-NeoX did and most Hugging Face models do.
    scaling: "none"; "linear" divides positions by `factor`; "yarn" blends both, by frequency.
    factor: new context over original context.
    original_context: positions the model was trained on; yarn needs it.
    beta_fast, beta_slow: yarn's limits in rotations over `original_context`: faster dimensions are kept, slower
        ones interpolated.
    truncate: yarn's limits, as indices of frequencies, are rounded outwards to integers.
    attention_factor: multiplies cos and sin (so scores grow by its square). None: yarn's own magnitude for yarn, 1
        otherwise.
    freq_factors: one divisor for each of the dim/2 frequencies (GGUF `rope_freqs.weight`, llama 3 and LongRoPE).
    """

    dim: int
    base: float = 10000.0
    layout: RopeLayout = "pairs"
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise EngineError(f"RoPE dimension {self.dim} must be a positive even number")
        if self.layout not in ("pairs", "halves"):
            raise EngineError(f"RoPE layout {self.layout!r} is unknown; use 'pairs' or 'halves'")
        if self.scaling not in ("none", "linear", "yarn"):
            raise EngineError(f"RoPE scaling {self.scaling!r} is unknown; use 'none', 'linear' or 'yarn'")
        if not self.base > 1.0:
            raise EngineError(f"RoPE base {self.base} must be greater than 1")
        if not self.factor > 0.0:
            raise EngineError(f"RoPE scaling factor {self.factor} must be positive")
        if self.scaling == "yarn" and self.original_context <= 0:
            raise EngineError(
                "RoPE scaling 'yarn' needs the original context length, and the model gives none"
            )
        if self.freq_factors is not None and len(self.freq_factors) != self.dim // 2:
            raise EngineError(
                f"RoPE has {len(self.freq_factors)} frequency factors for {self.dim // 2} frequencies"
            )

    @property
    def magnitude(self) -> float:
        """The factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_magnitude(self.factor) if self.scaling == "yarn" else 1.0


def yarn_magnitude(factor: float) -> float:
    """The attention magnitude of YaRN for a context `factor` times as long: `0.1 ln(factor) + 1`."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def llama3_freq_factors(
    dim: int,
    base: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> tuple[float, ...]:
    """The per-frequency divisors of Llama 3.1's rope scaling (config key `rope_type: llama3`), dim/2 of them.

    Wavelengths shorter than `original_context / high_freq_factor` keep their frequency, those longer than
    `original_context / low_freq_factor` are slowed `factor` times, those between are blended linearly. Source: Llama
    3.1 model card configuration; GGUF stores the result as `rope_freqs.weight`.
    """
    factors = []
    for i in range(dim // 2):
        wavelength = 2.0 * math.pi * base ** (2.0 * i / dim)
        smooth = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(factors)


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Radians per position of each rotated pair: fp64 [dim/2], with the scaling applied.

    Source: Su et al. 2021 (RoFormer); linear: Chen et al. 2023; yarn: Peng et al. 2023, "NTK-by-parts".
    """
    half = torch.arange(spec.dim // 2, dtype=torch.float64)
    frequency = spec.base ** (-2.0 * half / spec.dim)
    if spec.freq_factors is not None:
        frequency = frequency / torch.tensor(spec.freq_factors, dtype=torch.float64)
    if spec.scaling == "linear":
        return frequency / spec.factor
    if spec.scaling == "yarn":
        low, high = _yarn_dimension(spec, spec.beta_fast), _yarn_dimension(spec, spec.beta_slow)
        if spec.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(0, low), min(spec.dim - 1, high)
        # 1 for fast dimensions (kept), 0 for slow ones (interpolated)
        kept = 1.0 - ((half - low) / max(0.001, high - low)).clamp(0.0, 1.0)
        return frequency * kept + frequency / spec.factor * (1.0 - kept)
    return frequency


def _yarn_dimension(spec: RopeSpec, rotations: float) -> float:
    """The (fractional) pair index that makes `rotations` turns over the original context."""
    turns = spec.original_context / (rotations * 2.0 * math.pi)
    return spec.dim * math.log(turns) / (2.0 * math.log(spec.base))


def rope_table(
    spec: RopeSpec, positions: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position below `positions`: fp32 [positions, dim/2] each, magnitude included.

    Angles are computed in fp64 and the results rounded once, so position 100,000 is as exact as position 1.
    """
    if torch.device(device).type == "meta":  # nothing to compute
        cos, sin = (torch.empty(positions, spec.dim // 2, device=device) for _ in range(2))
        return cos, sin
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse_frequencies(spec)[None, :]
    magnitude = spec.magnitude
    cos = (angles.cos() * magnitude).to(torch.float32)
    sin = (angles.sin() * magnitude).to(torch.float32)
    return cos.to(device), sin.to(device)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RopeLayout) -> torch.Tensor:
    """Rotates the first `2 * cos.shape[-1]` elements of every head; the rest pass through.

    x: [T, H, head_dim] of any float dtype; cos, sin: [T, dim/2], the table rows of each token's position. Returns a
    new tensor of x's shape and dtype; fp16 and bf16 are computed in fp32 and rounded once.
    """
    compute = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    half = cos.shape[-1]
    rotated = x[..., : 2 * half].to(compute)
    c, s = cos.to(compute)[:, None, :], sin.to(compute)[:, None, :]
    if layout == "pairs":
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((first * c - second * s, first * s + second * c), dim=-1).flatten(-2)
    else:
        first, second = rotated[..., :half], rotated[..., half:]
        out = torch.cat((first * c - second * s, first * s + second * c), dim=-1)
    return torch.cat((out.to(x.dtype), x[..., 2 * half :]), dim=-1)
