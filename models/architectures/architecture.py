"""The declaration of an architecture: its names in both kinds of files, its blocks, and keys of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.blocks import BlockForm
from quengine.models.blocks.block import Block, TensorSpec
from quengine.models.blocks.uniform import uniform_layers
from quengine.models.config import ModelConfig

if TYPE_CHECKING:
    from quengine.models.gguf import GGUFFile

Fields: TypeAlias = Mapping[str, Any]
"""Fields of ModelConfig that replace those read so far."""

Keys: TypeAlias = Mapping[str, Any]
"""A config.json, or the part of it that describes the text model, with the defaults of its model type."""

LayerKind = Literal["full_attention", "sliding_attention"]


def full_attention(_keys: Keys, blocks: int) -> Sequence[LayerKind]:
    """Every layer sees every position."""
    return ["full_attention"] * blocks


def sliding_attention(_keys: Keys, blocks: int) -> Sequence[LayerKind]:
    """Every layer has the window of config.json, if there is one."""
    return ["sliding_attention"] * blocks


def no_layers(_keys: Keys, _blocks: int) -> Sequence[int]:
    """Every layer's feed-forward is a mixture of experts."""
    return ()


@dataclass(frozen=True)
class HFPart:
    """A tensor of a layer that a Hugging Face folder holds within another tensor, the holder.

    name: the holder's name below the layer; `hf.hf_parts` says how it may be packed. rows: which rows of the holder, or
    elements of a bias, are the part, for each expert. transposed: the holder's last two dimensions are exchanged; "by
    shape": only if its shape is not (rows, columns), as `transformers` reads it. picks: replaces `rows` for a matrix;
    gives the number of the holder's rows, and the part's rows in order.
    """

    name: str
    rows: Literal["all", "first half", "second half", "even", "odd"] = "all"
    transposed: Literal[True, False, "by shape"] = False
    picks: Callable[[ModelConfig], tuple[int, Sequence[int]]] | None = None


@dataclass(frozen=True)
class DraftNames:
    """What folders call the tensors of the layer that drafts tokens (models/draft_layer.py).

    layer: start of the names of the layer's own tensors; {body} stands for the start of the body's names, {number} for
    the number of layers before it. The other fields are whole names without .weight. eh_proj: the projection of a
    token's embedding and a hidden row. enorm, hnorm: the norms of these two. head_norm: the norm before the output
    matrix.
    """

    layer: str
    eh_proj: str
    enorm: str
    hnorm: str
    head_norm: str


@dataclass(frozen=True)
class ModelType:
    """A `model_type` of config.json, as `transformers` (release 5) reads it.

    defaults: values of keys that config.json lacks, if this type's differ from the usual ones.
    tied_by_text: in a model with vision, `tie_word_embeddings` of the text part also ties the output matrix.
    text_models: in a model with vision, the types that its `text_config` may have, the default first.
    own_text_models: the `text_models` that have an architecture of their own, which is then the model's.
    layer_kinds: the kind of each layer, used if `reads_layer_types` is False or config.json has no `layer_types`.
    reads_layer_types: `layer_types` is read. In a model with vision, both this type and its text model's must say so.
    reads_partial_rotary_factor: only that share of each head is rotated; other types ignore the key.
    expert_keys: field of ExpertConfig or RouterKind -> key of config.json: at least `count`, `used` and
        `feed_forward_length`; `shared_count` counts shared experts of that length. Empty: the model is dense.
    experts_flag: the key that says whether a model of this type has experts; "": all models have.
    may_be_dense: a model with 0 experts is dense instead of an error.
    dense_layers: the layers that have no experts.
    quantization: the `quant_method` of packed folders that can be read; other methods are refused.
    size_keys: field of ModelConfig -> its key in config.json, for errors, if this type's key is not the usual one.
    stands_for: rewrites a config.json that is really of another type in that type's keys; None: it is of this type.
    common_keys: rewrites config.json in the keys that `hf.config_hf` reads.
    fields: the fields that follow from this type's own keys; the keys that it gets have complete `rope_parameters`.
        `fields` and `common_keys` raise EngineError for values that the decoder does not implement.
    """

    defaults: Keys = field(default_factory=dict)
    text_models: tuple[str, ...] = ()
    own_text_models: tuple[str, ...] = ()
    tied_by_text: bool = False
    layer_kinds: Callable[[Keys, int], Sequence[LayerKind]] = full_attention
    reads_layer_types: bool = False
    reads_partial_rotary_factor: bool = False
    expert_keys: Mapping[str, str] = field(default_factory=dict)
    experts_flag: str = ""
    may_be_dense: bool = False
    dense_layers: Callable[[Keys, int], Sequence[int]] = no_layers
    quantization: str | None = None
    size_keys: Mapping[str, str] = field(default_factory=dict)
    stands_for: Callable[[Keys], Keys | None] = lambda _keys: None
    common_keys: Callable[[Keys], Keys] = lambda keys: keys
    fields: Callable[[Keys, ModelConfig], Fields] = lambda _keys, _config: {}


@dataclass(frozen=True)
class Architecture:
    """A decoder by the name that GGUF has for it.

    model_types: the Hugging Face model types of this architecture.
    block: the forms of a layer's parts, from which its tensors follow.
    build: the layers of a model, as `models.blocks` declares them.
    router: how experts are chosen and weighted, unless the file says; `used` is always the file's. None: no experts.
    rope_scalings: the kinds of rotary scaling that are supported.
    hf_modules: GGUF tensor of a block -> module of a Hugging Face layer, if it is not the usual one; a key with .weight
        or .bias -> the whole name (`hf.hf_names`). Also of the embedding, outside of layers.
    hf_parts: GGUF tensor of a block, with .weight or .bias -> the folder's tensor that contains it, if the folder has
        no tensor for it alone.
    hf_rows: vectors of a block that folders store as a matrix of one row.
    top_tensors: the tensors outside of layers; None: those of a usual decoder.
    hf_layers: the start of a layer's tensor names in folders, between the body's prefix and the layer's number.
    hf_unused: starts of the names, after the body's prefix, of tensors that folders may have and nothing reads.
    hf_rope_pairs: elements of a head that rotate together are neighbours in folders too, not only in GGUF files.
    hf_norm_offset: added to norm weights of a Hugging Face folder; GGUF files contain the sum.
    hf_changes: GGUF tensor of a block, with .weight or .bias -> function from a folder's weights (fp32) to those of
        GGUF files. For a norm it replaces `hf_norm_offset`.
    vocabulary: that of synthetic models: byte-level BPE or SentencePiece.
    synthetic: presets of synthetic models: name -> SyntheticModel fields that differ from Mistral 7B's, or from the
        tiny model's if the name ends in "-tiny".
    size_fields: fields that follow from the sizes, in files of both kinds and in synthetic models.
    gguf_keys: metadata keys, without the architecture's prefix, that only `gguf_fields` reads.
    gguf_fields: fields that follow from this architecture's own keys and tensors. Raises GGUFError for values that the
        decoder does not implement.
    has_recurrent_layers: some layers have no attention; files have 0 key and value heads for them.
    latent: layers have latent attention; key and value lengths in GGUF files are the lengths of cached rows.
    has_lone_parts: a layer is either a mixer or a feed-forward; files have 0 for the sizes of the part it lacks.
    draft_names: names of the tensors of the layer that drafts tokens; None: such layers are not computed.
    sizes_by_layer: GGUF files may have a number of heads and a feed-forward length for each layer.
    bidirectional_types: model types whose config.json has `use_bidirectional_attention`.
    projects: files may have matrices for the pooled vector (`EncoderSizes.projections`).
    adapts: adapters for tasks may lie beside a model's files (`EncoderSizes.tasks`).
    """

    name: str
    model_types: Mapping[str, ModelType]
    block: BlockForm
    build: Callable[[ModelConfig], Sequence[Block]] = uniform_layers
    router: RouterKind | None = None
    rope_scalings: frozenset[str] = frozenset({"linear", "yarn", "llama3"})
    hf_modules: Mapping[str, str] = field(default_factory=dict)
    hf_parts: Mapping[str, HFPart] = field(default_factory=dict)
    hf_rows: frozenset[str] = frozenset({"ffn_gate_inp_shexp"})
    top_tensors: Callable[[ModelConfig], Mapping[str, TensorSpec]] | None = None
    hf_layers: str = "layers."
    hf_unused: tuple[str, ...] = ()
    hf_rope_pairs: bool = False
    hf_norm_offset: float = 0.0
    hf_changes: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    vocabulary: Literal["bpe", "spm"] = "bpe"
    synthetic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    size_fields: Callable[[ModelConfig], Fields] = lambda _config: {}
    gguf_keys: tuple[str, ...] = ()
    gguf_fields: Callable[["GGUFFile", ModelConfig], Fields] = lambda _file, _config: {}
    has_recurrent_layers: bool = False
    latent: bool = False
    has_lone_parts: bool = False
    sizes_by_layer: bool = False
    draft_names: DraftNames | None = None
    bidirectional_types: Mapping[str, ModelType] = field(default_factory=dict)
    projects: bool = False
    adapts: bool = False

    @property
    def may_be_dense(self) -> bool:
        """Whether there are models of this architecture without experts."""
        types = self.model_types.values()
        return self.router is None or any(
            not t.expert_keys or t.experts_flag or t.may_be_dense for t in types
        )
