"""Rotary embeddings of layers: frequencies, their scaling, and which elements of a head turn."""

from dataclasses import dataclass
from math import log, sqrt
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from quengine.kernels.rope import RopeSpec

RopeLayout = Literal["pairs", "halves"]
RopeScalingKind = Literal["none", "linear", "yarn", "llama3", "longrope"]


def yarn_attention_factor(factor: float, log_multiplier: float = 0.0) -> float:
    """The factor by which YaRN multiplies cos and sin when it extends the context `factor` times.

    `0.1 ln(factor) + 1` (Peng et al. 2023, section 3.4). If the model has a log multiplier m (`mscale_all_dim` in
    Hugging Face configurations, next to an `mscale` of 1), divided by `0.1 m ln(factor) + 1`.
    """
    return yarn_mscale(factor, 1.0) / yarn_mscale(factor, log_multiplier)


def yarn_mscale(factor: float, multiplier: float) -> float:
    """DeepSeek's factor of queries and keys, `0.1 m ln(factor) + 1` (`yarn_get_mscale` in its models' code)."""
    return 0.1 * multiplier * log(factor) + 1.0 if factor > 1.0 else 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """The factor by which LongRoPE multiplies cos and sin when it extends `original` positions `factor` times.

    `sqrt(1 + ln(factor) / ln(original))` (Ding et al. 2024, LongRoPE).
    """
    return sqrt(1.0 + log(factor) / log(original)) if factor > 1.0 and original > 1 else 1.0


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling: how rotary positions extend beyond the context of pre-training.

    kind: "none"; "linear" divides every frequency by `factor`; "yarn" divides only the slow ones, with a blend between
      `beta_slow` and `beta_fast` rotations over `original_context_length`; "llama3" divides each frequency by its entry
      of `freq_factors`; "longrope" does the same, or divides by `long_freq_factors` if the run's context is longer than
      `original_context_length`.
    truncate: the limits of yarn's blend, which are indices of frequencies, are rounded outwards to integers.
    attention_factor: multiplies cos and sin, so attention scores grow by its square.
    freq_factors, long_freq_factors: rope_dim / 2 divisors each, or None.
    """

    kind: RopeScalingKind = "none"
    factor: float = 1.0
    original_context_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] | None = None
    long_freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of a layer: how the first `dim` elements of each head turn with the position.

    base, scaling: of the frequencies. layout: which elements turn together (kernels/rope.py). turns: False makes the
    angle 0 at every position. axes: as `ModelConfig.rope_axes`.
    """

    dim: int
    base: float
    layout: RopeLayout
    scaling: RopeScaling = RopeScaling()
    turns: bool = True
    axes: tuple[int, ...] = ()

    def spec(self, context: int = 0) -> "RopeSpec":
        """The rotary embedding in the kernels' form, for a run of `context` positions."""
        from quengine.kernels.rope import RopeSpec

        scaling = self.scaling
        long = scaling.kind == "longrope" and context > scaling.original_context_length
        return RopeSpec(
            dim=self.dim,
            base=self.base,
            layout=self.layout,
            scaling=scaling.kind if scaling.kind in ("linear", "yarn") else "none",
            factor=scaling.factor,
            original_context=scaling.original_context_length,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            truncate=scaling.truncate,
            attention_factor=scaling.attention_factor,
            freq_factors=scaling.long_freq_factors if long else scaling.freq_factors,
        )
