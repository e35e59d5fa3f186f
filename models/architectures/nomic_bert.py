"""Nomic's BERT (nomic-embed-text v1 and v1.5), an encoder for retrieval: BERT whose positions rotate queries and keys.

Its feed-forward has a gate with SiLU, its matrices no biases, and one matrix has the rows of queries, keys and values.
config.json has GPT-2's keys in released folders. Source: Nussbaum et al. 2024, "Nomic Embed"; `NomicBertModel` in the
`transformers` library; llama.cpp's converter for the names of GGUF files.
"""

from typing import Any

from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.bert import (
    CAUSAL,
    encoder_layers,
    encoder_sizes,
    encoder_tensors,
    kinds_of_segments,
    layer_norm_keys,
    sizes_of,
)
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm, Norms
from quengine.models.config import EncoderSizes, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer, number

_BASE = 1000.0
_RELEASED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys of released folders -> those of `transformers`."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "prenorm": (False,),
    "causal": (False,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "moe_every_n_layers": (None, 0),
}
"""Keys -> what is implemented of them."""

_MAPPED, _TRAINED = 8192, 2048
"""Positions that released folders name, and those that the models were trained on."""


def _common_keys(keys: Keys) -> Keys:
    for key, values in _ONLY.items():
        if keys.get(key, values[0]) not in values:
            raise config_error(key, f"{keys[key]!r} is not implemented, only {values[0]!r} is")
    found = {**keys, **{ours: keys[theirs] for theirs, ours in _RELEASED.items() if theirs in keys}}
    if "n_positions" in keys:
        positions = integer(keys, "n_positions", 1, 1 << 30)
        trained = integer(keys, "max_trained_positions", 1, 1 << 30, default=_TRAINED)
        found["max_position_embeddings"] = min(positions, trained)
    if "rotary_emb_base" in keys:
        found["rope_parameters"] = {"rope_theta": number(keys, "rotary_emb_base", _BASE)}
    return layer_norm_keys(found)


def _fields(keys: Keys, _config: ModelConfig) -> Fields:
    return {"encoder": EncoderSizes(kinds_of_segments(keys), biases=False, rotates=True)}


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    return {"encoder": encoder_sizes(file, config, rotates=True)}


NOMIC_BERT = Architecture(
    name="nomic-bert",
    block=BlockForm(
        AttentionForm(merged=True), feed_forward=FeedForwardForm(activation="silu"), norms=Norms(kind="layer")
    ),
    build=encoder_layers,
    model_types={
        "nomic_bert": ModelType(
            {
                "vocab_size": 30528,
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "max_position_embeddings": _TRAINED,
                "layer_norm_eps": 1e-12,
                "type_vocab_size": 2,
                "hidden_act": "silu",
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": _BASE},
                "rope_theta": _BASE,
            },
            common_keys=_common_keys,
            fields=_fields,
        )
    },
    rope_scalings=frozenset(),
    hf_modules={
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
        "token_embd_norm": "emb_ln",
    },
    top_tensors=encoder_tensors,
    hf_layers="encoder.layers.",
    hf_unused=("pooler.", "cls."),
    size_fields=sizes_of(EncoderSizes(2, biases=False, rotates=True)),
    gguf_keys=(CAUSAL,),
    gguf_fields=_gguf_fields,
    synthetic={
        "nomic-embed-text": {
            "vocab_size": 30528,
            "context_length": _TRAINED,
            "embedding_length": 768,
            "block_count": 12,
            "feed_forward_length": 3072,
            "head_count": 12,
            "head_count_kv": 12,
            "head_dim": 64,
            "rope_freq_base": _BASE,
            "tied_output": True,
        },
        "nomic-embed-tiny": {"head_count_kv": 8, "rope_freq_base": _BASE, "tied_output": True},
    },
)
