"""Mixtral, a llama with experts, in every form of its files: the logits of `transformers`, and which rows go where."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import MIXTURE_KINDS, Case, SameLogits, opened, reference_run
from tests.transformers_models import TOKENS

OF_FIVE = {"num_local_experts": 5, "num_experts_per_tok": 2}


def _last_never_chosen(model: Any) -> None:
    """Of logits a, -a, b, -b and 0 the last is never among the two highest."""
    for layer in model.model.layers:
        first, _, second, _, _ = layer.mlp.gate.weight
        layer.mlp.gate.weight.copy_(torch.stack([first, -first, second, -second, first * 0]))


def _second_always_chosen(model: Any) -> None:
    """Of logits a, 0 and -a the second is always among the two highest."""
    for layer in model.model.layers:
        first = layer.mlp.gate.weight[0]
        layer.mlp.gate.weight.copy_(torch.stack([first, first * 0, -first]))


def _all_to_the_third(model: Any) -> None:
    """The first element of every row is large, and only the third expert's logit is."""
    model.model.embed_tokens.weight[:, 0] = 12.0
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight[0] = 1.0
        layer.mlp.gate.weight.mul_(0.1)
        layer.mlp.gate.weight[2, 0] = 6.0


def _case(change: Any = None, **config: Any) -> Case:
    return Case("mixtral", config, mixture=True, change=change)


CASES = {
    "two of four": _case(num_local_experts=4, num_experts_per_tok=2),
    "one of eight, tied": _case(num_local_experts=8, num_experts_per_tok=1, tie_word_embeddings=True),
    "all of four": _case(num_local_experts=4, num_experts_per_tok=4),
    "a single expert": _case(num_local_experts=1, num_experts_per_tok=1),
    "one never chosen": _case(_last_never_chosen, **OF_FIVE),
    "one always chosen": _case(_second_always_chosen, num_local_experts=3, num_experts_per_tok=2),
    "all tokens to one": _case(_all_to_the_third, num_local_experts=4, num_experts_per_tok=1),
    "a window": Case("mixtral", {**OF_FIVE, "sliding_window": 8}, converts=False, mixture=True),
}


class TestLogits(SameLogits):
    main = ("two of four",)
    engine_kinds = MIXTURE_KINDS


def test_the_converter_joins_gate_and_up_by_its_option(root: Path) -> None:
    tensors = opened(root, "two of four", "fused gguf").tensors
    assert tensors["blk.1.ffn_gate_up_exps.weight"].shape == (4, 2 * 96, 64)
    assert {name.split(".")[2] for name in tensors if name.endswith("_exps.weight")} == {
        "ffn_gate_up_exps",
        "ffn_down_exps",
    }


def rows_of_experts(root: Path, name: str) -> list[list[int]]:
    """How many rows each expert computes, a list for each layer."""
    case = CASES[name]
    counts = [
        torch.bincount(experts.flatten(), minlength=case.config["num_local_experts"]).tolist()
        for experts in reference_run(root, name, "gguf", case.vocab).chosen
    ]
    assert len(counts) == 2
    return counts


def test_each_row_has_as_many_experts_as_the_file_says(root: Path) -> None:
    assert [sum(layer) for layer in rows_of_experts(root, "two of four")] == [2 * TOKENS] * 2


def test_all_of_four_compute_every_row(root: Path) -> None:
    assert rows_of_experts(root, "all of four") == [[TOKENS] * 4] * 2


def test_an_expert_that_no_row_chooses_computes_none(root: Path) -> None:
    for *others, last in rows_of_experts(root, "one never chosen"):
        assert last == 0 and min(others) > 0


def test_an_expert_that_every_row_chooses_computes_all(root: Path) -> None:
    assert [n for _, n, _ in rows_of_experts(root, "one always chosen")] == [TOKENS] * 2
    assert rows_of_experts(root, "all tokens to one") == [[0, 0, TOKENS, 0]] * 2


def test_a_folder_without_experts_in_its_config_has_those_of_mixtral() -> None:
    config = read_hf_config(hf_config(ModelSizes("mixtral"), 64, rope_theta=None, rms_norm_eps=None))
    assert config.experts is not None and config.architecture == "llama"
    assert (config.experts.count, config.experts.router.used) == (8, 2)
    assert (config.rope_freq_base, config.rms_eps) == (1e6, 1e-5)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_experts_of_a_dense_model_type_are_refused(model_type: str, key: str) -> None:
    with pytest.raises(EngineError, match=f"{model_type}' with a mixture of experts is not supported"):
        read_hf_config(hf_config(ModelSizes(model_type), 64, **{key: 8}))
