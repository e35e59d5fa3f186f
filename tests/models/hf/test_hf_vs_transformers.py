"""Checkpoint folders give the logits that `transformers` gives, or are refused by name; never others in silence."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.models.hf.hf_checkpoint import HFCheckpoint
from tests.transformers_models import (
    DROP,
    edit,
    edit_tensors,
    nmse,
    our_logits,
    transformers_logits,
    write_model,
)

# Theirs computes norms and angles in float32: up to 3e-11 at a position. A wrong epsilon gives 1e-8, a frequency 1.
TOLERANCE = 1e-9

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e4},
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with its own magnitude": {**YARN, "attention_factor": 1.3},
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn with betas": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn without rounded limits": {**YARN, "truncate": False},
    "yarn with null factor": {**YARN, "factor": None},
    "yarn without an original context": {k: v for k, v in YARN.items() if not k.startswith("original")},
    "yarn under the old name": {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "'dynamic'": {**LINEAR, "rope_type": "dynamic"},
    "'longrope'": {**YARN, "rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8},
    "'proportional'": {**LINEAR, "rope_type": "proportional"},
    "blends no frequency": {**YARN, "beta_fast": 1.0, "beta_slow": 32.0},
}
# (model type, in a Mistral 3 vision model)
MODELS = {
    "llama": ("llama", False),
    "mistral": ("mistral", False),
    "ministral3": ("ministral3", False),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "mistral3 of mistral": ("mistral", True),
    "mistral3 of ministral3": ("ministral3", True),
}
CAUSAL = [name for name, (_, vision) in MODELS.items() if not vision]
OUTPUT = {False: "lm_head.weight", True: "language_model.lm_head.weight"}
EMBEDDING = {False: "model.embed_tokens.weight", True: "language_model.model.embed_tokens.weight"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small take longer on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write(folder: Path, model: str, tied: bool = False, **config: Any) -> Path:
    model_type, vision = MODELS[model]
    if model_type == "ministral3":  # which cannot run without the two keys in its rotary parameters
        rope = config.get("rope_parameters", YARN)
        config["rope_parameters"] = {
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 64,
        } | rope
    return write_model(folder, model_type, vision, tie_word_embeddings=tied, **config)


def difference(folder: Path) -> float:
    return nmse(our_logits(HFCheckpoint(folder)), transformers_logits(folder))


def refusal(folder: Path) -> str:
    with pytest.raises(EngineError) as caught:
        HFCheckpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Every kind of rotary parameters in every model, and both outputs with every model and with every kind.
@pytest.mark.parametrize(
    ("model", "rope", "tied"),
    [
        pytest.param(model, rope, tied, id=f"{model}-{rope}-{'tied' if tied else 'untied'}")
        for number, model in enumerate(MODELS)
        for rope, tied in zip(ROPE_KINDS, cycle([number % 2 == 1, number % 2 == 0]), strict=False)
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, model: str, rope: str, tied: bool) -> None:
    folder = write(tmp_path, model, tied, rope_parameters=dict(ROPE_KINDS[rope]))
    assert difference(folder) < TOLERANCE


@pytest.mark.parametrize("rope", ROPE_KINDS)
def test_the_keys_of_older_folders_mean_the_same(tmp_path: Path, rope: str) -> None:
    """`rope_theta` and `rope_scaling` at the top level, as before transformers 5."""
    folder = write(tmp_path, "llama")
    scaling = {key: value for key, value in ROPE_KINDS[rope].items() if key != "rope_theta"}
    edit(folder, rope_parameters=DROP, rope_scaling=scaling, rope_theta=2e4)
    assert difference(folder) < TOLERANCE


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("named", REFUSED)
def test_other_rotary_kinds_are_refused_by_name(tmp_path: Path, model: str, named: str) -> None:
    folder = write(tmp_path, model, rope_parameters=dict(REFUSED[named]))
    assert named in refusal(folder)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "yarn", "original_max_position_embeddings": 32}, "yarn RoPE needs a factor"),
        ({"rope_type": "linear"}, "linear RoPE needs a factor"),
        ({"rope_type": "linear", "factor": None}, "linear RoPE needs a factor"),
        ({**YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "rope_theta": None}, "rope_theta"),
        ({**YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings"),
    ],
)
def test_what_transformers_cannot_run_is_refused(tmp_path: Path, rope: dict[str, Any], named: str) -> None:
    folder = write(tmp_path, "llama")
    edit(folder, rope_parameters=rope)
    with pytest.raises(Exception):  # noqa: B017 (of several kinds, none of them meant for users)
        transformers_logits(folder)
    assert named in refusal(folder)


@pytest.mark.parametrize("model", CAUSAL)
def test_an_original_context_at_the_top_level_wins(tmp_path: Path, model: str) -> None:
    folder = write(tmp_path, model, rope_parameters=dict(YARN))
    before = transformers_logits(folder)
    edit(folder, original_max_position_embeddings=128)
    assert difference(folder) < TOLERANCE
    assert nmse(before, transformers_logits(folder)) > 1e-3  # the key counts


@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_partial_rotary_factor_is_not_read_with_default_rope(
    tmp_path: Path, model: str, inside: bool
) -> None:
    folder = write(tmp_path, model)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    if inside:
        edit(folder, rope_parameters={**rope, "partial_rotary_factor": 0.5})
    else:
        edit(folder, rope_parameters=rope, partial_rotary_factor=0.5)
    assert difference(folder) < TOLERANCE


def test_rope_scaling_replaces_rope_parameters(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", rope_parameters=dict(YARN))
    edit(folder, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert difference(folder) < TOLERANCE


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("top_level", [{}, {"rope_theta": 3e4}])
def test_folders_without_rotary_parameters_take_the_classes_own(
    tmp_path: Path, model: str, top_level: dict[str, Any]
) -> None:
    """Ministral 3's are YaRN times 16 over a theta of a million, whatever `rope_theta` says."""
    folder = write(tmp_path, model)
    without = {"rope_parameters": DROP, **top_level}
    edit(folder, **({"text": without} if MODELS[model][1] else without))
    assert difference(folder) < TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_a_missing_epsilon_is_the_classes(tmp_path: Path, model: str) -> None:
    folder = write(tmp_path, model)
    without = {"rms_norm_eps": DROP}
    edit(folder, **({"text": without} if MODELS[model][1] else without))
    assert difference(folder) < TOLERANCE


@pytest.mark.parametrize(
    ("model", "key", "sizes"),
    [
        ("llama", "num_key_value_heads", {"num_key_value_heads": 4}),
        ("mistral", "num_key_value_heads", {"num_attention_heads": 16, "num_key_value_heads": 8}),
        ("ministral3", "num_key_value_heads", {"num_attention_heads": 16, "num_key_value_heads": 8}),
        ("qwen2", "num_key_value_heads", {"num_attention_heads": 32, "num_key_value_heads": 32}),
        ("qwen3", "num_key_value_heads", {"num_attention_heads": 32, "num_key_value_heads": 32}),
        ("ministral3", "head_dim", {"head_dim": 128}),
        ("qwen3", "head_dim", {"head_dim": 128}),
        ("mistral", "head_dim", {}),
        ("llama", "max_position_embeddings", {}),
    ],
)
def test_missing_sizes_are_the_classes(tmp_path: Path, model: str, key: str, sizes: dict[str, int]) -> None:
    folder = write(tmp_path, model, **sizes)
    edit(folder, **{key: DROP})
    assert difference(folder) < TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_a_stored_output_that_differs_from_the_embedding_is_used(tmp_path: Path, model: str) -> None:
    vision = MODELS[model][1]
    folder = write(tmp_path, model, tied=True)

    def store_another(tensors: dict[str, torch.Tensor]) -> None:
        tensors[OUTPUT[vision]] = torch.randn_like(tensors[EMBEDDING[vision]])

    edit_tensors(folder, store_another)
    assert difference(folder) < TOLERANCE
    assert any("lm_head.weight differs" in note for note in HFCheckpoint(folder).notes)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("keep", [True, False], ids=["both", "output only"])
def test_tied_matrices_may_be_stored_under_either_name(tmp_path: Path, model: str, keep: bool) -> None:
    vision = MODELS[model][1]
    folder = write(tmp_path, model, tied=True)

    def store_output(tensors: dict[str, torch.Tensor]) -> None:
        tensors[OUTPUT[vision]] = tensors[EMBEDDING[vision]].clone()
        if not keep:
            del tensors[EMBEDDING[vision]]

    edit_tensors(folder, store_output)
    assert difference(folder) < TOLERANCE
    assert HFCheckpoint(folder).config.tied_output  # held once


@pytest.mark.parametrize("stored", [False, True], ids=["no output stored", "output stored"])
@pytest.mark.parametrize("inner", [True, False, DROP], ids=["inner", "inner not", "no inner"])
@pytest.mark.parametrize("outer", [True, False, DROP], ids=["outer", "outer not", "no outer"])
@pytest.mark.parametrize("model", ["mistral3 of mistral", "mistral3 of ministral3"])
def test_a_vision_models_own_flag_ties_the_output(
    tmp_path: Path, model: str, outer: Any, inner: Any, stored: bool
) -> None:
    folder = write(tmp_path, model, tied=not stored)
    edit(folder, text={"tie_word_embeddings": inner}, tie_word_embeddings=outer)
    if outer is False and not stored:  # transformers makes a random matrix up
        assert "lm_head.weight' is missing" in refusal(folder)
    else:
        assert difference(folder) < TOLERANCE


@pytest.mark.parametrize("model", ["mistral3 of mistral", "mistral3 of ministral3"])
def test_a_vision_model_saved_by_default_loads_and_its_vision_tensors_are_noted(
    tmp_path: Path, model: str
) -> None:
    model_type, vision = MODELS[model]
    folder = write_model(tmp_path, model_type, vision)
    assert difference(folder) < TOLERANCE
    (note,) = [line for line in HFCheckpoint(folder).notes if "does not use" in line]
    assert "15 tensors" in note


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("mistral", {"sliding_window": 5}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 5, "layer_types": ["full_attention"] * 2}),
        ("mistral3 of mistral", {"sliding_window": 5}),
        ("ministral3", {"sliding_window": 5}),
        ("ministral3", {"sliding_window": 5, "layer_types": ["full_attention"] * 2}),  # not read
        ("qwen2", {"sliding_window": 5}),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True}),
        ("qwen3", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}),
        (
            "qwen3",
            {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
        ),
    ],
    ids=str,
)
def test_sliding_windows_are_those_of_transformers(
    tmp_path: Path, model: str, changes: dict[str, Any]
) -> None:
    folder = write(tmp_path, model)
    unless = {"layer_types": DROP} if model.startswith("qwen") and "layer_types" not in changes else {}
    edit(folder, **({"text": changes} if MODELS[model][1] else changes | unless))
    assert difference(folder) < TOLERANCE


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_some_layers_may_have_a_window(tmp_path: Path, model: str) -> None:
    folder = write(tmp_path, model)
    whole = transformers_logits(folder)
    window = {"use_sliding_window": True, "sliding_window": 5}
    edit(folder, **window, max_window_layers=1, layer_types=DROP)
    assert HFCheckpoint(folder).config.layer_windows == (None, 5)
    assert difference(folder) < TOLERANCE
    assert nmse(whole, transformers_logits(folder)) > 1e-3


@pytest.mark.parametrize(
    ("model", "flag"), [("llama", "attention_bias"), ("llama", "mlp_bias"), ("qwen3", "attention_bias")]
)
def test_biases_that_the_decoder_lacks_are_refused_by_name(tmp_path: Path, model: str, flag: str) -> None:
    folder = write(tmp_path, model, **{flag: True})
    assert flag in refusal(folder)


@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3"])
def test_only_ministral_3_warms_its_queries(tmp_path: Path, model: str) -> None:
    folder = write(tmp_path, model)
    edit(folder, rope_parameters={**YARN, "llama_4_scaling_beta": 0.5})
    assert difference(folder) < TOLERANCE
