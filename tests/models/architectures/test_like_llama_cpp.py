"""llama.cpp's logits and greedy choices of files whose tests compare with `transformers` alone.

`benchmarks/checks/gguf_keys_sweep.py` compares the files of every architecture so, with every key.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.models.checkpoint import open_checkpoint
from tests.gguf_builder import ModelSizes
from tests.llama_cpp_logits import llama_cpp_logits
from tests.tiny_models import chat_vocabulary, write_tiny
from tests.transformers_models import nmse, our_logits

EXPERTS = {
    "expert_shared_count": 2,
    "leading_dense_block_count": 0,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "expert_gating_func": 2,
}
SCALES = {"embedding_scale": 6.0, "residual_scale": 0.5, "attention.scale": 0.3, "logit_scale": 4.0}
MANY = {"leading_dense_block_count": 0, "expert_shared_count": 2}
CASES: dict[str, dict[str, Any]] = {
    "deepseek2": EXPERTS,
    "mistral4": {**EXPERTS, "expert_gating_func": 1},
    "granitehybrid": SCALES,
    "nemotron_h": {},
    "nemotron_h_moe": {"expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_shared_count": 1},
    "smollm3": {},
    "gemma2": {"attention.sliding_window": 5},
    "seed_oss": {},
    "hunyuan-dense": {},
    "hunyuan-moe": {"expert_shared_count": 1},
    "ernie4_5": {},
    "ernie4_5-moe": {**MANY, "interleave_moe_layer_step": 1},
    "exaone4": {},
    "minimax-m2": {"expert_gating_func": 2},
    "dots1": EXPERTS,
    "bailingmoe2": {**EXPERTS, "expert_shared_count": 1},
    "glm4": {},
    "arcee": {},
    "cohere2": {},
    "qwen2vl": {"rope.dimension_sections": [4, 2, 2, 0]},
    "qwen3vl": {"rope.dimension_sections": [3, 3, 2, 0]},
    "qwen3vlmoe": {"rope.dimension_sections": [3, 3, 2, 0]},
    "llama4": {},
    "lfm2moe": {"leading_dense_block_count": 0, "expert_gating_func": 2},
}
"""Architecture -> keys beside those of `ModelSizes`."""

SIZES: dict[str, dict[str, int]] = {
    "dots1": {"kv_heads": 4},
    "minimax-m2": {"expert_feed_forward": 96},
    "hunyuan-moe": {"expert_feed_forward": 96},
    "llama4": {"blocks": 4},
}
TIED = ("cohere2", "gemma2")


@pytest.mark.parametrize("architecture", CASES)
def test_llama_cpp_computes_the_same(tmp_path: Path, architecture: str) -> None:
    """But for its cache in fp16, which tips the choice of experts at some positions: the median one is compared."""
    vocabulary, keys = chat_vocabulary(), CASES[architecture]
    changes = {"general.name": "tiny", **{f"{architecture}.{key}": value for key, value in keys.items()}}
    path = write_tiny(
        tmp_path / "m.gguf",
        architecture,
        sizes=ModelSizes(architecture, **SIZES.get(architecture, {})),
        changes=changes,
        vocabulary=vocabulary,
        tied=architecture in TIED,
    )
    vocab = len(vocabulary["tokenizer.ggml.tokens"])
    theirs = llama_cpp_logits(path, vocab)
    assert theirs is not None
    ours, expected = our_logits(open_checkpoint(path), vocab), torch.from_numpy(theirs).double()
    assert torch.tensor([nmse(*rows) for rows in zip(ours, expected, strict=True)]).median() < 1e-3
    assert (ours.argmax(-1) == expected.argmax(-1)).double().mean() > 0.8
