"""The shape of a model: one frozen dataclass, filled from GGUF metadata or a Hugging Face config.json.

It knows sizes and rotary positions, not tensors, tokenizers or devices. How the two sources name things is
in `config_gguf` and `config_hf`; what they must agree on is checked here, once, for both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite, log
from typing import TYPE_CHECKING, Any, Literal

from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import CacheType, row_bytes

if TYPE_CHECKING:
    from quengine.kernels.rope import RopeSpec
    from quengine.models.gguf import GGUFFile

RopeLayout = Literal["pairs", "halves"]
RopeScalingKind = Literal["none", "linear", "yarn", "llama3"]

# GGUF architecture -> how its Q and K rows are laid out for the rotation. Converters permute Q and K of the
# llama family so that rotated elements are neighbours.
ROPE_LAYOUTS: Mapping[str, RopeLayout] = {
    "llama": "pairs",
    "mistral3": "pairs",
    "qwen2": "halves",
    "qwen3": "halves",
}
SUPPORTED_ARCHITECTURES = tuple(ROPE_LAYOUTS)

# Limits far above any model of these architectures, below what would overflow or exhaust memory.
LIMITS: Mapping[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 24),
    "context_length": (1, 1 << 30),
    "embedding_length": (1, 1 << 20),
    "block_count": (1, 1024),
    "feed_forward_length": (1, 1 << 24),
    "head_count": (1, 4096),
    "head_count_kv": (1, 4096),
    "head_dim": (2, 4096),
    "rope_dim": (2, 4096),
}


def unsupported_architecture(name: str, why: str = "is not supported") -> EngineError:
    """The error for a model that this engine has no decoder for."""
    return EngineError(f"architecture {name!r} {why}; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")


def yarn_attention_factor(factor: float, log_multiplier: float = 0.0) -> float:
    """What YaRN multiplies cos and sin with, for a context stretched `factor` times.

    `0.1 ln(factor) + 1` (Peng et al. 2023, section 3.4), divided, where the model has a log multiplier m
    (`mscale_all_dim` in Hugging Face configurations, beside an `mscale` of 1), by `0.1 m ln(factor) + 1`.
    """
    if factor <= 1.0:
        return 1.0
    return (0.1 * log(factor) + 1.0) / (0.1 * log_multiplier * log(factor) + 1.0)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the context that the model was first trained on.

    kind: "none"; "linear" divides every frequency by `factor`; "yarn" those that turn slowly (between
        `beta_slow` and `beta_fast` turns over `original_context_length` blended); "llama3" divides each by
        its own entry of `freq_factors`.
    attention_factor: multiplies cos and sin, so attention scores grow by its square.
    freq_factors: rope_dim / 2 divisors (GGUF `rope_freqs.weight`), or None.
    """

    kind: RopeScalingKind = "none"
    factor: float = 1.0
    original_context_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose keys and values are kept alike: of the last `window` positions, or of all (None)."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelConfig:
    """One decoder's shape.

    `embedding_length`, `feed_forward_length` and the rest carry GGUF's names. `head_count` query heads of
    `head_dim` share `head_count_kv` key/value heads; the first `rope_dim` elements of a head are rotated,
    in `rope_layout`. `sliding_window` W lets position i see i-W+1 .. i; None is full attention.
    `attention_temperature_scale` b, where not 0, multiplies the rotated query at position p by
    `1 + b ln(1 + floor(p / attention_temperature_length))` (Ministral 3). `qkv_bias`, `qk_norm` and
    `tied_output` say which tensors there are.
    """

    architecture: str
    name: str
    vocab_size: int
    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_dim: int
    rope_dim: int
    rope_freq_base: float
    rope_layout: RopeLayout
    rope_scaling: RopeScaling
    rms_eps: float
    sliding_window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_output: bool = False
    attention_temperature_scale: float = 0.0
    attention_temperature_length: int = 0

    @classmethod
    def from_gguf(cls, file: "GGUFFile") -> "ModelConfig":
        """The configuration in a GGUF file's metadata; needs no tensor data beyond `rope_freqs.weight`.

        Raises:
            GGUFError: a value is missing, of the wrong type, out of range or at odds with another.
            EngineError: an architecture, or a trait of one, that the decoder does not implement.
        """
        from quengine.models.gguf.config_gguf import read_gguf_config

        return read_gguf_config(file)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """The configuration in a parsed Hugging Face config.json. Raises EngineError as `from_gguf` does."""
        from quengine.models.hf.config_hf import read_hf_config

        return read_hf_config(config)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers that share block tables."""
        return (CacheGroup(self.sliding_window, tuple(range(self.block_count))),)

    @property
    def rope(self) -> "RopeSpec":
        """The rotary embedding as the kernels take it, scaling and frequency factors included."""
        from quengine.kernels.rope import RopeSpec

        scaling = self.rope_scaling
        return RopeSpec(
            dim=self.rope_dim,
            base=self.rope_freq_base,
            layout=self.rope_layout,
            scaling="none" if scaling.kind == "llama3" else scaling.kind,
            factor=scaling.factor,
            original_context=scaling.original_context_length,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            attention_factor=scaling.attention_factor,
            freq_factors=scaling.freq_factors,
        )

    def kv_cache_bytes(self, positions: int, cache_type: CacheType = "f16") -> int:
        """Bytes of keys and values of all layers for `positions` tokens.

        Raises EngineError where the heads cannot be stored in `cache_type`.
        """
        rows = 2 * self.block_count * self.head_count_kv * positions
        return rows * row_bytes(cache_type, self.head_dim)

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it) for every value out of range or at odds with another."""
        for field in fields(self):
            low, high = LIMITS.get(field.name, (0, 0))
            value = getattr(self, field.name)
            if high and not low <= value <= high:
                yield field.name, f"{value} is not from {low} to {high}"
        if self.head_count_kv > 0 and self.head_count % self.head_count_kv:
            yield (
                "head_count",
                f"{self.head_count} is not a multiple of the {self.head_count_kv} key/value heads",
            )
        if self.rope_dim > self.head_dim:
            yield "rope_dim", f"{self.rope_dim} is more than the head size, {self.head_dim}"
        if self.rope_dim % 2:
            yield "rope_dim", f"{self.rope_dim} is odd, rotary dimensions come in pairs"
        if not (isfinite(self.rms_eps) and 0.0 < self.rms_eps < 1.0):
            yield "rms_eps", f"{self.rms_eps} is not a number between 0 and 1"
        if not (isfinite(self.rope_freq_base) and self.rope_freq_base > 1.0):
            yield "rope_freq_base", f"{self.rope_freq_base} is not a finite number above 1"
        if self.sliding_window is not None and self.sliding_window < 1:
            yield "sliding_window", f"{self.sliding_window} is not positive"
        yield from self._scaling_problems()

    def _scaling_problems(self) -> Iterator[tuple[str, str]]:
        scaling = self.rope_scaling
        positive = {
            "rope_scaling.factor": scaling.factor,
            "rope_scaling.attention_factor": scaling.attention_factor,
            "rope_scaling.beta_fast": scaling.beta_fast,
            "rope_scaling.beta_slow": scaling.beta_slow,
        }
        for name, value in positive.items():
            if not (isfinite(value) and value > 0.0):
                yield name, f"{value} is not a positive finite number"
        if scaling.kind == "yarn" and scaling.original_context_length < 1:
            yield "rope_scaling.original_context_length", f"{scaling.original_context_length} is not positive"
        factors = scaling.freq_factors
        if factors is not None and len(factors) != self.rope_dim // 2:
            yield "rope_scaling.freq_factors", f"{len(factors)} factors for {self.rope_dim // 2} frequencies"
        if factors is not None and not all(isfinite(f) and f > 0.0 for f in factors):
            yield "rope_scaling.freq_factors", "not all are positive finite numbers"
        if not (isfinite(self.attention_temperature_scale) and self.attention_temperature_scale >= 0.0):
            yield (
                "attention_temperature_scale",
                f"{self.attention_temperature_scale} is not a finite number from 0",
            )
        if self.attention_temperature_scale and self.attention_temperature_length < 1:
            yield "attention_temperature_length", f"{self.attention_temperature_length} is not positive"
