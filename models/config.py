"""The shape of a model: one frozen dataclass, read from GGUF metadata or a Hugging Face config.json.

`gguf.config_gguf` and `hf.config_hf` read it from the names of their formats; what each architecture computes is in
`architectures`. The consistency of the values is checked here, once, for both formats.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from typing import Literal, NamedTuple

from quengine.kernels.moe.router_kind import MOST_EXPERTS, MOST_EXPERTS_USED
from quengine.models.blocks import BlockForm
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.blocks.gated_delta import GatedDeltaSizes
from quengine.models.blocks.latent_attention import LatentSizes
from quengine.models.blocks.mamba2 import Mamba2Sizes
from quengine.models.rotation import RopeScaling, Rotation

Pooling = Literal["mean", "cls", "last", "rank"]

# Far above any model of these architectures, and below what would overflow or exhaust memory.
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


class LayerSizes(NamedTuple):
    """The sizes of one layer, of a model whose layers differ. head_dim 0: the model's."""

    head_count: int
    head_count_kv: int
    feed_forward_length: int
    head_dim: int = 0


@dataclass(frozen=True)
class LayerInputSizes:
    """The sizes of per-layer embeddings, which layers get beside the residual stream (blocks/layer_input.py).

    length: elements for each layer. rows: rows of the table; token ids past its end use the first row; 0: each token
    has its own row.
    """

    length: int
    rows: int = 0


@dataclass(frozen=True)
class AltUpSizes:
    """The sizes of alternating updates (blocks/altup.py).

    streams: rows of a token. rank: rank of the product beside attention. cutoffs: each layer's cutoff of its gates
    (blocks/feed_forward.py).
    """

    streams: int
    rank: int
    cutoffs: tuple[float, ...]


PROJECTIONS = ("dense_2", "dense_3")
"""GGUF's names of matrices that multiply a pooled vector, in order."""


@dataclass(frozen=True)
class EagleSizes:
    """What an EAGLE-3 draft model reads of its target model, and what it drafts (models/eagle.py).

    layers: numbers of the target's layers whose inputs it reads; the number of all layers stands for the output of the
    last. width: columns of each input. drafted: size of its own vocabulary. normed_residual: its layer's residual is
    the normalized hidden row. own_embedding, own_output: it has these matrices, and does not use the target's.
    """

    layers: tuple[int, ...]
    width: int
    drafted: int
    normed_residual: bool = False
    own_embedding: bool = False
    own_output: bool = True


@dataclass(frozen=True)
class Ranker:
    """The head of a decoder that scores pairs of texts. It reads the hidden row of the last position.

    classes: outputs of the head, whose matrix is [classes, embedding_length]. softmax: the score is the first value of
    the outputs' softmax, else the first output. tokens: the rows of the output matrix that make up the head; (): the
    head is a tensor of its own. template: the prompt of a pair, with {query} and {document}.
    """

    classes: int
    softmax: bool
    template: str
    tokens: tuple[int, ...] = ()

    @property
    def missing(self) -> str:
        """What the template lacks, for people; "": nothing."""
        return " and no ".join(part for part in ("{query}", "{document}") if part not in self.template)

    def filled(self, part: str, query: str, document: str) -> str:
        """A part of the template with the texts of a pair, in which braces stay as they are."""
        given = {"{query}": query, "{document}": document}
        return re.sub("|".join(given), lambda found: given[found[0]], part)


class Task(NamedTuple):
    """A purpose that texts are embedded for. prefix: put before each text. file: the task's adapter file; "": the
    adapter is in the model's folder."""

    name: str
    prefix: str
    file: str = ""


@dataclass(frozen=True)
class EncoderSizes:
    """The sizes of an encoder: all positions see each other, and it makes embeddings or scores (blocks/encoder.py).

    token_types: rows of the table of segment kinds; 0: there is no table. biases: its matrices have biases.
    classes: outputs of a trained head, whose matrix is [classes, embedding_length]; 0: there is no head.
    head_dense: the head begins with a dense layer and `head_activation`. head_bias: that layer has a bias.
    head_normed: a LayerNorm follows it.
    head_pooling: what the head reads: the row of the first position, or the mean of all.
    rotates: queries and keys are rotated, and there is no table of positions.
    first_position: the row of the table of positions that a text begins with.
    one_segment: every token is of the first segment kind.
    projections: (columns, rows) of the matrices that multiply a pooled vector, one after the other.
    tasks: the tasks that adapters beside the file are for.
    """

    token_types: int
    biases: bool = True
    classes: int = 0
    head_dense: bool = False
    head_activation: Literal["tanh", "gelu"] = "tanh"
    head_bias: bool = True
    head_normed: bool = False
    head_pooling: Literal["cls", "mean"] = "cls"
    rotates: bool = False
    first_position: int = 0
    one_segment: bool = False
    projections: tuple[tuple[int, int], ...] = ()
    tasks: tuple[Task, ...] = ()

    @staticmethod
    def problem_of(projections: tuple[tuple[int, int], ...], width: int) -> str | None:
        """Why matrices of these (columns, rows), applied in order, do not map `width` elements to `width`; None: they
        do."""
        if len(projections) > len(PROJECTIONS):
            problem = f"{len(projections)} matrices for the pooled vector"
            return f"{problem}, more than {len(PROJECTIONS)} are not implemented"
        ends = [width, *(size for pair in projections for size in pair), width]
        wrong = next((pair for pair in zip(ends[::2], ends[1::2], strict=True) if pair[0] != pair[1]), None)
        if wrong is None:
            return None
        return f"matrices for the pooled vector of {width}: {wrong[1]} columns after {wrong[0]} are not implemented"


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache the same: the last `window` positions (None: all), or a state of fixed size (`is_state`)."""

    window: int | None
    layers: tuple[int, ...]
    is_state: bool = False


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: rank `number` has the layers bounds[number] to bounds[number + 1] - 1."""

    number: int
    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    @property
    def layers(self) -> range:
        return range(self.bounds[self.number], self.bounds[self.number + 1])

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def rank_of(self, layer: int) -> int:
        """The rank that has this layer."""
        return bisect_right(self.bounds, layer) - 1


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder.

    Fields have GGUF's names where there is one. These fields need explanation:

        head_count, head_count_kv, head_dim: query heads, the key/value heads that they share, elements of each.
        rope_dim: how many elements of a head are rotated, from the first on.
        sliding_window: W lets position i see i-W+1 .. i in all layers but `full_attention_layers`; None: no windows.
        rope_freq_base_swa: base of the layers with a window, which then rotate without scaling; None: as the others.
        rope_dim_swa: `rope_dim` of these layers; None: as the others.
        rope_axes: for each frequency, which of an image row's three positions it turns by
            (architectures/rope_axes.py); (): rows have one position.
        keys_as_values: layers whose values are their keys before norm and rotation.
        attention_softcap, logit_softcap: a cap c replaces each scaled score, or logit, y by `c tanh(y / c)`; 0: none.
        tied_output: the output matrix is the embedding.
        attention_scale: multiplies the scores; None: `head_dim ** -0.5`.
        embedding_scale, logit_scale: multiply the embedding, and the logits.
        attention_temperature_scale, _length, _offset: a scale b multiplies the rotated query at position p by
            `1 + b ln(1 + floor((p + offset) / length))` (Ministral 3; with offset 1 Llama 4, in layers that do not
            rotate); 0: none.
        attention_chunk: layers with a window attend within chunks of this many positions, the window's length; 0: none.
        experts: the mixture of experts; None: the model is dense.
        draft_layers: layers in the files after the `block_count`, which draft tokens; the decoder does not run them.
        pooling: how a model made for embeddings pools a text's hidden rows; None: the files do not say.
        unrotated_layers: layers whose attention has no rotary embedding.
        recurrent_layers: layers that keep a state of fixed size in place of keys and values.
        conv_taps, conv_channels: sizes of their short convolution (blocks/short_conv.py).
        gated_delta, mamba2: sizes of the mixers of this kind.
        latent: sizes of every layer's latent attention; `head_dim` is then that of queries before `attn_k_b`.
        shared_kv_layers: how many of the last layers use the keys and values of an earlier one (`kv_source`).
        layer_input, altup, encoder, ranker: see their classes.
        mixerless_layers: layers that are a feed-forward alone, and keep nothing.
        output_norm: GGUF's name of the norm before the output matrix.
        layer_sizes: sizes of each layer, if they differ; the model's fields of the same names are then the largest.
        ranks: how many processes share each layer; heads and feed-forward lengths are then one rank's
            (tensor_split.py).
        stage: the layers of this process, if processes have whole ones (layer_split.py).
        is_draft_layer: the model is one layer that drafts tokens for another model (draft_layer.py).
        target_width: width of the hidden rows of the target, the model that this one drafts for and whose keys and
            values its layers attend to (architectures/gemma4_assistant.py); 0: there is no target.
        eagle: sizes of an EAGLE-3 draft model (eagle.py).
    """

    architecture: str
    name: str
    block: BlockForm
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
    rope_scaling: RopeScaling
    rms_eps: float
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    rope_freq_base_swa: float | None = None
    rope_dim_swa: int | None = None
    rope_axes: tuple[int, ...] = ()
    keys_as_values: tuple[int, ...] = ()
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    tied_output: bool = False
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_temperature_scale: float = 0.0
    attention_temperature_length: int = 0
    attention_temperature_offset: int = 0
    attention_chunk: int = 0
    experts: ExpertConfig | None = None
    draft_layers: int = 0
    pooling: Pooling | None = None
    unrotated_layers: tuple[int, ...] = ()
    recurrent_layers: tuple[int, ...] = ()
    conv_taps: int = 0
    conv_channels: int = 0
    gated_delta: GatedDeltaSizes | None = None
    latent: LatentSizes | None = None
    shared_kv_layers: int = 0
    layer_input: LayerInputSizes | None = None
    altup: AltUpSizes | None = None
    encoder: EncoderSizes | None = None
    ranker: Ranker | None = None
    mamba2: Mamba2Sizes | None = None
    mixerless_layers: tuple[int, ...] = ()
    output_norm: str = "output_norm"
    layer_sizes: tuple[LayerSizes, ...] = ()
    ranks: int = 1
    stage: Stage | None = None
    is_draft_layer: bool = False
    target_width: int = 0
    eagle: EagleSizes | None = None

    @property
    def hidden_width(self) -> int:
        """Width of the target model's hidden rows, which this model reads to draft; 0: it reads none."""
        return self.target_width or (self.embedding_length if self.is_draft_layer else 0)

    def sizes(self, layer: int) -> LayerSizes:
        """The sizes of a layer."""
        same = LayerSizes(self.head_count, self.head_count_kv, self.feed_forward_length)
        return self.layer_sizes[layer] if self.layer_sizes else same

    def head_size(self, layer: int) -> int:
        """Elements of a head of a layer."""
        return self.sizes(layer).head_dim or self.head_dim

    @cached_property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None is full attention."""
        full = frozenset(self.full_attention_layers)
        return tuple(None if i in full else self.sliding_window for i in range(self.block_count))

    @cached_property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers grouped by what they cache: full attention comes first, if there is any, recurrent states last.

        In a pipeline stage the groups are those of the whole model, with only the layers of this process.
        """
        if self.encoder is not None:  # nothing is kept
            return (CacheGroup(None, self._held(range(self.block_count))),)
        groups: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.layer_windows):
            keeps = self.kv_source(layer) == layer
            if keeps and layer not in self.recurrent_layers and layer not in self.mixerless_layers:
                groups.setdefault(window, []).append(layer)
        order = sorted(groups, key=lambda window: (window is not None, window))
        found = [CacheGroup(window, self._held(groups[window])) for window in order]
        if self.recurrent_layers:
            found.append(CacheGroup(None, self._held(self.recurrent_layers), is_state=True))
        return tuple(found)

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to: itself, or the last layer with the same window and with
        keys and values of its own."""
        owners, windows = self.block_count - self.shared_kv_layers, self.layer_windows
        if layer < owners:
            return layer
        return max((i for i in range(owners) if windows[i] == windows[layer]), default=layer)

    def _held(self, layers: Iterable[int]) -> tuple[int, ...]:
        return tuple(layer for layer in layers if layer in self.held_layers)

    @property
    def held_layers(self) -> range:
        """The layers that this process has."""
        return range(self.block_count) if self.stage is None else self.stage.layers

    @property
    def splits_heads(self) -> bool:
        """Whether ranks may share the heads. A norm over the whole row, or latent attention, needs all of them."""
        return self.block.attention.qk_norm != "row" and self.latent is None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def rotation(self, layer: int) -> Rotation:
        """The rotary embedding of a layer."""
        layout, turns = self.block.attention.rope_layout, layer not in self.unrotated_layers
        if self.layer_windows[layer] is not None and self.rope_freq_base_swa is not None:
            dim = self.rope_dim if self.rope_dim_swa is None else self.rope_dim_swa
            return Rotation(dim, self.rope_freq_base_swa, layout, turns=turns)
        axes = self.rope_axes
        return Rotation(self.rope_dim, self.rope_freq_base, layout, self.rope_scaling, turns, axes)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields (field, problem) for every value that is out of range or inconsistent with another."""
        yield from _outside({name: (getattr(self, name), *limits) for name, limits in LIMITS.items()}, "")
        yield from self._head_problems()
        if self.rope_dim > self.head_dim:
            yield "rope_dim", f"{self.rope_dim} is more than the head size, {self.head_dim}"
        if self.rope_dim % 2:
            yield "rope_dim", f"{self.rope_dim} is odd, rotary dimensions come in pairs"
        yield from self._problems_of_windows()
        for field_name in ("attention_softcap", "logit_softcap"):
            cap = getattr(self, field_name)
            if not (isfinite(cap) and cap >= 0.0):
                yield field_name, f"{cap} is not a finite number from 0"
        if not (isfinite(self.rms_eps) and 0.0 < self.rms_eps < 1.0):
            yield "rms_eps", f"{self.rms_eps} is not a number between 0 and 1"
        for field_name in ("rope_freq_base", "rope_freq_base_swa"):
            base = getattr(self, field_name)
            if base is not None and not (isfinite(base) and base > 1.0):
                yield field_name, f"{base} is not a finite number above 1"
        if self.sliding_window is not None and self.sliding_window < 1:
            yield "sliding_window", f"{self.sliding_window} is not positive"
        yield from self._scaling_problems()
        if self.experts is not None:
            yield from _expert_problems(self.experts, self.block_count, self.block.experts.shared_gate)
        if self.gated_delta is not None:
            yield from _gated_delta_problems(self.gated_delta)
        if self.mamba2 is not None:
            yield from _mamba2_problems(self.mamba2)
        if self.latent is not None:
            yield from _latent_problems(self.latent)
        if self.shared_kv_layers:
            yield from self._sharing_problems()
        if self.layer_input is not None:
            length = (self.layer_input.length, *LIMITS["embedding_length"])
            yield from _outside({"length": length}, "layer_input.")
        if self.altup is not None:
            yield from _altup_problems(self.altup, self.block_count)

    def _sharing_problems(self) -> Iterator[tuple[str, str]]:
        """Problems of `shared_kv_layers`."""
        shared, blocks = self.shared_kv_layers, self.block_count
        if not 0 < shared < blocks:
            yield "shared_kv_layers", f"{shared} is not from 0 to {blocks - 1}, the layers after the first"
            return
        for layer in range(blocks - shared, blocks):
            source = self.kv_source(layer)
            if source == layer:
                window = self.layer_windows[layer]
                kind = "without a window" if window is None else f"with a window of {window}"
                yield (
                    "shared_kv_layers",
                    f"{shared}: no layer {kind} is left whose keys and values layer {layer} has",
                )
                return
            own, held = self.sizes(layer), self.sizes(source)
            if (own.head_count_kv, self.head_size(layer)) != (held.head_count_kv, self.head_size(source)):
                yield (
                    "shared_kv_layers",
                    f"layer {layer} has {own.head_count_kv} key/value heads of {self.head_size(layer)}, and layer "
                    f"{source}, whose it shares, {held.head_count_kv} of {self.head_size(source)}",
                )
                return

    def _problems_of_windows(self) -> Iterator[tuple[str, str]]:
        """Problems of `rope_dim_swa`."""
        if self.rope_dim_swa is None:
            return
        sizes = [
            self.head_size(layer) for layer, window in enumerate(self.layer_windows) if window is not None
        ]
        if self.rope_dim_swa < 2 or self.rope_dim_swa % 2 or self.rope_dim_swa > min(sizes, default=1 << 30):
            yield (
                "rope_dim_swa",
                f"{self.rope_dim_swa} is not an even part of heads of {min(sizes, default=0)}",
            )

    def _head_problems(self) -> Iterator[tuple[str, str]]:
        for layer in range(len(self.layer_sizes) or 1):
            heads, kv_heads, *_ = self.sizes(layer)
            if kv_heads > 0 and heads % kv_heads:
                where = f" of layer {layer}" if self.layer_sizes else ""
                yield "head_count", f"{heads} is not a multiple of the {kv_heads} key/value heads{where}"

    def _scaling_problems(self) -> Iterator[tuple[str, str]]:
        scaling = self.rope_scaling
        positive = {
            "attention_scale": 1.0 if self.attention_scale is None else self.attention_scale,
            "embedding_scale": self.embedding_scale,
            "logit_scale": self.logit_scale,
            "rope_scaling.factor": scaling.factor,
            "rope_scaling.attention_factor": scaling.attention_factor,
            "rope_scaling.beta_fast": scaling.beta_fast,
            "rope_scaling.beta_slow": scaling.beta_slow,
        }
        for name, value in positive.items():
            if not (isfinite(value) and value > 0.0):
                yield name, f"{value} is not a positive finite number"
        if scaling.kind in ("yarn", "longrope") and scaling.original_context_length < 1:
            yield "rope_scaling.original_context_length", f"{scaling.original_context_length} is not positive"
        for field_name in ("freq_factors", "long_freq_factors"):
            factors = getattr(scaling, field_name)
            if factors is not None and len(factors) != self.rope_dim // 2:
                yield (
                    f"rope_scaling.{field_name}",
                    f"{len(factors)} factors for {self.rope_dim // 2} frequencies",
                )
            if factors is not None and not all(isfinite(f) and f > 0.0 for f in factors):
                yield f"rope_scaling.{field_name}", "not all are positive finite numbers"
        if not (isfinite(self.attention_temperature_scale) and self.attention_temperature_scale >= 0.0):
            yield (
                "attention_temperature_scale",
                f"{self.attention_temperature_scale} is not a finite number from 0",
            )
        if self.attention_temperature_scale and self.attention_temperature_length < 1:
            yield "attention_temperature_length", f"{self.attention_temperature_length} is not positive"


def no_text(config: ModelConfig) -> str:
    """Why an encoder, or a decoder with a head for rankings, generates nothing, for people."""
    if config.ranker is not None:
        return f"this {config.architecture} model ranks, and generates no text: LLM.rank, POST /v1/rerank"
    return f"a {config.architecture} model makes embeddings, and generates no text: LLM.embed, POST /v1/embeddings"


def _outside(limits: Mapping[str, tuple[int, int, int]], prefix: str) -> Iterator[tuple[str, str]]:
    """Yields (field, problem) for each key whose (value, least, most) is out of range; the field is prefix + key."""
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            yield f"{prefix}{name}", f"{value} is not from {low} to {high}"


def _gated_delta_problems(sizes: GatedDeltaSizes) -> Iterator[tuple[str, str]]:
    """As ModelConfig.problems, of a gated delta net."""
    most = LIMITS["head_count"][1]
    limits = {
        "key_heads": (sizes.key_heads, 1, most),
        "value_heads": (sizes.value_heads, 1, most),
        "head_dim": (sizes.head_dim, 8, 256),
        "taps": (sizes.taps, 1, 16),
    }
    yield from _outside(limits, "gated_delta.")
    if sizes.head_dim % 8:
        yield (
            "gated_delta.head_dim",
            f"{sizes.head_dim} is not a multiple of 8, which the decoder does not implement",
        )
    if sizes.key_heads > 0 and sizes.value_heads % sizes.key_heads:
        yield (
            "gated_delta.value_heads",
            f"{sizes.value_heads} is not a multiple of the {sizes.key_heads} key heads",
        )


def _latent_problems(sizes: LatentSizes) -> Iterator[tuple[str, str]]:
    """As ModelConfig.problems, of latent attention."""
    limits = {
        "query_rank": (sizes.query_rank, 0, 1 << 14),
        "rank": (sizes.rank, 32, 1024),
        "plain": (sizes.plain, 1, LIMITS["head_dim"][1]),
        "values": (sizes.values, 1, LIMITS["head_dim"][1]),
    }
    yield from _outside(limits, "latent.")
    if sizes.rank % 32:
        yield "latent.rank", f"{sizes.rank} is not a multiple of 32, which the decoder does not implement"


def _altup_problems(sizes: AltUpSizes, blocks: int) -> Iterator[tuple[str, str]]:
    """As ModelConfig.problems, of alternating updates in `blocks` layers."""
    limits = {"streams": (sizes.streams, 2, 16), "rank": (sizes.rank, *LIMITS["embedding_length"])}
    yield from _outside(limits, "altup.")
    if len(sizes.cutoffs) != blocks:
        yield "altup.cutoffs", f"{len(sizes.cutoffs)} values for {blocks} layers"
    elif not all(cutoff < inf for cutoff in sizes.cutoffs):
        yield "altup.cutoffs", f"{max(sizes.cutoffs)} is no number of standard deviations"


def _mamba2_problems(sizes: Mamba2Sizes) -> Iterator[tuple[str, str]]:
    """As ModelConfig.problems, of a Mamba2 layer."""
    most = LIMITS["head_count"][1]
    limits = {
        "heads": (sizes.heads, 1, most),
        "head_dim": (sizes.head_dim, 8, 256),
        "groups": (sizes.groups, 1, most),
        "state_dim": (sizes.state_dim, 8, 256),
        "taps": (sizes.taps, 1, 16),
    }
    yield from _outside(limits, "mamba2.")
    for name in ("head_dim", "state_dim"):
        if (value := limits[name][0]) % 8:
            yield f"mamba2.{name}", f"{value} is not a multiple of 8, which the decoder does not implement"
    if sizes.groups > 0 and sizes.heads % sizes.groups:
        yield "mamba2.heads", f"{sizes.heads} is not a multiple of the {sizes.groups} groups"


def _expert_problems(experts: ExpertConfig, blocks: int, shared: bool) -> Iterator[tuple[str, str]]:
    """`ModelConfig.problems` of a mixture of experts in `blocks` layers; `shared`: there must be a shared expert."""
    router, most = experts.router, LIMITS["feed_forward_length"][1]
    limits = {
        "count": (experts.count, 1, MOST_EXPERTS),
        "used": (router.used, 1, min(experts.count, MOST_EXPERTS_USED)),
        "feed_forward_length": (experts.feed_forward_length, 1, most),
        "shared_feed_forward_length": (experts.shared_feed_forward_length, int(shared), most),
        "groups": (router.groups, 1, experts.count),
        "groups_used": (router.groups_used, 1, router.groups),
    }
    yield from _outside(limits, "experts.")
    if router.groups > 0 and experts.count % router.groups:
        yield "experts.groups", f"{experts.count} experts do not make {router.groups} equal groups"
    elif router.used > router.groups_used * (experts.count // max(router.groups, 1)):
        yield "experts.groups_used", f"{router.groups_used} groups have fewer than {router.used} experts"
    if router.weighs_inputs and router.used != 1:
        yield (
            "experts.used",
            f"{router.used} experts for each row whose input they weigh: only 1 is implemented",
        )
    if not (isfinite(router.scale) and router.scale > 0.0):
        yield "experts.scale", f"{router.scale} is not a positive finite number"
    if outside := set(experts.dense_layers) - set(range(blocks)):
        yield "experts.dense_layers", f"{min(outside)} is not a layer of {blocks}"
    elif len(set(experts.dense_layers)) == blocks:
        yield "experts.dense_layers", f"all {blocks} layers are dense: none has experts"
