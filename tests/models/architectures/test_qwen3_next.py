"""Qwen3-Next and Qwen3.5 as folders and as GGUF: the logits of `transformers`, states, and refusals by name."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.architectures.both_files import Case, SameLogits
from tests.transformers_models import DROP, edit

LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
SIZES = {
    "num_hidden_layers": 5,
    "layer_types": LAYERS,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 32,
}
MOE = {
    **SIZES,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


def remember(model: Any) -> None:
    """Decays near 1, so that positions far back count; and inputs of SiLU so large that queries and keys are hardly
    negative: of a query across all keys only rounding is left, which the norm of the result then makes large."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-5.0, 0.0)
        if name.endswith("conv1d.weight"):
            weight.normal_(0.0, 2.0)


def as_released(folder: Path) -> None:
    """With the first keys: an interval in place of the layers' kinds, rotary sizes at the top level."""
    edit(folder, layer_types=DROP, full_attention_interval=2, rope_parameters=DROP)
    edit(folder, rope_theta=10000.0, partial_rotary_factor=0.5)


def with_draft_layer(folder: Path) -> None:
    """With a layer as its last one with attention that drafts tokens, as released folders have."""
    path = folder / "model.safetensors"
    tensors, random = load_file(path), torch.Generator().manual_seed(5)
    layer = "model.layers.4."
    found = {
        name.replace(layer, "mtp.layers.0."): torch.randn(tensor.shape, generator=random)
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    found |= {f"mtp.{name}.weight": torch.randn(64, generator=random) for name in norms}
    found["mtp.fc.weight"] = torch.randn(64, 128, generator=random)
    save_file({**tensors, **found}, path, metadata={"format": "pt"})
    edit(folder, mtp_num_hidden_layers=1)


def case(model_type: str, config: dict[str, Any], **options: Any) -> Case:
    return Case(model_type, config, change=remember, **{"drafts": False, **options})


CASES = {
    "plain": case("qwen3_5_text", SIZES),
    "three value heads for each key head": case(
        "qwen3_5_text", {**SIZES, "linear_num_value_heads": 6, "tie_word_embeddings": True}
    ),
    "as many key heads, three taps": case(
        "qwen3_5_text", {**SIZES, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3}
    ),
    "interval": case(
        "qwen3_5_text",
        {**SIZES, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
        edit=as_released,
        converts=False,
    ),
    "draft layer": case("qwen3_5_text", SIZES, edit=with_draft_layer, drafts=True),
    "vision": case("qwen3_5_text", SIZES, vision=True),
    "experts": case("qwen3_5_moe_text", MOE, mixture=True),
    "experts and vision": case("qwen3_5_moe_text", MOE, vision=True),
    "next": case("qwen3_next", {**MOE, "linear_num_value_heads": 6}),
    "next, not normalized": case("qwen3_next", {**MOE, "norm_topk_prob": False}, converts=False),
    "next, dense layers": case(
        "qwen3_next", {**MOE, "mlp_only_layers": [0], "decoder_sparse_step": 2}, converts=False
    ),
}


class TestLogits(SameLogits):
    main = ("plain", "experts", "next")
