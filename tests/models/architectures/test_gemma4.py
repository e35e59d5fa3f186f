"""Gemma 4 as a folder and as GGUF: the logits of `transformers`, heads of two sizes, experts beside a feed-forward."""

from pathlib import Path
from typing import Any

import torch

from quengine.models.config import CacheGroup
from tests.models.architectures.both_files import Case, SameLogits, opened

SIZES = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 5,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "final_logit_softcapping": 3.0,
}
SAME = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}


def scales(model: Any) -> None:
    """Other numbers than the ones that models are made with."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("layer_scalar"):
            tensor.uniform_(0.5, 1.5)
        if name.endswith(("router.scale", "per_expert_scale")):
            tensor.add_(torch.randn_like(tensor) * 0.3)
        if name.endswith(
            "q_norm.weight"
        ):  # scores of one size, as in trained models: nothing else scales them
            tensor.mul_(len(tensor) ** -0.5)


CASES = {
    "plain": Case("gemma4_text", {**SIZES, **SAME}, change=scales),
    "experts": Case("gemma4_text", {**SIZES, **SAME, **EXPERTS}, change=scales),
    "own values, uncapped": Case("gemma4_text", {**SIZES, "final_logit_softcapping": None}, change=scales),
}


class TestLogits(SameLogits):
    main = ("plain", "experts")


def test_layers_are_in_two_cache_groups(root: Path) -> None:
    for kind in ("gguf", "folder"):
        config = opened(root, "plain", kind).config
        assert config.cache_groups == (CacheGroup(None, (2, 3)), CacheGroup(5, (0, 1)))
        assert [config.head_size(i) for i in range(4)] == [16, 16, 32, 32]
        assert config.keys_as_values == (2, 3)
