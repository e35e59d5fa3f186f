"""What a declaration of an architecture says: its names in both kinds of files, its blocks, and keys of its own."""

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
"""ModelConfig fields that replace those that were read before."""

Keys: TypeAlias = Mapping[str, Any]
"""A config.json, or the part of it that describes the text model, with the defaults of its model type."""

LayerKind = Literal["full_attention", "sliding_attention"]


def full_attention(_keys: Keys, blocks: int) -> Sequence[LayerKind]:
    """Every layer sees every position."""
    return ["full_attention"] * blocks


def sliding_attention(_keys: Keys, blocks: int) -> Sequence[LayerKind]:
    """Every layer has the window of config.json, where it has one."""
    return ["sliding_attention"] * blocks


def no_layers(_keys: Keys, _blocks: int) -> Sequence[int]:
    """Every layer's feed-forward is a mixture of experts."""
    return ()


@dataclass(frozen=True)
class HFPart:
    """A tensor of a layer that a Hugging Face folder holds within another, the holder.

    name: of the holder, below the layer; `hf.hf_parts` says how it may be packed. rows: which of the holder's rows, or
    of a bias's elements, per expert. transposed: the holder's last two dimensions are exchanged; "by shape": where its
    shape is not that of rows and columns, as `transformers` reads it. picks: of a matrix, how many rows the holder has
    and which are the part's, in order, in place of `rows`.
    """

    name: str
    rows: Literal["all", "first half", "second half", "even", "odd"] = "all"
    transposed: Literal[True, False, "by shape"] = False
    picks: Callable[[ModelConfig], tuple[int, Sequence[int]]] | None = None


@dataclass(frozen=True)
class DraftNames:
    """What folders call the tensors of the layer that drafts tokens (models/draft_layer.py).

    layer: what names of the layer's own tensors begin with; {body} is what the body's begin with, {number} the number
    of layers before it. eh_proj, enorm, hnorm: the whole names of the projection of a token's embedding and a hidden
    row, and of their norms, head_norm: of the norm before the output matrix, all without .weight.
    """

    layer: str
    eh_proj: str
    enorm: str
    hnorm: str
    head_norm: str


@dataclass(frozen=True)
class ModelType:
    """A `model_type` of config.json, as `transformers` (release 5) reads it.

    defaults: what it takes for keys that config.json lacks, where its classes differ.
    tied_by_text: of a model with vision, `tie_word_embeddings` in its text part ties too.
    text_models: for a model with vision, the types that its `text_config` may have, the default first.
    own_text_models: those of them that are of another architecture, which is then the model's.
    layer_kinds: the kind of each layer, where `reads_layer_types` is False or config.json has no `layer_types`.
    reads_layer_types: of a model with vision, whether its text model does, where that does by itself.
    reads_partial_rotary_factor: only that share of each head is rotated; other types pass the key over.
    expert_keys: of a mixture of experts, ExpertConfig or RouterKind field -> key of config.json: `count`, `used` and
        `feed_forward_length` at least; `shared_count` counts shared experts of that length. Empty: a dense model.
    experts_flag: the key that says whether a model of this type has experts; "": all of them have.
    may_be_dense: 0 experts are none.
    dense_layers: the layers that have no experts.
    quantization: the `quant_method` of folders that are read packed; those of others are refused.
    size_keys: ModelConfig field -> the key of config.json that an error about it names, where others have another.
    stands_for: gives config.json in the keys of another type, as which some of this one are published; None: it is not
        one of them.
    common_keys: gives config.json in the keys that `hf.config_hf` reads, where it has others.
    fields: what follows from keys of its own; `rope_parameters` in them are complete. Both raise EngineError for values
        that the decoder does not implement.
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

    model_types: the Hugging Face models of this architecture.
    adapts: adapters for tasks may lie beside its files (`EncoderSizes.tasks`).
    projects: its files may have matrices for the pooled vector (`EncoderSizes.projections`).
    bidirectional_types: those of them whose config.json has `use_bidirectional_attention`.
    block: what each layer computes, from which its tensors follow.
    build: the layers of a model, as `models.blocks` declares them.
    router: how experts are chosen and weighted, where a file does not say; `used` is the file's. None: no experts.
    rope_scalings: the kinds of rotary scaling that it has.
    hf_modules: GGUF tensor of a block -> module of a Hugging Face layer, where others have another; a key with .weight
        or .bias -> the whole name there (`hf.hf_names`). The same of the embedding, beside the layers.
    hf_parts: GGUF tensor of a block, with .weight or .bias -> the tensor that holds it there, in folders where it has
        none of its own.
    hf_rows: vectors of a block that folders have as a matrix of one row.
    top_tensors: the tensors of no layer, where they are others than a decoder's.
    hf_layers: what names of layers in folders begin with, after the body's, before the layer's number.
    hf_unused: what names of tensors begin with, after the body's, that folders may have and nothing here reads.
    hf_rope_pairs: folders too have the elements of a head that rotate together as neighbours, where `block` does.
    hf_norm_offset: what is added to norm weights of a Hugging Face folder; GGUF files have the sum.
    hf_changes: GGUF tensor of a block, with .weight or .bias -> what GGUF files have of a folder's weights (fp32); of
        a norm in place of the sum.
    vocabulary: of synthetic models, byte-level BPE or SentencePiece.
    synthetic: presets of synthetic models: name -> SyntheticModel fields that differ from Mistral 7B's, or from the
        tiny model's where the name ends in "-tiny".
    size_fields: what follows from the sizes, in files of both kinds and synthetic models.
    gguf_keys: metadata keys, without the architecture's prefix, that only `gguf_fields` reads.
    gguf_fields: what follows from keys and tensors of its own. Raises GGUFError as a ModelType's functions do.
    has_recurrent_layers: some layers have no attention, and 0 key and value heads in files.
    latent: layers have latent attention: key and value lengths of GGUF files are those of the cache.
    has_lone_parts: layers are a mixer or a feed-forward, and have 0 for the sizes of the other in files.
    draft_names: of the layer that drafts tokens, where it is computed; None: files that have one run without it.
    sizes_by_layer: GGUF files may give the numbers of heads and the length of the feed-forward for each layer.
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
