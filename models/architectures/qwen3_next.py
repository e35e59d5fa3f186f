"""Qwen3-Next, Qwen3.5, 3.6 and 3.8: gated delta nets, with attention in every fourth layer, whose output is gated.

A part of each head is rotated; its frequencies take turns among three positions, which are equal for text. Folders
store norm weights minus one, except the gated delta net's. In GGUF files of Qwen3.5 the value heads of each key head
are `key_heads` apart (tiled); in those of Qwen3-Next and in folders they are side by side. Layers that draft tokens
(models/draft_layer.py) are named `mtp.` and not counted in folders; GGUF files count them. Of models with vision the
text part is read. Source: `Qwen3NextModel`, `Qwen3_5TextModel` and `Qwen3_5MoeTextModel` in `transformers`; llama.cpp's
converter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import (
    Architecture,
    DraftNames,
    Fields,
    HFPart,
    Keys,
    ModelType,
)
from quengine.models.architectures.file_traits import DRAFTS, without_drafts
from quengine.models.architectures.mixtures import QWEN
from quengine.models.architectures.qwen_moe import dense_layers
from quengine.models.architectures.rope_axes import (
    SECTIONS,
    even_sections,
    gguf_axes,
    interleaved_axes,
    sections_of,
)
from quengine.models.blocks import AttentionForm, BlockForm, Norms
from quengine.models.blocks.block import Block
from quengine.models.blocks.gated_delta import GatedDelta, GatedDeltaSizes
from quengine.models.blocks.uniform import hybrid_layers
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, integer

_INTERVAL = 4
"""The interval of layers with attention, where neither file gives one."""

_RECURRENT, _EVERY = "attention.recurrent_layers", "full_attention_interval"
_SSM = {
    "taps": "ssm.conv_kernel",
    "head_dim": "ssm.state_size",
    "key_heads": "ssm.group_count",
    "value_heads": "ssm.time_step_rank",
}
_INNER = "ssm.inner_size"
_HF_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "head_dim": "linear_key_head_dim",
    "taps": "linear_conv_kernel_dim",
}
_MOST = LIMITS["block_count"][1]


def _build(config: ModelConfig) -> Sequence[Block]:
    return hybrid_layers(
        config, GatedDelta(config.embedding_length, _sizes(config), partial=config.ranks > 1)
    )


def _recurrent(blocks: int, interval: int) -> tuple[int, ...]:
    return tuple(i for i in range(blocks) if (i + 1) % interval)


def _size_fields(config: ModelConfig) -> Fields:
    """The layers of a synthetic model, with attention in the last if there are fewer than four; gated delta nets have
    default sizes if it gives none."""
    recurrent = _recurrent(config.block_count, min(_INTERVAL, config.block_count))
    by_key_head = config.architecture == "qwen3next"
    sizes = config.gated_delta or GatedDeltaSizes(2, 4, 128, 4, not by_key_head, by_key_head)
    frequencies = config.rope_dim // 2
    axes = interleaved_axes(even_sections(frequencies), frequencies)
    return {"recurrent_layers": recurrent, "gated_delta": sizes, "rope_axes": axes}


def _common_keys(keys: Keys) -> Keys:
    if keys.get("attn_output_gate") is False:
        raise config_error("attn_output_gate", "false is not implemented: the attention's output is gated")
    if keys.get("intermediate_size") is None and "moe_intermediate_size" in keys:  # no layer need be dense
        keys = {**keys, "intermediate_size": keys["moe_intermediate_size"]}
    return keys


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    sizes = {field: integer(keys, key, 1, 1 << 16) for field, key in _HF_SIZES.items()}
    values = integer(keys, "linear_value_head_dim", 1, 1 << 16)
    if values != sizes["head_dim"]:
        problem = f"{values} differs from linear_key_head_dim, {sizes['head_dim']}, which is not implemented"
        raise config_error("linear_value_head_dim", problem)
    return {
        "recurrent_layers": _layer_types(keys, config.block_count),
        "gated_delta": _ordered(sizes, tiled=False),
        "rope_axes": interleaved_axes(sections_of(keys, (11, 11, 10)), config.rope_dim // 2),
    }


def _ordered(sizes: Mapping[str, int], tiled: bool, by_key_head: bool = False) -> GatedDeltaSizes:
    keys, values = sizes["key_heads"], sizes["value_heads"]
    return GatedDeltaSizes(keys, values, sizes["head_dim"], sizes["taps"], tiled, by_key_head)


def _fields_by_key_head(keys: Keys, config: ModelConfig) -> Fields:
    fields = _fields(keys, config)
    return {**fields, "gated_delta": replace(fields["gated_delta"], by_key_head=True), "rope_axes": ()}


def _layer_types(keys: Keys, blocks: int) -> tuple[int, ...]:
    """The layers that are gated delta nets."""
    kinds = keys.get("layer_types")
    if kinds is None:
        interval = integer(keys, _EVERY, 1, _MOST, default=_INTERVAL)
        return _with_attention(_recurrent(blocks, interval), blocks, _EVERY)
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise config_error("layer_types", f"is not a list of the kinds of {blocks} layers")
    if other := sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"}):
        raise config_error("layer_types", f"{', '.join(other)}: not implemented")
    found = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    return _with_attention(found, blocks, "layer_types")


def _with_attention(recurrent: tuple[int, ...], blocks: int, key: str) -> tuple[int, ...]:
    if len(recurrent) == blocks:
        raise config_error(key, "no layer has attention: not implemented")
    return recurrent


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    """The fields of a file, whose layer count includes the draft layers. Raises GGUFError."""
    prefix = config.architecture
    layers = without_drafts(file, config)
    sizes = {field: file.require_int(f"{prefix}.{key}", 1, 1 << 16) for field, key in _SSM.items()}
    inner, expected = file.require_int(f"{prefix}.{_INNER}"), sizes["value_heads"] * sizes["head_dim"]
    if inner != expected:
        problem = f"{inner} is not {sizes['value_heads']} value heads of {sizes['head_dim']}"
        raise file.error(f"{prefix}.{_INNER}", f"{problem}: other sizes than the keys' are not implemented")
    if config.sliding_window is not None:
        raise file.error(
            f"{prefix}.attention.sliding_window", "windows are not implemented in this architecture"
        )
    by_key_head = prefix == "qwen3next"
    return {
        **layers,
        "recurrent_layers": _gguf_recurrent(file, prefix, layers["block_count"], layers["draft_layers"]),
        "gated_delta": _ordered(sizes, tiled=not by_key_head, by_key_head=by_key_head),
        "rope_axes": gguf_axes(file, config, interleaved_axes),
    }


def _gguf_recurrent(file: GGUFFile, prefix: str, blocks: int, drafts: int) -> tuple[int, ...]:
    key = f"{prefix}.{_RECURRENT}"
    marks = file.get_bools(key)
    if marks is None:
        key = f"{prefix}.{_EVERY}"
        interval = file.get_int(key, 1, _MOST) or _INTERVAL
        found = _recurrent(blocks, interval)
    else:
        if len(marks) != blocks + drafts or any(marks[blocks:]):
            raise file.error(key, f"does not mark some of the first {blocks} of {blocks + drafts} layers")
        found = tuple(i for i, mark in enumerate(marks[:blocks]) if mark)
    if len(found) == blocks:
        raise file.error(key, "no layer has attention: not implemented")
    return found


def _unchanged(weights: Any) -> Any:
    return weights


def _decay(a_log: Any) -> Any:
    return -a_log.exp()


_HF_CHANGES = {"ssm_norm.weight": _unchanged, "ssm_a": _decay}
_BLOCK = BlockForm(AttentionForm(qk_norm="head", gated=True), norms=Norms(ffn="post_attention_norm"))
_GGUF_KEYS = (_RECURRENT, _EVERY, DRAFTS, SECTIONS, _INNER, *_SSM.values())
_ROUTER = RouterKind(used=8, scores="softmax", normalized=True)
_DRAFT_NAMES = DraftNames(
    layer="mtp.layers.0.",
    eh_proj="mtp.fc",
    enorm="mtp.pre_fc_norm_embedding",
    hnorm="mtp.pre_fc_norm_hidden",
    head_norm="mtp.norm",
)
_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MOE_DEFAULTS: Mapping[str, object] = {
    **{key: value for key, value in _DEFAULTS.items() if key != "intermediate_size"},
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
_EXPERTS = {**QWEN, "shared_feed_forward_length": "shared_expert_intermediate_size"}
_ALWAYS_NORMALIZED = {name: key for name, key in _EXPERTS.items() if name != "normalized"}

_QWEN3_5 = ModelType(_DEFAULTS, reads_partial_rotary_factor=True, common_keys=_common_keys, fields=_fields)
_QWEN3_5_MOE = ModelType(
    _MOE_DEFAULTS,
    reads_partial_rotary_factor=True,
    expert_keys=_ALWAYS_NORMALIZED,
    common_keys=_common_keys,
    fields=_fields,
)

_SYNTHETIC = {
    "vocab_size": 248320,
    "context_length": 262144,
    "head_dim": 256,
    "rope_dim": 64,
    "rope_freq_base": 1e7,
    "key_heads": 16,
}
_TINY = {"block_count": 4, "rope_dim": 16, "key_heads": 2, "value_heads": 4}
_TINY_MOE = {
    **_TINY,
    "experts": 16,
    "experts_used": 4,
    "expert_feed_forward_length": 256,
    "shared_feed_forward_length": 256,
}

QWEN35 = Architecture(
    name="qwen35",
    block=_BLOCK,
    build=_build,
    model_types={
        "qwen3_5_text": _QWEN3_5,
        "qwen3_5": replace(_QWEN3_5, text_models=("qwen3_5_text",)),
    },
    hf_norm_offset=1.0,
    hf_changes=_HF_CHANGES,
    size_fields=_size_fields,
    gguf_keys=_GGUF_KEYS,
    gguf_fields=_gguf_fields,
    draft_names=_DRAFT_NAMES,
    synthetic={
        "qwen3.5-0.8b": {
            **_SYNTHETIC,
            "embedding_length": 1024,
            "block_count": 24,
            "feed_forward_length": 3584,
            "head_count": 8,
            "head_count_kv": 2,
            "value_heads": 16,
            "tied_output": True,
        },
        "qwen3.5-4b": {
            **_SYNTHETIC,
            "embedding_length": 2560,
            "block_count": 32,
            "feed_forward_length": 9216,
            "head_count": 16,
            "head_count_kv": 4,
            "value_heads": 32,
            "tied_output": True,
            "draft_layers": 1,
        },
        "qwen3.6-27b": {
            **_SYNTHETIC,
            "embedding_length": 5120,
            "block_count": 64,
            "feed_forward_length": 17408,
            "head_count": 24,
            "head_count_kv": 4,
            "value_heads": 48,
            "draft_layers": 1,
        },
        "qwen3.5-tiny": _TINY,
        "qwen3.5-mtp-tiny": {**_TINY, "draft_layers": 1},
    },
)

QWEN35MOE = replace(
    QWEN35,
    name="qwen35moe",
    block=_BLOCK.with_experts(shared_gate=True),
    router=_ROUTER,
    model_types={
        "qwen3_5_moe_text": _QWEN3_5_MOE,
        "qwen3_5_moe": replace(_QWEN3_5_MOE, text_models=("qwen3_5_moe_text",)),
    },
    synthetic={
        "qwen3.6-35b-a3b": {
            **_SYNTHETIC,
            "embedding_length": 2048,
            "block_count": 40,
            "feed_forward_length": 512,
            "head_count": 16,
            "head_count_kv": 2,
            "value_heads": 32,
            "experts": 256,
            "draft_layers": 1,
        },
        "qwen3.5moe-tiny": _TINY_MOE,
        "qwen3.5moe-mtp-tiny": {**_TINY_MOE, "draft_layers": 1},
    },
)


def _rows_of_qkv(config: ModelConfig) -> tuple[int, Sequence[int]]:
    q, k, v, z = _sizes(config).rows_of_qkvz()
    return len(q) + len(k) + len(v) + len(z), [*q, *k, *v]


def _rows_of_z(config: ModelConfig) -> tuple[int, Sequence[int]]:
    q, k, v, z = _sizes(config).rows_of_qkvz()
    return len(q) + len(k) + len(v) + len(z), z


def _sizes(config: ModelConfig) -> GatedDeltaSizes:
    assert config.gated_delta is not None
    return config.gated_delta


QWEN3NEXT = replace(
    QWEN35MOE,
    name="qwen3next",
    router=replace(_ROUTER, used=10),
    model_types={
        "qwen3_next": ModelType(
            {
                **_MOE_DEFAULTS,
                "vocab_size": 151936,
                "intermediate_size": 5632,
                "num_hidden_layers": 48,
                "num_experts_per_tok": 10,
                "num_experts": 512,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
            },
            reads_partial_rotary_factor=True,
            expert_keys=_EXPERTS,
            dense_layers=dense_layers,
            common_keys=_common_keys,
            fields=_fields_by_key_head,
        )
    },
    hf_parts={
        "attn_qkv.weight": HFPart("linear_attn.in_proj_qkvz.weight", picks=_rows_of_qkv),
        "attn_gate.weight": HFPart("linear_attn.in_proj_qkvz.weight", picks=_rows_of_z),
    },
    synthetic={
        "qwen3-next-80b-a3b": {
            **_SYNTHETIC,
            "vocab_size": 151936,
            "embedding_length": 2048,
            "block_count": 48,
            "feed_forward_length": 512,
            "head_count": 16,
            "head_count_kv": 2,
            "value_heads": 32,
            "experts": 512,
        },
        "qwen3-next-tiny": _TINY_MOE,
    },
)
