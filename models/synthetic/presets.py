"""The shapes of synthetic models: released ones, and tiny ones for tests."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import NormalDist
from typing import Any

import numpy as np

from quengine.models.architectures import ARCHITECTURES, DECLARED
from quengine.models.architectures.architecture import Architecture
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.blocks.gated_delta import GatedDeltaSizes
from quengine.models.blocks.latent_attention import LatentSizes
from quengine.models.blocks.mamba2 import Mamba2Sizes
from quengine.models.config import AltUpSizes, LayerInputSizes, LayerSizes, ModelConfig
from quengine.models.rotation import RopeScaling, yarn_attention_factor
from quengine.models.tensor_table import QUANT_TYPES

Q4_K_M, MXFP4_MOE = "Q4_K_M", "MXFP4_MOE"
"""Names of llama.cpp's mixes of types (`synthetic.tensor_type`)."""

_EXPERTS = 8
_EPS = float(np.float32(1e-5))


@dataclass(frozen=True)
class SyntheticModel:
    """What to write. `quant` is one type for every matrix, or llama.cpp's mix of that name.

    experts: of a layer; 0: none, or 8 where the architecture has no dense models.
    experts_used: how many of them compute a row; 0: as many as the architecture has by default.
    expert_feed_forward_length: 0: `feed_forward_length`.
    shared_feed_forward_length: of the shared expert; 0: `feed_forward_length` where the architecture gates one, else
        there is none.
    dense_layers: how many layers in front have no experts.
    experts_normalized, expert_scale: weights of a row's experts are divided by their sum, where the architecture does
        not say so; what multiplies them.
    mamba_heads, mamba_groups: of Mamba2 layers with heads of `mamba_head_dim` and groups of `mamba_state_dim` elements
        of B and C; 0: there are none, or tiny ones.
    key_heads, value_heads: of gated delta nets, whose heads have `delta_head_dim` elements; 0: there are none.
    latent_rank: of latent attention, whose queries have `rope_dim` rotated elements of `head_dim` and are made of
        `query_rank` ones (0: of the hidden row), and whose values have `value_dim`; 0: there is none.
    draft_layers: layers after the others that draft tokens (models/draft_layer.py).
    pooled: matrices of layers are cut from a pool of random rows, as those of experts always are.
    layer_sizes: of each layer, where they differ, in place of the numbers of heads and the feed-forward's length.
    shared_kv_layers, layer_input_length: as ModelConfig and LayerInputSizes have them.
    altup_streams, laurel_rank: of alternating updates, where an architecture has them, as AltUpSizes says.
        sparse_layers: layers in front in which one gate in twenty is above its cutoff.
    router_skew: what multiplies the routers' rows of every tenth expert, so that tokens prefer these; random routers
        prefer none.
    target_width: of a model that drafts from another one's hidden rows, their values; 0: it does not.
    yarn_factor, yarn_context: of YaRN, and the positions of the context that it extends; a factor of 1: no YaRN.
    """

    name: str
    architecture: str = "llama"
    vocab_size: int = 32768
    context_length: int = 32768
    embedding_length: int = 4096
    block_count: int = 32
    feed_forward_length: int = 14336
    head_count: int = 32
    head_count_kv: int = 8
    head_dim: int = 128
    rope_dim: int | None = None
    rope_freq_base: float = 1e6
    rope_freq_factors: tuple[float, ...] | None = None
    yarn_factor: float = 1.0
    yarn_context: int = 0
    sliding_window: int | None = None
    quant: str = Q4_K_M
    tied_output: bool = False
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward_length: int = 0
    shared_feed_forward_length: int = 0
    dense_layers: int = 0
    experts_normalized: bool = False
    expert_scale: float = 1.0
    mamba_heads: int = 0
    mamba_groups: int = 0
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    key_heads: int = 0
    value_heads: int = 0
    delta_head_dim: int = 128
    latent_rank: int = 0
    query_rank: int = 0
    value_dim: int = 0
    draft_layers: int = 0
    pooled: bool = False
    layer_sizes: tuple[LayerSizes, ...] = ()
    shared_kv_layers: int = 0
    layer_input_length: int = 0
    altup_streams: int = 4
    laurel_rank: int = 64
    sparse_layers: int = 0
    router_skew: float = 1.0
    target_width: int = 0

    def of_layers(self, count: int, preset: str) -> "SyntheticModel":
        """The model of `preset`, this one's first `count` layers."""
        dense = min(self.dense_layers, count - 1)
        name, sizes = f"synthetic {preset}", self.layer_sizes[:count]
        shared = max(0, count - (self.block_count - self.shared_kv_layers))
        return replace(
            self,
            name=name,
            block_count=count,
            dense_layers=dense,
            layer_sizes=sizes,
            shared_kv_layers=shared,
        )

    def config(self) -> ModelConfig:
        """The configuration that a reader of the file finds."""
        declared = DECLARED[self.architecture]
        same = LayerSizes(self.head_count, self.head_count_kv, self.feed_forward_length)
        largest = LayerSizes(*map(max, zip(*(self.layer_sizes or (same,)), strict=True)))
        head_dim = largest.head_dim or self.head_dim
        config = ModelConfig(
            architecture=self.architecture,
            name=self.name,
            block=declared.block,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            embedding_length=self.embedding_length,
            block_count=self.block_count,
            feed_forward_length=largest.feed_forward_length,
            head_count=largest.head_count,
            head_count_kv=largest.head_count_kv,
            head_dim=head_dim,
            rope_dim=self.rope_dim or head_dim,
            rope_freq_base=self.rope_freq_base,
            rope_scaling=self._rope_scaling(),
            rms_eps=_EPS,
            sliding_window=self.sliding_window,
            tied_output=self.tied_output,
            experts=self._experts(declared),
            layer_sizes=self.layer_sizes if len(set(self.layer_sizes)) > 1 else (),
            gated_delta=self._gated_delta(),
            latent=self._latent(),
            mamba2=self._mamba2(),
            shared_kv_layers=self.shared_kv_layers,
            layer_input=self._layer_input(),
            altup=self._altup(),
            draft_layers=self.draft_layers,
            target_width=self.target_width,
        )
        return replace(config, **declared.size_fields(config))

    def _rope_scaling(self) -> RopeScaling:
        if self.yarn_factor != 1.0:
            return RopeScaling(
                kind="yarn",
                factor=self.yarn_factor,
                original_context_length=self.yarn_context,
                attention_factor=yarn_attention_factor(self.yarn_factor),
            )
        return RopeScaling(
            kind="none" if self.rope_freq_factors is None else "llama3",
            original_context_length=self.context_length,
            freq_factors=self.rope_freq_factors,
        )

    def _gated_delta(self) -> GatedDeltaSizes | None:
        """In the order that the architecture's files have."""
        if not self.key_heads:
            return None
        by_key_head = self.architecture == "qwen3next"
        sizes = self.key_heads, self.value_heads, self.delta_head_dim, 4
        return GatedDeltaSizes(*sizes, tiled=not by_key_head, by_key_head=by_key_head)

    def _latent(self) -> LatentSizes | None:
        if not self.latent_rank:
            return None
        rotated = self.rope_dim or self.head_dim
        plain = self.head_dim - rotated
        return LatentSizes(self.query_rank, self.latent_rank, plain, rotated, self.value_dim, _EPS)

    def _layer_input(self) -> LayerInputSizes | None:
        length = self.layer_input_length or (64 if self.architecture == "gemma3n" else 0)
        return LayerInputSizes(length) if length else None

    def _altup(self) -> AltUpSizes | None:
        if self.architecture != "gemma3n":
            return None
        cutoff = float(np.float32(NormalDist().inv_cdf(0.95)))
        sparse = min(self.sparse_layers, self.block_count)
        cutoffs = (cutoff,) * sparse + (-inf,) * (self.block_count - sparse)
        return AltUpSizes(self.altup_streams, self.laurel_rank, cutoffs)

    def _mamba2(self) -> Mamba2Sizes | None:
        if not self.mamba_heads:
            return None
        sizes = self.mamba_heads, self.mamba_head_dim, self.mamba_groups, self.mamba_state_dim
        return Mamba2Sizes(*sizes, taps=4, eps=float(np.float32(1e-5)))

    def _experts(self, declared: Architecture) -> ExpertConfig | None:
        count = self.experts or (0 if declared.may_be_dense else _EXPERTS)
        if not count or declared.router is None:
            return None
        used = self.experts_used or min(declared.router.used, count)
        shared = self.shared_feed_forward_length
        return ExpertConfig(
            count=count,
            router=replace(
                declared.router,
                used=used,
                normalized=declared.router.normalized or self.experts_normalized,
                scale=self.expert_scale,
            ),
            feed_forward_length=self.expert_feed_forward_length or self.feed_forward_length,
            shared_feed_forward_length=shared
            or (self.feed_forward_length if declared.block.experts.shared_gate else 0),
            dense_layers=tuple(range(self.dense_layers)),
        )


_TINY = SyntheticModel(
    "synthetic tiny",
    vocab_size=1024,
    context_length=4096,
    embedding_length=512,
    block_count=2,
    feed_forward_length=1024,
    head_count=8,
    head_count_kv=2,
    head_dim=64,
    rope_freq_base=1e4,
)
_MISTRAL_7B = SyntheticModel("synthetic mistral-7b")

_QWEN3_30B: Mapping[str, Any] = {
    "vocab_size": 151936,
    "context_length": 40960,
    "embedding_length": 2048,
    "block_count": 48,
    "feed_forward_length": 6144,
    "head_count_kv": 4,
    "experts": 128,
    "experts_used": 8,
    "expert_feed_forward_length": 768,
}
_GPT_OSS: Mapping[str, Any] = {
    "quant": MXFP4_MOE,
    "head_dim": 64,
    "rope_freq_base": 150000.0,
    "yarn_factor": 32.0,
    "experts_used": 4,
}
_OTHERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3-8b": (
        "qwen3",
        {"vocab_size": 151936, "context_length": 40960, "block_count": 36, "feed_forward_length": 12288},
    ),
    "llama-3.2-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "context_length": 131072,
            "embedding_length": 2048,
            "block_count": 16,
            "feed_forward_length": 8192,
            "head_dim": 64,
            "rope_freq_base": 5e5,
            "tied_output": True,
        },
    ),
    "llama-10m": (
        "llama",
        {
            "vocab_size": 8192,
            "context_length": 2048,
            "embedding_length": 256,
            "block_count": 8,
            "feed_forward_length": 768,
            "head_count": 4,
            "head_count_kv": 2,
            "head_dim": 64,
            "rope_freq_base": 1e4,
        },
    ),
    "llama-3-70b": (
        "llama",
        {
            "vocab_size": 128256,
            "context_length": 8192,
            "embedding_length": 8192,
            "block_count": 80,
            "feed_forward_length": 28672,
            "head_count": 64,
            "rope_freq_base": 5e5,
            "pooled": True,
        },
    ),
    "mixtral-8x7b": ("llama", {"vocab_size": 32000, "experts": 8, "experts_used": 2}),
    "mixtral-tiny": ("llama", {"experts": 8, "experts_used": 2, "feed_forward_length": 512}),
    "qwen3-30b-a3b": ("qwen3moe", _QWEN3_30B),
    "qwen3-30b-a3b-2l": ("qwen3moe", {**_QWEN3_30B, "block_count": 2}),
    "qwen3moe-tiny": ("qwen3moe", {"experts": 16, "experts_used": 4, "expert_feed_forward_length": 256}),
    "qwen2moe-tiny": (
        "qwen2moe",
        {
            "experts": 16,
            "experts_used": 4,
            "expert_feed_forward_length": 256,
            "shared_feed_forward_length": 512,
        },
    ),
    "olmoe-tiny": ("olmoe", {"experts": 16, "experts_used": 8, "feed_forward_length": 256}),
    "granitemoe-tiny": ("granitemoe", {"experts": 8, "experts_used": 2, "feed_forward_length": 256}),
    "glm4moe-tiny": (
        "glm4moe",
        {
            "block_count": 3,
            "rope_dim": 32,
            "experts": 16,
            "experts_used": 4,
            "expert_feed_forward_length": 256,
            "shared_feed_forward_length": 256,
            "dense_layers": 1,
        },
    ),
    "gpt-oss-20b": (
        "gpt-oss",
        {
            **_GPT_OSS,
            "vocab_size": 201088,
            "context_length": 131072,
            "embedding_length": 2880,
            "block_count": 24,
            "feed_forward_length": 2880,
            "head_count": 64,
            "sliding_window": 128,
            "yarn_context": 4096,
            "experts": 32,
        },
    ),
    "gpt-oss-tiny": (
        "gpt-oss",
        {**_GPT_OSS, "feed_forward_length": 256, "sliding_window": 64, "yarn_context": 128, "experts": 8},
    ),
}
"""Dense models and mixtures of experts: preset -> architecture, and fields as `Architecture.synthetic` has them."""


def _declared(preset: str, architecture: str, sizes: Mapping[str, Any]) -> SyntheticModel:
    base = _TINY if preset.endswith("-tiny") else _MISTRAL_7B
    return replace(base, name=f"synthetic {preset}", architecture=architecture, **sizes)


PRESETS: Mapping[str, SyntheticModel] = (
    {
        "mistral-7b": _MISTRAL_7B,
        "mistral-7b-2l": _MISTRAL_7B.of_layers(2, "mistral-7b-2l"),
        "tiny": _TINY,
    }
    | {
        preset: _declared(preset, declared.name, sizes)
        for declared in ARCHITECTURES.values()
        for preset, sizes in declared.synthetic.items()
    }
    | {preset: _declared(preset, *described) for preset, described in _OTHERS.items()}
)


def synthetic_preset(name: str) -> SyntheticModel | None:
    """The preset of this name, the first N layers of one by `-Nl` at its end (llama-3-70b-20l), or one all in a type by
    `-TYPE` (mistral-7b-iq2_xs, mistral-7b-2l-nvfp4); None: no such.
    """
    if name in PRESETS:
        return PRESETS[name]
    base, _, layers = name.rpartition("-")
    if layers.upper() in QUANT_TYPES and layers == layers.lower():
        whole = synthetic_preset(base)
        return whole and replace(whole, name=f"synthetic {name}", quant=layers.upper())
    spec = PRESETS.get(base)
    if spec is None or not re.fullmatch(r"[1-9]\d{0,3}l", layers) or int(layers[:-1]) >= spec.block_count:
        return None
    return spec.of_layers(int(layers[:-1]), name)
