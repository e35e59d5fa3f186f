"""ModernBERT (and GTE, Nomic's and Granite's embeddings of its kind), an encoder for retrieval and rankings.

Its layers are a decoder's with LayerNorms without biases in front, GELU or SiLU with a gate, and attention to both
sides. Every third layer, from the first on, attends to the whole text; the others attend to nearby positions, with
their own rotary base. The first layer's attention reads the embeddings, which are normed, without a norm of its own.
Source: Warner et al. 2024, "ModernBERT"; `ModernBertModel` in the `transformers` library; llama.cpp's converter for
the names of GGUF files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.architectures.bert import CAUSAL, both_sides, classes_of, encoder_sizes
from quengine.models.architectures.windows import LOCAL_BASE, PATTERN, full_layers_of_gguf, rope_of_kinds
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm, Norms
from quengine.models.blocks.block import BIAS, NORM, Block, Draw, TensorSpec
from quengine.models.blocks.encoder import bidirectional_layers
from quengine.models.config import LIMITS, EncoderSizes, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer, number

RMS_EPS = "attention.layer_norm_rms_epsilon"
"""Key of GGUF: what the converter calls `norm_eps`, though the norms are LayerNorms."""

_PERIOD, _WINDOW, _BASE, _LOCAL_BASE = 3, 128, 160_000.0, 10_000.0
_ACTIVATION, _HEAD_POOLING = "hidden_activation", "classifier.pooling_type"
_ACTIVATIONS: Mapping[str, Literal["gelu_erf", "silu"]] = {"gelu": "gelu_erf", "silu": "silu"}
_HEADED = "ModernBertForSequenceClassification"


def _layers(config: ModelConfig) -> Sequence[Block]:
    return bidirectional_layers(config, first_normed=False)


def _tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """The tensors outside of layers: the embedding and its norm, the last norm, a head."""
    sizes, width = config.encoder, config.embedding_length
    assert sizes is not None
    table = TensorSpec(
        (config.vocab_size, width), hf="{body}embeddings.tok_embeddings.weight", draw=Draw(by_columns=False)
    )
    found = {
        "token_embd.weight": table,
        "token_embd_norm.weight": TensorSpec((width,), hf="{body}embeddings.norm.weight", draw=NORM),
        "output_norm.weight": TensorSpec((width,), hf="{body}final_norm.weight", draw=NORM),
    }
    if sizes.head_dense:
        found["cls.weight"] = TensorSpec((width, width), hf="head.dense.weight")
    if sizes.head_dense and sizes.head_bias:
        found["cls.bias"] = TensorSpec((width,), hf="head.dense.bias", draw=BIAS)
    if sizes.head_normed:
        found["cls.norm.weight"] = TensorSpec((width,), hf="head.norm.weight", draw=NORM)
    if sizes.classes:
        found["cls.output.weight"] = TensorSpec((sizes.classes, width), hf="classifier.weight")
        found["cls.output.bias"] = TensorSpec((sizes.classes,), hf="classifier.bias", draw=BIAS)
    return found


def _layer_kinds(keys: Keys, blocks: int) -> Sequence[LayerKind]:
    period = integer(keys, "global_attn_every_n_layers", *LIMITS["block_count"], default=_PERIOD)
    return ["sliding_attention" if i % period else "full_attention" for i in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    keys = both_sides(keys)
    if keys.get("norm_bias"):
        raise config_error("norm_bias", f"{keys['norm_bias']!r} is not implemented, only False is")
    activation = keys["hidden_activation"]
    if activation not in _ACTIVATIONS:
        known = " and ".join(_ACTIVATIONS)
        raise config_error("hidden_activation", f"{activation!r} is not implemented, only {known} are")
    window = integer(keys, "local_attention", 2, 1 << 30)
    if keys.get("sliding_window") is not None:  # the reach to one side, which replaces `local_attention`
        window = 2 * integer(keys, "sliding_window", 1, 1 << 29)
    base, local = (number(keys, f"{kind}_rope_theta", b) for kind, b in _BASES)
    passed_over = ("num_key_value_heads", "head_dim", "rope_theta", "sliding_window", "hidden_act")
    found = {key: value for key, value in keys.items() if key not in passed_over}
    found = dict(rope_of_kinds(found, base, local))
    return {
        **found,
        "rms_norm_eps": keys["norm_eps"],
        "sliding_window": window,
        "layer_types": keys.get("layer_types") or list(_layer_kinds(keys, _blocks(keys))),
    }


_BASES = (("global", _BASE), ("local", _LOCAL_BASE))


def _blocks(keys: Keys) -> int:
    return integer(keys, "num_hidden_layers", *LIMITS["block_count"])


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    headed = _HEADED in (keys.get("architectures") or ())
    pooling = keys["classifier_pooling"]
    if pooling not in ("cls", "mean"):
        raise config_error("classifier_pooling", f"{pooling!r} is not implemented, only cls and mean are")
    if headed and (activation := keys["classifier_activation"]) != "gelu":
        raise config_error("classifier_activation", f"{activation!r} is not implemented, only gelu is")
    sizes = _sizes(classes_of(keys) if headed else 0, bool(keys["classifier_bias"]), pooling)
    return {
        "encoder": sizes,
        "block": config.block.with_feed_forward(activation=_ACTIVATIONS[keys["hidden_activation"]]),
        "rope_freq_base_swa": number(keys, "rope_local_base_freq", _LOCAL_BASE),
        "pooling": "rank" if headed else None,
    }


def _sizes(classes: int, bias: bool = False, pooling: Literal["cls", "mean"] = "cls") -> EncoderSizes:
    headed = classes > 0
    return EncoderSizes(
        token_types=0,
        biases=False,
        classes=classes,
        head_dense=headed,
        head_activation="gelu",
        head_bias=headed and bias,
        head_normed=headed,
        head_pooling=pooling,
        rotates=True,
    )


def _full_layers(blocks: int, period: int) -> tuple[int, ...]:
    return tuple(range(0, blocks, period))


def _size_fields(config: ModelConfig) -> Fields:
    return {
        "encoder": _sizes(0),
        "head_count_kv": config.head_count,
        "sliding_window": config.sliding_window or _WINDOW,
        "full_attention_layers": _full_layers(config.block_count, _PERIOD),
        "rope_freq_base_swa": _LOCAL_BASE,
        "tied_output": True,
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    a = config.architecture
    if not file.get_int(f"{a}.attention.sliding_window"):
        raise file.error(f"{a}.attention.sliding_window", "missing: layers of this model have one")
    named = file.get_str(f"{a}.{_ACTIVATION}") or "gelu"
    if named not in _ACTIVATIONS:
        known = " and ".join(_ACTIVATIONS)
        raise file.error(f"{a}.{_ACTIVATION}", f"{named!r} is not implemented, only {known} are")
    found = encoder_sizes(file, config, rotates=True)
    pooling: Literal["cls", "mean"] = "mean" if file.get_int(f"{a}.{_HEAD_POOLING}", 1, 2) == 1 else "cls"
    sizes = _sizes(found.classes, "cls.bias" in file.tensors, pooling)
    own = file.get_float(f"{a}.{LOCAL_BASE}")
    return {
        "encoder": replace(sizes, token_types=found.token_types, biases=found.biases),
        "block": config.block.with_feed_forward(activation=_ACTIVATIONS[named]),
        "full_attention_layers": full_layers_of_gguf(file, config, _PERIOD, _full_layers),
        "rope_freq_base_swa": _LOCAL_BASE if own is None else own,
        "pooling": config.pooling or ("rank" if found.classes else None),
    }


MODERN_BERT = Architecture(
    name="modern-bert",
    block=BlockForm(
        AttentionForm(merged=True),
        feed_forward=FeedForwardForm(activation="gelu_erf", merged_gate=True),
        norms=Norms(kind="layer"),
    ),
    build=_layers,
    model_types={
        "modernbert": ModelType(
            {
                "vocab_size": 50368,
                "hidden_size": 768,
                "intermediate_size": 1152,
                "num_hidden_layers": 22,
                "num_attention_heads": 12,
                "max_position_embeddings": 8192,
                "norm_eps": 1e-5,
                "hidden_activation": "gelu",
                "local_attention": 128,
                "classifier_pooling": "cls",
                "classifier_bias": False,
                "classifier_activation": "gelu",
                "tie_word_embeddings": True,
            },
            reads_layer_types=True,
            common_keys=_common_keys,
            fields=_fields,
            size_keys={"sliding_window": "local_attention", "rms_eps": "norm_eps"},
        )
    },
    rope_scalings=frozenset(),
    hf_modules={
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
    top_tensors=_tensors,
    hf_unused=("head.", "decoder."),
    size_fields=_size_fields,
    gguf_keys=(CAUSAL, PATTERN, LOCAL_BASE, RMS_EPS, _ACTIVATION, _HEAD_POOLING),
    gguf_fields=_gguf_fields,
    synthetic={
        "modernbert-base": {
            "vocab_size": 50368,
            "context_length": 8192,
            "embedding_length": 768,
            "block_count": 22,
            "feed_forward_length": 1152,
            "head_count": 12,
            "head_count_kv": 12,
            "head_dim": 64,
            "rope_freq_base": _BASE,
            "sliding_window": 128,
            "tied_output": True,
        },
        "modernbert-tiny": {
            "block_count": 4,
            "head_count_kv": 8,
            "rope_freq_base": _BASE,
            "sliding_window": 16,
            "tied_output": True,
        },
    },
)
