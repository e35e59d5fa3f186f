"""Llama 4, the text model: experts that read their row times a sigmoid score, a shared expert, layers without rotation.

Every fourth layer does not rotate and sees everything; its queries grow with the position. The others rotate,
normalize rotated queries and keys without weights (not with 128 experts), and attend within chunks of 8,192
positions. GGUF files have no keys for this; llama.cpp takes it for granted.
Source: `Llama4TextModel` in the `transformers` library.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Fields, HFPart, Keys, ModelType
from quengine.models.architectures.mixtures import MIXTRAL
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.blocks.block import Block
from quengine.models.blocks.uniform import attention_of, channel_mixer
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, flag, integer, number

_INTERVAL, _CHUNK = 4, 8192
_MOST = LIMITS["block_count"][1]
_STEP = "interleave_moe_layer_step"
_WINDOW = "attention.sliding_window"
_WITHOUT_NORMS = 128
"""Experts of the model whose queries and keys have no norms, by which llama.cpp recognizes it."""


def _layers(config: ModelConfig) -> Sequence[Block]:
    """Attention and a channel mixer in each layer; queries grow with the position only in layers that do not rotate."""
    found = []
    for i in range(config.block_count):
        attention = attention_of(config, i)
        if attention.rotation.turns:
            attention = replace(attention, temperature=None)
        found.append(Block(attention, channel_mixer(config, i)))
    return found


def _common_keys(keys: Keys) -> Keys:
    """config.json with its lengths in common keys. Its own `intermediate_size` is the length of experts."""
    lengths = {
        "moe_intermediate_size": keys["intermediate_size"],
        "intermediate_size": keys["intermediate_size_mlp"],
    }
    return {**keys, **lengths}


def _dense_layers(keys: Keys, blocks: int) -> Sequence[int]:
    given = keys.get("moe_layers")
    if given is None:
        step = integer(keys, _STEP, 1, _MOST)
        return tuple(i for i in range(blocks) if (i + 1) % step)
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise config_error("moe_layers", "is not a list of layers")
    return tuple(i for i in range(blocks) if i not in given)


def _unrotated(keys: Keys, blocks: int) -> tuple[int, ...]:
    flags = keys.get("no_rope_layers")
    if not flags:
        interval = integer(keys, "no_rope_layer_interval", 1, _MOST, default=_INTERVAL)
        return tuple(range(interval - 1, blocks, interval))
    if not isinstance(flags, list) or len(flags) < blocks or set(map(str, flags)) - {"0", "1"}:
        raise config_error("no_rope_layers", f"is not a 0 or 1 for each of {blocks} layers")
    return tuple(compress(range(blocks), (flag == 0 for flag in flags)))


def _chunks(length: int, context: int, full: Sequence[int]) -> Fields:
    """Chunks of `length` positions, 0 for none, in all layers but those that attend to everything."""
    return {
        "attention_chunk": length,
        "sliding_window": length or None,
        "full_attention_layers": tuple(full) if length else (),
        "context_length": min(context, length) if length % BLOCK_SIZE else context,
    }


def _full_layers(keys: Keys, unrotated: Sequence[int], blocks: int) -> tuple[int, ...]:
    """The layers that attend to everything."""
    kinds = keys.get("layer_types")
    if kinds is None:
        return tuple(unrotated)
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise config_error("layer_types", f"is not a list of the kinds of {blocks} layers")
    if other := sorted({str(kind) for kind in kinds} - {"full_attention", "chunked_attention"}):
        raise config_error("layer_types", f"{', '.join(other)}: not implemented")
    return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    assert config.experts is not None
    unrotated = _unrotated(keys, config.block_count)
    full = _full_layers(keys, unrotated, config.block_count)
    limits = LIMITS["context_length"]
    chunk = integer(keys, "attention_chunk_size", *limits) if len(full) < config.block_count else 0
    context = integer(keys, "max_position_embeddings", *LIMITS["context_length"])
    tuned = flag(keys, "attn_temperature_tuning")
    scale = number(keys, "attn_scale", 0.1) if tuned else 0.0
    length = integer(keys, "floor_scale", *LIMITS["context_length"]) if scale else 0
    return {
        "block": config.block.with_attention(unit_norms=flag(keys, "use_qk_norm")),
        "unrotated_layers": unrotated,
        "attention_temperature_scale": scale,
        "attention_temperature_length": length,
        "attention_temperature_offset": 1,
        **_chunks(chunk, context, full),
        "experts": replace(config.experts, shared_feed_forward_length=config.experts.feed_forward_length),
    }


def _size_fields(config: ModelConfig) -> Fields:
    experts = config.experts
    unrotated = tuple(range(_INTERVAL - 1, config.block_count, _INTERVAL))
    return {
        "block": config.block.with_attention(
            unit_norms=experts is not None and experts.count != _WITHOUT_NORMS
        ),
        "unrotated_layers": unrotated,
        "attention_temperature_scale": 0.1,
        "attention_temperature_length": _CHUNK,
        "attention_temperature_offset": 1,
        **_chunks(_CHUNK, config.context_length, unrotated),
        "experts": experts and replace(experts, shared_feed_forward_length=experts.feed_forward_length),
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    """The dense layers of a file. Raises GGUFError for a chunk length, at the key of windows, other than the usual one:
    also for 0, with which llama.cpp rotates in all layers."""
    window = file.get_int(f"llama4.{_WINDOW}")
    if window not in (None, _CHUNK):
        raise file.error(f"llama4.{_WINDOW}", f"{window}: only chunks of {_CHUNK} positions are implemented")
    step = file.get_int(f"llama4.{_STEP}", 1, _MOST) or 1
    assert config.experts is not None
    dense = tuple(i for i in range(config.block_count) if (i + 1) % step)
    return {"experts": replace(config.experts, dense_layers=dense)}


_TEXT = ModelType(
    {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        _STEP: 1,
        "use_qk_norm": True,
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
    },
    expert_keys={**MIXTRAL, "feed_forward_length": "moe_intermediate_size"},
    dense_layers=_dense_layers,
    common_keys=_common_keys,
    fields=_fields,
)

LLAMA4 = Architecture(
    name="llama4",
    block=BlockForm(AttentionForm(rope_layout="pairs", unit_norms=True)),
    build=_layers,
    router=RouterKind(used=1, scores="sigmoid", normalized=False, weighs_inputs=True),
    model_types={"llama4": replace(_TEXT, text_models=("llama4_text",)), "llama4_text": _TEXT},
    hf_modules={
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ffn_gate_inp": "feed_forward.router",
        "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
        "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
        "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
    },
    hf_parts={
        "ffn_gate_exps.weight": HFPart("feed_forward.experts.gate_up_proj", "first half", transposed=True),
        "ffn_up_exps.weight": HFPart("feed_forward.experts.gate_up_proj", "second half", transposed=True),
        "ffn_down_exps.weight": HFPart("feed_forward.experts.down_proj", transposed=True),
    },
    hf_rope_pairs=True,
    size_fields=_size_fields,
    gguf_keys=(_STEP,),
    gguf_fields=_gguf_fields,
    synthetic={
        "llama4-scout": {
            "vocab_size": 202048,
            "context_length": 10485760,
            "embedding_length": 5120,
            "block_count": 48,
            "feed_forward_length": 16384,
            "head_count": 40,
            "rope_freq_base": 5e5,
            "experts": 16,
            "experts_used": 1,
            "expert_feed_forward_length": 8192,
            "shared_feed_forward_length": 8192,
        },
        "llama4-tiny": {
            "block_count": 5,
            "experts": 16,
            "experts_used": 1,
            "expert_feed_forward_length": 256,
            "shared_feed_forward_length": 256,
        },
    },
)
