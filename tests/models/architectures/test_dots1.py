"""dots.llm1 as a folder and as GGUF: the logits of `transformers`, dense layers, groups, biases and windows."""

from pathlib import Path
from typing import Any

from quengine.kernels.moe.router_kind import RouterKind
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened

SIZES = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}


def _case(converts: bool = True, **config: Any) -> Case:
    return Case("dots1", {**SIZES, **config}, converts=converts)


CASES = {
    "plain": _case(),
    "groups, normalized": _case(n_group=4, topk_group=2, norm_topk_prob=True),
    "biases": _case(attention_bias=True, first_k_dense_replace=0),
    "a window": _case(False, sliding_window=5, max_window_layers=1),
}


class TestLogits(SameLogits):
    pass


def test_both_files_describe_the_same_model(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "groups, normalized", kind).config
        assert config.experts is not None and config.experts.dense_layers == (0,)
        assert config.experts.shared_feed_forward_length == 96
        assert config.experts.router == RouterKind(3, "sigmoid", True, 2.5, groups=4, groups_used=2)
        block = opened(root, "biases", kind).config.block.attention
        assert block.qkv_bias and block.output_bias
        block = opened(root, "plain", kind).config.block.attention
        assert not block.qkv_bias and not block.output_bias
    assert opened(root, "a window", "folder").config.layer_windows == (None, 5)
