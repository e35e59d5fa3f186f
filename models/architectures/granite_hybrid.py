"""Granite 4.0-H: Mamba2 layers, with attention in some, each before a feed-forward or experts beside a shared expert.

It has Granite's four multipliers (granite.py); the norm within Mamba2 does not read the residual stream, and keeps the
epsilon of the file. Attention is rotated only where a folder has `position_embedding_type` "rope", or where a GGUF file
does not deny it by `rope.scaling.finetuned`. A folder's `shared_mlp` is the shared expert, or the feed-forward of a
model without experts. As in llama.cpp's converter, folders with rotated attention in every layer and no experts (350M,
1B, Micro) are read as Granite. Sources: `GraniteMoeHybridModel` in `transformers`; llama.cpp's converter.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from quengine.models.architectures.architecture import Architecture, Fields, HFPart, Keys, ModelType
from quengine.models.architectures.file_traits import MAMBA2, counts_by_layer, mamba2_sizes
from quengine.models.architectures.granite import (
    FINETUNED,
    GRANITE,
    GRANITEMOE,
    HF_SCALES,
    gguf_multipliers,
    multipliers,
)
from quengine.models.architectures.mixtures import MIXTRAL
from quengine.models.blocks.block import Block
from quengine.models.blocks.mamba2 import Mamba2, Mamba2Sizes
from quengine.models.blocks.uniform import hybrid_layers
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, flag, integer

_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_ATTENTION = (5, 15, 25, 35)
"""The layers with attention in released models of 40 layers."""

_SIZES = {
    "heads": "mamba_n_heads",
    "groups": "mamba_n_groups",
    "state_dim": "mamba_d_state",
    "taps": "mamba_d_conv",
}


def _build(config: ModelConfig) -> Sequence[Block]:
    mamba = None
    if config.mamba2 is not None:
        mamba = Mamba2(config.embedding_length, config.mamba2, partial=config.ranks > 1)
    return hybrid_layers(config, mamba)


def _size_fields(config: ModelConfig) -> Fields:
    """The layers of a synthetic model: the first of a released one, with attention in the last if in no other."""
    blocks = config.block_count
    full = [i for i in _ATTENTION if i < blocks] or [blocks - 1]
    return {
        "recurrent_layers": tuple(i for i in range(blocks) if i not in full),
        "unrotated_layers": tuple(range(blocks)),
        "mamba2": config.mamba2 or Mamba2Sizes(4, 32, 1, 32, 4, config.rms_eps),
    }


def _common_keys(keys: Keys) -> Keys:
    """config.json in common keys; without experts the feed-forward is the shared expert. Raises EngineError."""
    kinds = keys.get("layer_types")
    kinds = keys.get("layers_block_type") if kinds is None else kinds
    if kinds is not None and not isinstance(kinds, list):
        raise config_error("layer_types", f"{str(kinds)[:40]} is not a list of the kinds of layers")
    keys = {**keys, "layer_types": kinds and [_OLD_KINDS.get(str(kind), str(kind)) for kind in kinds]}
    if keys.get("mamba_proj_bias"):
        raise config_error("mamba_proj_bias", "biases of Mamba2's projections are not implemented")
    if not keys["num_local_experts"]:
        keys = {**keys, "intermediate_size": keys["shared_intermediate_size"]}
    return keys


def _kinds(keys: Keys, blocks: int) -> list[str]:
    kinds = keys["layer_types"] or ["linear_attention"] * blocks
    if len(kinds) != blocks:
        raise config_error("layer_types", f"is not a list of the kinds of {blocks} layers")
    if other := sorted(set(kinds) - {"linear_attention", "full_attention"}):
        raise config_error("layer_types", f"{', '.join(other)}: not implemented")
    if "full_attention" not in kinds:
        raise config_error("layer_types", "no layer has attention: not implemented")
    return list(kinds)


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    kinds = _kinds(keys, config.block_count)
    position = keys.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise config_error(
            "position_embedding_type", f"{position!r} is not implemented; 'rope' and 'nope' are"
        )
    rotated = position == "rope"
    fields = {
        **multipliers(keys, config),
        "recurrent_layers": tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
        "unrotated_layers": () if rotated else tuple(range(config.block_count)),
        "mamba2": None,
    }
    if "linear_attention" in kinds:
        return {**fields, "mamba2": _mamba2(keys, config)}
    return {**fields, "architecture": "granite"} if config.experts is None and rotated else fields


def _mamba2(keys: Keys, config: ModelConfig) -> Mamba2Sizes:
    sizes = {field: integer(keys, key, 1, 1 << 16) for field, key in _SIZES.items()}
    inner = integer(keys, "mamba_expand", 1, 1 << 10) * config.embedding_length
    head_dim = inner // sizes["heads"]
    if keys["mamba_d_head"] not in ("auto", head_dim) or inner % sizes["heads"]:
        problem = (
            f"{sizes['heads']} heads of {keys['mamba_d_head']} are not {inner} elements: not implemented"
        )
        raise config_error("mamba_d_head", f"{problem} (mamba_expand times hidden_size)")
    return Mamba2Sizes(
        **sizes,
        head_dim=head_dim,
        eps=config.rms_eps,
        conv_bias=flag(keys, "mamba_conv_bias"),
        step_limits=_limits(keys["time_step_limit"]),
    )


def _limits(given: Any) -> tuple[float, float]:
    """The limits of the step of time. JSON has no infinity: `transformers` writes {"__float__": "Infinity"}."""
    pair = [inf if value == {"__float__": "Infinity"} else value for value in given or () if given]
    numbers = [value for value in pair if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(pair) != 2 or len(numbers) != 2 or not 0.0 <= numbers[0] <= numbers[1]:
        raise config_error("time_step_limit", f"{str(given)[:40]} is not a least and a largest step of time")
    return float(numbers[0]), float(numbers[1])


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    prefix = config.architecture
    if config.sliding_window is not None:
        key = f"{prefix}.attention.sliding_window"
        raise file.error(key, "windows are not implemented in this architecture")
    heads = counts_by_layer(file, "attention.head_count_kv", config)
    recurrent = tuple(i for i, count in enumerate(heads) if not count)
    rotated = file.get_bool(f"{prefix}.{FINETUNED}") is not False
    return {
        **gguf_multipliers(file, config),
        "recurrent_layers": recurrent,
        "unrotated_layers": () if rotated else tuple(range(config.block_count)),
        "mamba2": mamba2_sizes(file, config) if recurrent else None,
    }


def _decay(a_log: Any) -> Any:
    return -a_log.exp()


_DEFAULTS: Mapping[str, object] = {
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "time_step_limit": [0.0, inf],
}
_SHARED = "shared_mlp.input_linear.weight"

GRANITEHYBRID = Architecture(
    name="granitehybrid",
    block=GRANITE.block,
    build=_build,
    router=GRANITEMOE.router,
    model_types={
        "granitemoehybrid": ModelType(
            _DEFAULTS,
            expert_keys={**MIXTRAL, "shared_feed_forward_length": "shared_intermediate_size"},
            size_keys={
                f"mamba2.{field}": key for field, key in (*_SIZES.items(), ("head_dim", "mamba_d_head"))
            },
            common_keys=_common_keys,
            fields=_fields,
            may_be_dense=True,
        )
    },
    hf_modules={**GRANITEMOE.hf_modules, "ffn_down": "shared_mlp.output_linear"},
    hf_parts={
        **GRANITEMOE.hf_parts,
        "ffn_gate.weight": HFPart(_SHARED, "first half"),
        "ffn_up.weight": HFPart(_SHARED, "second half"),
    },
    hf_changes={"ssm_a": _decay},
    size_fields=_size_fields,
    gguf_keys=(*HF_SCALES, FINETUNED, *MAMBA2.values()),
    gguf_fields=_gguf_fields,
    has_recurrent_layers=True,
    synthetic={
        "granite-4.0-h-tiny": {
            "vocab_size": 100352,
            "context_length": 131072,
            "embedding_length": 1536,
            "block_count": 40,
            "feed_forward_length": 512,
            "head_count": 12,
            "head_count_kv": 4,
            "tied_output": True,
            "experts": 64,
            "experts_used": 6,
            "shared_feed_forward_length": 1024,
            "mamba_heads": 48,
            "mamba_groups": 1,
        },
        "granitehybrid-tiny": {
            "block_count": 4,
            "experts": 8,
            "experts_used": 2,
            "expert_feed_forward_length": 256,
            "shared_feed_forward_length": 512,
            "tied_output": True,
        },
    },
)
