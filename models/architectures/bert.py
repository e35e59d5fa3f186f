"""BERT, an encoder for retrieval: every position sees every other, positions and segments are learned embeddings.

A LayerNorm follows each sum with the residual; the feed-forward has GELU and no gate; matrices have biases. In folders
a ranking head has a dense layer with tanh, which llama.cpp's converter leaves out. XLM-RoBERTa (BGE-M3, multilingual
E5) is BERT whose positions begin after the padding token's id and whose head has its own dense layer. Sources: Devlin
et al. 2018, "BERT"; Conneau et al. 2019, "XLM-R"; `BertModel` and `XLMRobertaModel` in `transformers`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.file_traits import tensor_kinds
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm, Norms
from quengine.models.blocks.block import BIAS, Block, Draw, TensorSpec
from quengine.models.blocks.encoder import EncoderAttention, EncoderFeedForward, layer_norm_specs
from quengine.models.config import EncoderSizes, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer, number

CAUSAL = "attention.causal"
_BIASES = {
    f"{name}.bias" for name in ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_up", "ffn_down")
}
_CLASSIFIES = "ForSequenceClassification"
_HEADED = f"Bert{_CLASSIFIES}"
_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
}


def encoder_layers(config: ModelConfig) -> Sequence[Block]:
    """Attention and a feed-forward, the same in all layers, with the forms of the architecture's block."""
    assert config.encoder is not None
    width, biases, form = config.embedding_length, config.encoder.biases, config.block
    attention = EncoderAttention(
        width,
        config.head_count,
        config.head_dim,
        biases,
        config.rotation(0) if config.encoder.rotates else None,
        form.attention.merged,
    )
    feed_forward = EncoderFeedForward(width, config.feed_forward_length, biases, form.feed_forward.has_gate)
    return config.block_count * [Block(attention, feed_forward)]


def encoder_tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """The tensors outside of layers: tables of tokens, positions and segment kinds, the norm of their sum, a head."""
    sizes, width = config.encoder, config.embedding_length
    assert sizes is not None
    tables = {"token_embd.weight": (config.vocab_size, "word_embeddings")}
    if not sizes.rotates:
        positions = sizes.first_position + config.context_length
        tables["position_embd.weight"] = (positions, "position_embeddings")
    if sizes.token_types:
        tables["token_types.weight"] = (sizes.token_types, "token_type_embeddings")
    found = {
        name: TensorSpec((rows, width), hf=f"{{body}}embeddings.{module}.weight", draw=Draw(by_columns=False))
        for name, (rows, module) in tables.items()
    }
    found |= layer_norm_specs("token_embd_norm", "{body}embeddings.LayerNorm", width)
    roberta = sizes.one_segment
    dense, output = (
        ("classifier.dense", "classifier.out_proj") if roberta else ("{body}pooler.dense", "classifier")
    )
    if sizes.head_dense:
        found["cls.weight"] = TensorSpec((width, width), hf=f"{dense}.weight")
        found["cls.bias"] = TensorSpec((width,), hf=f"{dense}.bias", draw=BIAS)
    if sizes.classes:
        found["cls.output.weight"] = TensorSpec((sizes.classes, width), hf=f"{output}.weight")
        found["cls.output.bias"] = TensorSpec((sizes.classes,), hf=f"{output}.bias", draw=BIAS)
    return found


def _common_keys(keys: Keys) -> Keys:
    position = keys.get("position_embedding_type", "absolute")
    if position != "absolute":
        problem = f"{position!r} is not implemented, only 'absolute' is"
        raise config_error("position_embedding_type", problem)
    return layer_norm_keys(keys)


def layer_norm_keys(keys: Keys) -> Keys:
    """config.json of an encoder with LayerNorms in the keys that `hf.config_hf` reads. Raises EngineError."""
    return {**both_sides(keys), "rms_norm_eps": keys["layer_norm_eps"]}


def both_sides(keys: Keys) -> Keys:
    """config.json of an encoder with `is_causal` true, as decoders have it. Raises EngineError for a decoder's."""
    for key in ("is_decoder", "add_cross_attention", "is_causal"):
        if keys.get(key):
            raise config_error(key, f"{keys[key]!r} is not implemented, only False is")
    return {**keys, "is_causal": True}


def kinds_of_segments(keys: Keys) -> int:
    """The number of segment kinds. Raises EngineError."""
    types = keys["type_vocab_size"]
    if type(types) is not int or not 1 <= types <= 1 << 16:
        raise config_error("type_vocab_size", f"{types!r} is not a number from 1 to {1 << 16}")
    return types


def _jina_keys(keys: Keys) -> Keys | None:
    """config.json of Jina Embeddings v3's own code in the keys of `transformers`; None for another model's."""
    if keys.get("position_embedding_type") != "rotary":
        return None
    rope = {"rope_type": "default", "rope_theta": number(keys, "rotary_emb_base", 10_000.0)}
    own = {"model_type": "jina_embeddings_v3", "position_embedding_type": "absolute"}
    return {**keys, **own, "rope_parameters": rope}


def _roberta_keys(keys: Keys) -> Keys:
    """config.json with `max_position_embeddings` less the rows up to the padding token's, which are no positions."""
    rows = integer(keys, "max_position_embeddings", 1, 1 << 30)
    first = integer(keys, "pad_token_id", 0, rows - 2) + 1
    return {**_common_keys(keys), "max_position_embeddings": rows - first, "first_position": first}


def _roberta_fields(keys: Keys, _config: ModelConfig) -> Fields:
    headed = any(str(name).endswith(_CLASSIFIES) for name in keys.get("architectures") or ())
    sizes = EncoderSizes(
        kinds_of_segments(keys),
        classes=classes_of(keys) if headed else 0,
        head_dense=headed,
        first_position=keys["first_position"],
        one_segment=True,
    )
    return {"encoder": sizes, "pooling": "rank" if headed else None}


def classes_of(keys: Keys) -> int:
    """Outputs of a head for classification. Raises EngineError."""
    labels = keys.get("id2label")
    if labels is not None and not isinstance(labels, Mapping):
        raise config_error("id2label", f"{labels!r} is not an object")
    return len(labels or ()) or integer(keys, "num_labels", 1, 1 << 16, default=2)


def _fields(keys: Keys, _config: ModelConfig) -> Fields:
    types = kinds_of_segments(keys)
    headed = _HEADED in (keys.get("architectures") or ())
    sizes = EncoderSizes(types, classes=classes_of(keys) if headed else 0, head_dense=headed)
    return {"encoder": sizes, "pooling": "rank" if headed else None}


def sizes_of(encoder: EncoderSizes) -> Callable[[ModelConfig], Fields]:
    """`Architecture.size_fields` of an encoder of this kind."""
    return lambda config: {
        "encoder": encoder,
        "head_count_kv": config.head_count,
        "output_norm": "token_embd_norm",
        "tied_output": True,
    }


def encoder_sizes(file: GGUFFile, config: ModelConfig, rotates: bool = False) -> EncoderSizes:
    """The encoder's sizes by a file's tensors and metadata. Raises GGUFError unless attention is to both sides."""
    a = config.architecture
    if file.get_bool(f"{a}.{CAUSAL}") is not False:
        raise file.error(
            f"{a}.{CAUSAL}", "missing, or true: positions see each other in a model of this kind"
        )
    if file.get_int(f"{a}.attention.head_count_kv") not in (None, config.head_count):
        raise file.error(f"{a}.attention.head_count_kv", "other than attention.head_count is not implemented")
    tensors = file.tensors
    types, output = tensors.get("token_types.weight"), tensors.get("cls.output.weight")
    return EncoderSizes(
        token_types=0 if types is None else types.shape[0],
        biases=not _BIASES.isdisjoint(tensor_kinds(file)),
        classes=0 if output is None else output.shape[0],
        head_dense="cls.weight" in tensors,
        rotates=rotates,
    )


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    sizes = encoder_sizes(file, config)
    # RoBERTa and its descendants, whose files are recognized by their tokenizer, have one kind of segments.
    sizes = replace(sizes, one_segment=file.get_str("tokenizer.ggml.model") != "bert")
    return {"encoder": sizes, "pooling": config.pooling or ("rank" if sizes.classes else None)}


BERT = Architecture(
    name="bert",
    block=BlockForm(
        AttentionForm(qkv_bias=True),
        feed_forward=FeedForwardForm(pointwise="gelu"),
        norms=Norms(kind="layer"),
    ),
    build=encoder_layers,
    model_types={
        "bert": ModelType(_DEFAULTS, common_keys=_common_keys, fields=_fields),
        "xlm-roberta": ModelType(
            {**_DEFAULTS, "pad_token_id": 1},
            common_keys=_roberta_keys,
            fields=_roberta_fields,
            stands_for=_jina_keys,
        ),
        "roberta": ModelType(
            {**_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1},
            common_keys=_roberta_keys,
            fields=_roberta_fields,
        ),
    },
    top_tensors=encoder_tensors,
    hf_layers="encoder.layer.",
    hf_unused=("pooler.", "cls.", "lm_head.", "embeddings.position_ids"),
    size_fields=sizes_of(EncoderSizes(2, one_segment=True)),
    gguf_keys=(CAUSAL,),
    gguf_fields=_gguf_fields,
    synthetic={
        "bge-base": {
            "vocab_size": 30522,
            "context_length": 512,
            "embedding_length": 768,
            "block_count": 12,
            "feed_forward_length": 3072,
            "head_count": 12,
            "head_count_kv": 12,
            "head_dim": 64,
            "tied_output": True,
        },
        "bert-tiny": {"head_count_kv": 8, "context_length": 512, "tied_output": True},
    },
)
