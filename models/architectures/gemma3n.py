"""Gemma 3n (E2B, E4B), the text model: a token has several rows, of which a layer computes one (AltUp).

Every fifth layer sees everything, the others have a window. Scores are not scaled. Norms of query and key heads have
weights, norms of value heads have none. The last layers use the keys and values of earlier ones. Every layer adds
per-layer embeddings (blocks/layer_input.py) to the rows that it does not compute (blocks/altup.py). In some layers
only the part of a gate above its row's cutoff counts (kernels/altup.py); llama.cpp takes the cutoff as 1.645 in the
first ten layers. Logits are soft-capped. Source: `Gemma3nTextModel` in the `transformers` library; llama.cpp's
converter for the names of GGUF files.
"""

from collections.abc import Sequence
from math import inf, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.architectures.windows import LOCAL_BASE, PATTERN, full_layers, gguf_fields, rope_of_kinds
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm, Norms
from quengine.models.config import (
    LIMITS,
    AltUpSizes,
    LayerInputSizes,
    LayerSizes,
    ModelConfig,
)
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer, number

_PERIOD = 5
_BASE, _LOCAL_BASE = 1e6, 1e4
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""Layers with sparse activations of models with more layers, and the share of zeros, where config.json gives none."""

_CAP = "final_logit_softcapping"
_SHARED, _PER_LAYER = "attention.shared_kv_layers", "embedding_length_per_layer_input"
_STREAMS, _ACTIVE, _CUTOFFS = "altup.num_inputs", "altup.active_idx", "activation_sparsity_scale"
_RANK = "blk.0.laurel_l.weight"
_ONLY = {"altup_active_idx": 0, "altup_correct_scale": True}


def _layer_kinds(_keys: Keys, blocks: int) -> Sequence[LayerKind]:
    full = set(full_layers(blocks, _PERIOD))
    return ["full_attention" if i in full else "sliding_attention" for i in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    lengths = keys.get("intermediate_size")
    if isinstance(lengths, list):  # of each layer
        blocks = integer(keys, "num_hidden_layers", *LIMITS["block_count"])
        if len(lengths) != blocks:
            raise config_error("intermediate_size", f"{len(lengths)} values for {blocks} layers")
        each = [
            integer({"intermediate_size": one}, "intermediate_size", *LIMITS["feed_forward_length"])
            for one in lengths
        ]
        keys = {**keys, "intermediate_size": max(each), "intermediate_sizes": each}
    if keys.get("sliding_window") is None:
        raise config_error("sliding_window", "missing: layers of this model have one")
    keys = rope_of_kinds(keys, _BASE, _LOCAL_BASE)
    return {**keys, "hidden_act": keys.get("hidden_activation", "gelu_pytorch_tanh")}


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    for key, only in _ONLY.items():
        if (value := keys.get(key, only)) != only or isinstance(value, bool) != isinstance(only, bool):
            raise config_error(key, f"{value!r} is not implemented, only {only} is")
    cap = keys.get(_CAP)
    if cap is not None and not number(keys, _CAP, 0.0) > 0.0:
        raise config_error(_CAP, f"{cap} is not positive")
    blocks = config.block_count
    streams = integer(keys, "altup_num_inputs", 2, 16)
    rank = integer(keys, "laurel_rank", *LIMITS["embedding_length"])
    return {
        "altup": AltUpSizes(streams, rank, _cutoffs(keys, blocks)),
        "layer_input": _layer_input(keys, config),
        "layer_sizes": _layer_sizes(config, keys.get("intermediate_sizes") or []),
        "shared_kv_layers": integer(keys, "num_kv_shared_layers", 0, 1 << 24),
        "rope_freq_base_swa": number(keys, "rope_local_base_freq", _LOCAL_BASE),
        "logit_softcap": 0.0 if cap is None else float(cap),
    }


def _layer_input(keys: Keys, config: ModelConfig) -> LayerInputSizes:
    """The sizes of per-layer embeddings. Tokens beyond the table, of images and sounds, have its first row."""
    length = integer(keys, "hidden_size_per_layer_input", *LIMITS["embedding_length"])
    rows = integer(keys, "vocab_size_per_layer_input", *LIMITS["vocab_size"])
    if rows > config.vocab_size:
        problem = (
            f"{rows} is more than the vocabulary of {config.vocab_size} tokens, which is not implemented"
        )
        raise config_error("vocab_size_per_layer_input", problem)
    return LayerInputSizes(length, rows if rows < config.vocab_size else 0)


def _layer_sizes(config: ModelConfig, lengths: Sequence[int]) -> tuple[LayerSizes, ...]:
    if len(set(lengths)) < 2:
        return ()
    return tuple(LayerSizes(config.head_count, config.head_count_kv, length) for length in lengths)


def _cutoffs(keys: Keys, blocks: int) -> tuple[float, ...]:
    """Each layer's cutoff in standard deviations, rounded as in `transformers`: below it lies the share of a normal
    distribution's values that config.json gives."""
    shares: Any = keys.get("activation_sparsity_pattern")
    if shares is None:
        sparse = _SPARSE_LAYERS if blocks > _SPARSE_LAYERS else 0
        shares = [_SPARSITY] * sparse + [0.0] * (blocks - sparse)
    if not isinstance(shares, list) or len(shares) != blocks:
        raise config_error("activation_sparsity_pattern", f"is not a share for each of {blocks} layers")
    return tuple(_cutoff(share) for share in shares)


def _cutoff(share: Any) -> float:
    share = number({"share": share}, "share", 0.0) if isinstance(share, int | float) else share
    if not isinstance(share, float) or not share < 1.0:
        raise config_error("activation_sparsity_pattern", f"{share!r} is not a share below 1")
    rounded = float(np.float32(share))
    return float(np.float32(NormalDist().inv_cdf(rounded))) if rounded > 0.0 else -inf


def _size_fields(config: ModelConfig) -> Fields:
    return {
        "attention_scale": 1.0,
        "embedding_scale": float(np.float32(sqrt(config.embedding_length))),
        "rope_freq_base_swa": None if config.sliding_window is None else _LOCAL_BASE,
        "full_attention_layers": full_layers(config.block_count, _PERIOD) if config.sliding_window else (),
        "logit_softcap": 30.0,
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    prefix = config.architecture
    if (active := file.get_int(f"{prefix}.{_ACTIVE}")) not in (None, 0):
        raise file.error(f"{prefix}.{_ACTIVE}", f"{active} is not implemented, only 0 is")
    cutoffs = file.metadata.get(f"{prefix}.{_CUTOFFS}")
    if not isinstance(cutoffs, np.ndarray) or cutoffs.dtype.kind != "f":
        raise file.error(f"{prefix}.{_CUTOFFS}", f"is not a number for each of {config.block_count} layers")
    if (left := file.tensors.get(_RANK)) is None:
        raise file.tensor_error(_RANK, f"missing: this {prefix} model needs it")
    cap = file.get_float(f"{prefix}.{_CAP}")
    limits = LIMITS["embedding_length"]
    return {
        **gguf_fields(file, config, _PERIOD, _LOCAL_BASE),
        "altup": AltUpSizes(
            file.require_int(f"{prefix}.{_STREAMS}", 2, 16), left.shape[0], tuple(map(float, cutoffs))
        ),
        "layer_input": LayerInputSizes(file.require_int(f"{prefix}.{_PER_LAYER}", *limits)),
        "shared_kv_layers": file.get_int(f"{prefix}.{_SHARED}") or 0,
        "logit_softcap": 30.0 if cap is None else cap,  # old files lack the key; llama.cpp takes 30
    }


_TEXT = ModelType(
    {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
        _CAP: 30.0,
        "tie_word_embeddings": True,
    },
    layer_kinds=_layer_kinds,
    reads_layer_types=True,
    size_keys={
        "shared_kv_layers": "num_kv_shared_layers",
        "layer_input.length": "hidden_size_per_layer_input",
        "altup.cutoffs": "activation_sparsity_pattern",
    },
    common_keys=_common_keys,
    fields=_fields,
)


def _released(layers: int, length: int, shared: int) -> dict[str, Any]:
    return {
        "vocab_size": 262144,
        "context_length": 32768,
        "embedding_length": 2048,
        "block_count": layers,
        "feed_forward_length": length,
        "head_count": 8,
        "head_count_kv": 2,
        "head_dim": 256,
        "rope_freq_base": _BASE,
        "sliding_window": 512,
        "shared_kv_layers": shared,
        "layer_input_length": 256,
        "sparse_layers": _SPARSE_LAYERS,
        "tied_output": True,
    }


GEMMA3N = Architecture(
    name="gemma3n",
    block=BlockForm(
        AttentionForm(qk_norm="head", v_norm=True),
        feed_forward=FeedForwardForm(activation="gelu_tanh"),
        norms=Norms(placement="both"),
    ),
    model_types={
        "gemma3n": ModelType(
            **{
                **{field: getattr(_TEXT, field) for field in _TEXT.__dataclass_fields__},
                "text_models": ("gemma3n_text",),
            }
        ),
        "gemma3n_text": _TEXT,
    },
    rope_scalings=frozenset(),
    hf_modules={"ffn_norm": "pre_feedforward_layernorm"},
    vocabulary="spm",
    size_fields=_size_fields,
    sizes_by_layer=True,
    gguf_keys=(PATTERN, LOCAL_BASE, _CAP, _SHARED, _PER_LAYER, _STREAMS, _ACTIVE, _CUTOFFS),
    gguf_fields=_gguf_fields,
    synthetic={
        "gemma-3n-e2b": _released(30, 8192, 10),
        "gemma-3n-e4b": _released(35, 16384, 15),
        "gemma-3n-tiny": {
            "block_count": 6,
            "sliding_window": 64,
            "feed_forward_length": 512,
            "head_count": 4,
            "head_count_kv": 1,
            "head_dim": 64,
            "shared_kv_layers": 1,
            "layer_input_length": 64,
            "laurel_rank": 32,
            "sparse_layers": 2,
            "tied_output": True,
        },
    },
)
