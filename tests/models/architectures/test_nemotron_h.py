"""Nemotron-H and Nemotron 3 as folders and as GGUF: the logits of `transformers`, states, and refusals by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.architectures import layers_of
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.block import STATELESS, SlotState
from quengine.models.blocks.mamba2 import Mamba2
from quengine.models.config import CacheGroup
from quengine.models.gguf import open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, bpe_vocabulary, model_builder
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened
from tests.models.architectures.long_batches import SameLongLogits
from tests.transformers_models import DROP, edit

LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
MAMBA = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "max_position_embeddings": 512,
}
MOE = {
    **MAMBA,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}


def remember(model: Any) -> None:
    """Memories that fade slowly, so that positions far back count, and steps of time above the least one."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-5.0, 0.0)
        if name.endswith("dt_bias"):
            weight.uniform_(-2.0, 1.0)
        if name.endswith("mixer.D"):
            weight.normal_()


def hurry(model: Any) -> None:
    """Steps of time of which many are below the least one."""
    remember(model)
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.sub_(4.0)


def case(pattern: str, config: dict[str, Any], **options: Any) -> Case:
    """Of these layers, by the letters of a released folder, which llama.cpp's converter reads."""

    def as_released(folder: Path) -> None:
        edit(folder, layers_block_type=DROP, hybrid_override_pattern=pattern)
        edit(folder, norm_eps=1e-5, num_hidden_layers=len(pattern))
        if "E" not in pattern:  # the converter takes it for a mixture of experts
            edit(folder, num_experts_per_tok=DROP, n_routed_experts=DROP)

    kinds = {"layers_block_type": [LETTERS[letter] for letter in pattern]}
    options = {"change": remember, "edit": as_released, "drafts": False, "has_gate": False, **options}
    return Case("nemotron_h", {**config, **kinds}, **options)


CASES = {
    "plain": case("ME*EM*", MOE, mixture=True),
    "dense": case("M-*-M-", {**MAMBA, "n_groups": 1, "conv_kernel": 3}),
    "both, no bias": case("M-E*", {**MOE, "use_conv_bias": False}, converts=False),
    "groups of experts": case(
        "ME*E", {**MOE, "n_group": 3, "topk_group": 2, "norm_topk_prob": False}, converts=False
    ),
    "least steps": case("M*E", {**MOE, "time_step_min": 0.05}, change=hurry, converts=False),
}


class TestLogits(SameLogits):
    main = ("plain", "dense")
    faults = ("attention scale", "norm", "layers")


def test_layers_are_declared_one_by_one(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "plain", kind).config
        assert config.architecture == "nemotron_h_moe"
        assert config.cache_groups == (CacheGroup(None, (2, 5)), CacheGroup(None, (0, 4), is_state=True))
        blocks = layers_of(config)
        assert [isinstance(block.mixer, Mamba2) for block in blocks] == [
            True,
            False,
            False,
            False,
            True,
            False,
        ]
        assert [block.feed_forward is None for block in blocks] == [True, False, True, False, True, True]
        assert blocks[0].state == SlotState(((4, 224), (8, 16, 24)), sections=((64, 24, 24), (1,)))
        assert blocks[1].state is STATELESS
        assert isinstance(blocks[2].mixer, Attention) and not blocks[2].mixer.rotation.turns
        assert opened(root, "dense", kind).config.architecture == "nemotron_h"


def test_the_limits_of_steps_are_the_folders_own(root: Path) -> None:
    assert opened(root, "plain", "folder").config.mamba2.step_limits == (0.001, float("inf"))
    assert opened(root, "plain", "gguf").config.mamba2.step_limits == (0.0, float("inf"))


class TestLongTexts(SameLongLogits):
    """`transformers` computes 128 positions at once."""

    lengths = (1, 70, 299)
    chunks = ((1, 0, 3), (0, 64, 125), (0, 0, 64), (0, 6, 1), (0, 0, 106))


KINDS_OF_LAYERS = [LETTERS[letter] for letter in "ME*EM"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": [*KINDS_OF_LAYERS, "conv"]}, "layers_block_type: conv: not implemented"),
        ({"layers_block_type": []}, "layers_block_type: is not a list of the kinds of layers"),
        ({"layers_block_type": KINDS_OF_LAYERS[:2]}, "layers_block_type: no layer has attention"),
        ({"layers_block_type": KINDS_OF_LAYERS[1:4]}, "layers_block_type: no layer has Mamba2"),
        ({"layers_block_type": KINDS_OF_LAYERS, "layer_types": []}, "layer_types: differs from layers_block"),
        ({"hybrid_override_pattern": "MXE*"}, "hybrid_override_pattern: X: not implemented"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu' is not implemented, only 'relu2' is"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act: 'gelu' is not implemented, only 'silu' is"),
        ({"use_bias": True}, "use_bias: biases of Mamba2's projections are not implemented"),
        ({"mlp_bias": True}, "mlp_bias: biases on the output"),
        ({"moe_latent_size": 16}, "moe_latent_size: 16: experts of a latent width are not implemented"),
        ({"n_groups": 3}, "mamba_num_heads: 8 is not a multiple of the 3 groups"),
        ({"ssm_state_size": 12}, "ssm_state_size: 12 is not a multiple of 8"),
        ({"mamba_head_dim": 264}, "mamba_head_dim: 264 is not from 8 to 256"),
        ({"conv_kernel": 17}, "conv_kernel: 17 is not from 1 to 16"),
        ({"time_step_min": -1.0}, "time_step_min: -1.0 is not a number from 0"),
    ],
)
def test_what_a_folder_has_that_is_not_computed_is_refused(
    root: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    with pytest.raises(EngineError, match=message):
        read_hf_config({**config, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.inner_size": 33}, "ssm.inner_size.*is not a multiple of the 4 heads"),
        ({"ssm.inner_size": 16}, "ssm.inner_size.*4 is not from 8 to 256"),
        ({"ssm.state_size": None}, "ssm.state_size.*missing"),
        ({"ssm.conv_kernel": 17}, "ssm.conv_kernel.*17 is not from 1 to 16"),
        ({"ssm.group_count": 3}, "ssm.time_step_rank.*4 is not a multiple of the 3 groups"),
        ({"attention.head_count_kv": 2}, "head_count_kv.*no layer has Mamba2"),
        ({"attention.head_count_kv": [0, 2]}, "head_count_kv.*has 2 numbers for 3 layers"),
        ({"feed_forward_length": [0, 8, 16]}, "feed_forward_length.*differs between layers"),
        ({"feed_forward_length": [0, 8, 8]}, "head_count_kv.*no layer has attention"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers.*3 is not from 0 to 2"),
        ({"moe_latent_size": 16}, "moe_latent_size.*experts of a latent width"),
        ({"attention.sliding_window": 8}, "attention.sliding_window.*windows are not implemented"),
    ],
)
def test_what_a_file_has_that_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    changed = {f"nemotron_h.{key}": value for key, value in changes.items()}
    path = model_builder(ModelSizes("nemotron_h"), bpe_vocabulary(), changes=changed).write(
        tmp_path / "m.gguf"
    )
    with open_gguf(path) as file, pytest.raises(EngineError, match=message):
        read_gguf_config(file)


def test_a_files_epsilon_may_have_the_name_of_another_norms(tmp_path: Path) -> None:
    """As the converter writes it where config.json has `layer_norm_epsilon` alone."""
    for changes, eps in (({}, 1e-5), ({"layer_norm_rms_epsilon": None, "layer_norm_epsilon": 0.25}, 0.25)):
        changed = {f"nemotron_h.attention.{key}": value for key, value in changes.items()}
        path = model_builder(ModelSizes("nemotron_h"), bpe_vocabulary(), changes=changed).write(
            tmp_path / "m"
        )
        with open_gguf(path) as file:
            config = read_gguf_config(file)
        assert config.rms_eps == pytest.approx(eps) and config.mamba2.eps == pytest.approx(eps)


@pytest.mark.parametrize("architecture", ["mamba", "mamba2", "jamba", "falcon-h1"])
def test_other_state_space_models_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    path = model_builder(ModelSizes("llama"), changes={"general.architecture": architecture}).write(
        tmp_path / "m.gguf"
    )
    with open_gguf(path) as file, pytest.raises(EngineError, match=f"architecture '{architecture}' is not"):
        read_gguf_config(file)
