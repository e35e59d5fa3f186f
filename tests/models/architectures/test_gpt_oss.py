"""gpt-oss as a folder and as GGUF: the logits of `transformers`, experts packed as MXFP4, refusals by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quengine.cli.show_report import lines_of
from quengine.errors import EngineError
from quengine.kernels.glu import CLAMP, SWISH_SLOPE
from quengine.models.checkpoint import open_checkpoint
from quengine.models.config import CacheGroup, ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.model_summary import summarize
from tests.gguf_builder import ModelSizes, model_builder
from tests.hf_writer import hf_config, packed
from tests.models.architectures.both_files import Case, SameLogits, opened
from tests.transformers_models import edit, edit_tensors

SIZES = {
    "num_hidden_layers": 3,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "attention_bias": True,
}
YARN = {"rope_type": "yarn", "rope_theta": 15e4, "factor": 4.0, "original_max_position_embeddings": 32}
WHOLE = {**YARN, "truncate": False}


def pack_experts(folder: Path) -> None:
    """As released folders have them. Without `dequantize` transformers needs a GPU for such a folder."""
    path = folder / "model.safetensors"
    save_file(packed(load_file(path)), path, metadata={"format": "pt"})
    edit(folder, quantization_config={"quant_method": "mxfp4", "dequantize": True})


CASES = {
    "plain": Case("gpt_oss", {**SIZES, "rope_parameters": WHOLE}, gate_up=True),
    "packed": Case("gpt_oss", {**SIZES, "rope_parameters": WHOLE}, edit=pack_experts),
    "no yarn": Case("gpt_oss", {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 15e4}}),
    "all experts, default yarn": Case("gpt_oss", {**SIZES, "num_experts_per_tok": 6}),
    "own layer types": Case("gpt_oss", {**SIZES, "layer_types": ["full_attention"] * 3}, converts=False),
    "rounded yarn": Case("gpt_oss", {**SIZES, "rope_parameters": YARN}, converts=False),
}


class TestLogits(SameLogits):
    main = ("packed",)


def test_packed_experts_are_those_of_gguf_to_the_byte(root: Path) -> None:
    """The converter moves blocks too; it is the second opinion on their order."""
    folder, gguf = (opened(root, "packed", kind).tensors for kind in ("folder", "gguf"))
    experts = [name for name in gguf if name.endswith("_exps.weight")]
    assert len(experts) == 9 and folder.keys() == gguf.keys()
    for name in experts:
        assert folder[name].format.name == gguf[name].format.name == "MXFP4"
        assert folder[name].shape == gguf[name].shape and torch.equal(folder[name].data, gguf[name].data)


def test_biases_of_gate_and_up_stay_apart_where_their_weights_are_one_tensor(root: Path) -> None:
    tensors = opened(root, "plain", "fused gguf").tensors
    names = {name.removeprefix("blk.0.") for name in tensors if name.startswith("blk.0.ffn_")}
    assert {"ffn_gate_up_exps.weight", "ffn_gate_exps.bias", "ffn_up_exps.bias"} <= names
    assert not {"ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.bias"} & names


def test_experts_of_either_folder_are_copied_and_said_to_be(root: Path) -> None:
    for name in ("plain", "packed"):
        assert "15 tensors are copied out of others: 0.00 GiB" in opened(root, name, "folder").notes
    assert opened(root, "packed", "folder").types == opened(root, "packed", "gguf").types


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_a_folder_is_described_as_it_is_read(root: Path, name: str) -> None:
    shown, checkpoint = summarize(root / name), opened(root, name, "folder")
    assert shown.problem is None and shown.parameters == checkpoint.weights
    assert shown.weight_bytes == checkpoint.nbytes
    assert any("attention sinks" in line for line in lines_of(shown, [], tensors=False))
    kinds = {row.type for row in shown.tensors if ".experts." in row.name and "bias" not in row.name}
    assert kinds == {"MXFP4" if name == "packed" else "F32"}


def test_every_second_layer_has_the_window(root: Path) -> None:
    for kind in ("folder", "gguf"):
        config = opened(root, "plain", kind).config
        assert config.cache_groups == (CacheGroup(None, (1,)), CacheGroup(5, (0, 2)))
        assert config.rope_scaling.kind == "yarn" and not config.rope_scaling.truncate
    assert opened(root, "own layer types", "folder").config.layer_windows == (None,) * 3
    assert opened(root, "rounded yarn", "folder").config.rope_scaling.truncate


RELEASED = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""The config.json of gpt-oss-20b."""


def test_the_released_configuration() -> None:
    config = read_hf_config(RELEASED)
    experts = config.experts
    assert experts is not None and (experts.count, experts.router.used) == (32, 4)
    assert experts.feed_forward_length == 2880 and not experts.router.normalized
    assert config.rope_freq_base == 150000.0 and config.rope_scaling.factor == 32.0
    assert config.rope_scaling.attention_factor == pytest.approx(1.3465735903)
    assert config.full_attention_layers == tuple(range(1, 24, 2)) and config.sliding_window == 128


def test_the_activations_numbers_are_the_kernels() -> None:
    given = {"swiglu_alpha": SWISH_SLOPE, "swiglu_limit": CLAMP}
    assert read_hf_config(RELEASED | given) == read_hf_config(RELEASED)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swiglu_limit": 8.0}, "swiglu_limit"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"attention_bias": False}, "attention_bias"),
        ({"attention_bias": None}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": "mxfp4 "}, "quantization_config"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_local_experts": 5000}, "num_local_experts"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok"),
        ({"sliding_window": None}, "sliding_window"),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_is_refused_in_one_line(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(EngineError, match=f"^config.json: {named}: ") as caught:
        read_hf_config(RELEASED | changes)
    assert "\n" not in str(caught.value)


def test_mxfp4_folders_of_other_models_are_refused() -> None:
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(EngineError, match="quantization_config: mxfp4"):
        read_hf_config(hf_config(ModelSizes("qwen3moe"), 64, **quantized))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales"), r"down_proj_scales' is missing"),
        (lambda t: t.pop("model.layers.1.self_attn.sinks"), r"self_attn.sinks' is missing"),
        (lambda t: t.pop("model.layers.1.mlp.experts.gate_up_proj_bias"), r"gate_up_proj_bias' is missing"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(6, 64, 2, 16)}),
            r"down_proj_blocks' has shape \[6, 64, 2, 16\]",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(6, 64, 3, 16)}),
            r"down_proj_blocks' is of type F32",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(6, 96, 64)}),
            r"1 tensors that this decoder does not apply: model.layers.0.mlp.experts.down_proj$",
        ),
    ],
    ids=["no scales", "no sinks", "no bias", "shape", "type", "twice"],
)
def test_damaged_folders_are_refused_by_name(root: Path, tmp_path: Path, damage: Any, named: str) -> None:
    for file in (root / "packed").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_tensors(tmp_path, damage)
    with pytest.raises(EngineError, match=named) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def from_metadata(tmp_path: Path, **changes: Any) -> ModelConfig:
    metadata = {f"gpt-oss.{key}": value for key, value in changes.items()}
    path = model_builder(ModelSizes("gpt-oss"), changes=metadata).write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        return read_gguf_config(file)


def test_layers_and_yarn_of_metadata(tmp_path: Path) -> None:
    assert from_metadata(tmp_path).layer_windows == (None, None)
    assert from_metadata(tmp_path, **{"attention.sliding_window": 8}).layer_windows == (8, None)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    assert not from_metadata(tmp_path, **yarn).rope_scaling.truncate


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window_pattern", 2),
        ("rope.freq_base_swa", 1e4),
        ("expert_count", 0),
        ("expert_used_count", 5),
        ("expert_gating_func", 9),
        ("expert_feed_forward_length", 0),
    ],
)
def test_bad_metadata_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(GGUFError) as caught:
        from_metadata(tmp_path, **{key: value})
    assert caught.value.field == f"gpt-oss.{key}"
