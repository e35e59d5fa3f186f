"""A part of the sweep over config.json (`benchmarks/checks/config_sweep.py`): no change computes something else in
silence. Of each model type some changes, the same in every run, and those that once did."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config_changes import (
    LLAMA3,
    SEEDS,
    Absent,
    Change,
    Outcome,
    changes,
    compare,
    known_keys,
    sample,
    write_seed,
)

A_SEED = 3
"""Changes of each seed."""

ORIGINAL = "original_max_position_embeddings"
ONCE_OTHER: list[tuple[str, str, Any, Outcome]] = [
    *((name, "is_causal", False, "refused here") for name in ("llama", "gpt_oss", "mistral3", "glm4_moe")),
    *((name, "is_causal", None, "refused here") for name in ("qwen2", "phi3")),
    ("gemma3", "text_config.is_causal", False, "refused here"),
    ("ministral3", "rope_parameters", None, "equal"),
    ("mistral3", "text_config.rope_parameters", None, "equal"),
    ("gpt_oss", "rope_parameters", None, "equal"),
    ("gemma3", f"text_config.{ORIGINAL}", 64, "equal"),
    ("gemma3_text, yarn", ORIGINAL, 64, "equal"),
    ("olmo3, llama3", ORIGINAL, 64, "equal"),
    ("olmo3, yarn", "rope_parameters.full_attention.truncate", False, "equal"),
    ("olmo3, yarn", "rope_parameters.truncate", False, "equal"),
    ("gemma3_text, yarn", "rope_parameters.truncate", None, "equal"),
    ("granitemoe", "shared_intermediate_size", 64, "equal"),
    ("mistral3 of mistral", "text_config.layer_types", ["full_attention"] * 2, "equal"),
    ("mistral", "layer_types", ["full_attention"] * 2, "equal"),
    # Routers that choose between experts all but equal differ by an fp16 cache, and must not by what config.json says.
    ("mixtral", "num_experts_per_tok", 1, "equal"),
    ("mixtral", "rms_norm_eps", Absent.KEY, "equal"),
    ("qwen2_moe", "rope_parameters", LLAMA3, "equal"),
    ("olmoe", "rms_norm_eps", 1e-3, "equal"),
    ("phi3, longrope", "max_position_embeddings", Absent.KEY, "equal"),
    ("gemma3_text", "query_pre_attn_scalar", 1, "equal"),
    ("bert", "is_causal", True, "refused here"),
    ("nomic_bert", "rope_parameters", {}, "equal"),
    ("modernbert", "sliding_window", 5, "equal"),
    ("xlm-roberta", "pad_token_id", 3, "equal"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeds")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small take longer on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


known = cache(known_keys)


@pytest.mark.filterwarnings("ignore")  # of transformers, about the values
@pytest.mark.parametrize("name", [name for name, seed in SEEDS.items() if not seed.rotary])
def test_a_change_is_computed_as_transformers_does_or_refused(root: Path, tmp_path: Path, name: str) -> None:
    folder = write_seed(root, name)
    config = json.loads((folder / "config.json").read_text())
    # Of another type `transformers` may make a whole model of that type's sizes, gigabytes; the sweep does.
    found = [change for change in changes(name, config, known()) if change.path != ("model_type",)]
    for change in sample(found, A_SEED, seed=7):
        outcome, said = compare(folder, change, tmp_path)
        assert outcome not in ("other", "failed"), f"{change}: {said}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "place", "value", "outcome"), ONCE_OTHER)
def test_these_changes_are_not_silent(
    root: Path, tmp_path: Path, name: str, place: str, value: Any, outcome: Outcome
) -> None:
    change = Change(tuple(place.split(".")), value)
    found, said = compare(write_seed(root, name), change, tmp_path)
    assert found == outcome, said
    assert outcome == "equal" or place.split(".")[-1] in said


@pytest.mark.filterwarnings("ignore")
def test_a_silent_difference_is_found(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sweep is for: a reader that passes over a key."""
    from tests import config_changes

    folder, change = write_seed(root, "llama"), Change(("rms_norm_eps",), 0.1)
    assert compare(folder, change, tmp_path)[0] == "equal"
    reads = config_changes.HFCheckpoint
    monkeypatch.setattr(config_changes, "HFCheckpoint", lambda _folder: reads(folder))
    assert compare(folder, change, tmp_path)[0] == "other"
