"""Drafts by a model's own layer where none are requested: where they are made, and that they give way to the model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM, EngineError
from quengine.config import EngineConfig
from quengine.errors import CannotRunError
from quengine.loading.automatic_drafts import fit_drafts, settle_drafts
from quengine.loading.placement import choose_cache
from quengine.memory import draft_step_bytes
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.draft_checkpoint import DraftLayer
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.platform.host_experts import ExpertPlacement
from quengine.speculative.draft_length import DEVICE_ROWS, draft_rows

CUDA = torch.device("cuda")
FAR = 64 * 2**30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    folder, opened = tmp_path_factory.mktemp("automatic"), dict[str, Checkpoint]()

    def model(preset: str) -> Checkpoint:
        if preset not in opened:
            shape = PRESETS[preset]
            shape = replace(shape, draft_layers=1) if preset == "glm4moe-tiny" else shape
            opened[preset] = open_checkpoint(write_synthetic(folder / f"{preset}.gguf", shape))
        return opened[preset]

    return model


@pytest.mark.parametrize("preset", ["qwen3.5-mtp-tiny", "qwen3.5moe-mtp-tiny", "glm4moe-tiny"])
def test_a_layer_that_is_there_drafts_on_a_cuda_device(
    models: Callable[[str], Checkpoint], preset: str
) -> None:
    config, layer = settle_drafts(EngineConfig(), models(preset), CUDA, False)
    assert (config.draft_mtp, config.draft_on_device, config.drafts_on_host) == (3, True, False)
    assert isinstance(layer, DraftLayer) and config.speculates
    assert draft_rows(config, "cuda") == 4 and draft_rows(replace(config, parallel=3), "cuda") == 16
    assert draft_rows(replace(config, parallel=99), "cuda") == DEVICE_ROWS


@pytest.mark.parametrize(
    ("preset", "options", "device", "images"),
    [
        ("qwen3.5-tiny", {}, "cuda", False),
        ("qwen3.5-mtp-tiny", {}, "cpu", False),
        ("qwen3.5-mtp-tiny", {"draft_mtp": 0}, "cuda", False),
        ("qwen3.5-mtp-tiny", {"draft_ngram": 3}, "cuda", False),
        ("qwen3.5-mtp-tiny", {"draft_model": "m.gguf"}, "cuda", False),
        ("qwen3.5-mtp-tiny", {"deterministic": True}, "cuda", False),
        ("qwen3.5-mtp-tiny", {"lora": ("a.gguf",)}, "cuda", False),
        ("qwen3.5-mtp-tiny", {"tensor_parallel": 2}, "cuda", False),
        ("qwen3.5-mtp-tiny", {"tensor_parallel": 2, "split": "layer"}, "cuda", False),
        ("qwen3.5moe-mtp-tiny", {"n_cpu_moe": 1}, "cuda", False),
        ("qwen3.5-mtp-tiny", {"backend": "reference"}, "cuda", False),
    ],
)
def test_nothing_drafts_where_its_steps_cannot_or_others_do(
    models: Callable[[str], Checkpoint], preset: str, options: dict[str, Any], device: str, images: bool
) -> None:
    given = EngineConfig(**options)
    config, layer = settle_drafts(given, models(preset), torch.device(device), images)
    assert (config, layer) == (replace(given, draft_mtp=0), None)
    if "draft_mtp" not in options:
        with pytest.raises(EngineError, match=r"draft_vocab 64: .* does not here: .*\(--draft-mtp\)"):
            settle_drafts(replace(given, draft_vocab=64), models(preset), torch.device(device), images)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"deterministic": True}, "steps are to be deterministic"),
        ({"lora": ("a",)}, "the model has LoRA adapters"),
    ],
)
def test_the_reason_names_the_option(
    models: Callable[[str], Checkpoint], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(EngineError, match=f"by default it does not here: {why}; request"):
        settle_drafts(EngineConfig(draft_vocab=64, **options), models("qwen3.5-mtp-tiny"), CUDA, False)


def test_images_with_three_axes_leave_drafts_out(models: Callable[[str], Checkpoint]) -> None:
    checkpoint = models("qwen3.5-mtp-tiny")
    axes = replace(checkpoint.config, rope_axes=(4, 2, 2))

    class Axes:
        path, config = checkpoint.path, axes

    config, layer = settle_drafts(EngineConfig(), Axes(), CUDA, True)  # type: ignore[arg-type]
    assert config.draft_mtp == 0 and layer is None


def test_an_explicit_number_is_kept(models: Callable[[str], Checkpoint]) -> None:
    given = EngineConfig(draft_mtp=2)
    assert settle_drafts(given, models("qwen3.5-mtp-tiny"), CUDA, False) == (given, None)
    assert given.drafts_on_host


@pytest.mark.parametrize("ctx_size", [None, 4096])
def test_drafts_give_way_to_the_model_and_its_context(
    models: Callable[[str], Checkpoint], ctx_size: int | None
) -> None:
    checkpoint, experts = models("qwen3.5-mtp-tiny"), ExpertPlacement()
    config, layer = settle_drafts(EngineConfig(ctx_size=ctx_size), checkpoint, CUDA, False)
    alone = replace(config, draft_mtp=0, draft_on_device=False)

    def fit(free: int) -> tuple[Any, ...]:
        return fit_drafts(config, checkpoint, layer, CUDA, free, experts)

    settled, draft, context, _, lines = fit(FAR)
    assert (settled, draft, lines) == (config, layer, [])
    least = next(free for free in range(2**20, FAR, 2**20) if holds(alone, checkpoint, free, context))
    settled, draft, smaller, _, lines = fit(least)
    assert (settled, draft, smaller) == (alone, None, context)
    assert len(lines) == 1 and "no drafts by the model's own layer: cuda has no room" in lines[0]
    with pytest.raises(CannotRunError):
        fit(2**20)
    most = draft_step_bytes(checkpoint.config, layer.config, 1, 4, context)  # type: ignore[union-attr]
    assert fit(least + 2**30)[1] is layer and most > 0


def holds(config: EngineConfig, checkpoint: Checkpoint, free: int, context: int) -> bool:
    try:
        return choose_cache(config, checkpoint, None, CUDA, free, ExpertPlacement())[0] >= context
    except CannotRunError:
        return False


def test_steps_that_draft_take_what_waits_of_each_row() -> None:
    """Of a model of 27 billion weights: logits of its rows, and of each state what it advances over, and a pool."""
    shape = PRESETS["qwen3.6-27b"].config()
    layer = replace(shape, vocab_size=65536)
    one, many = (draft_step_bytes(shape, layer, parallel, 4 * parallel, 32768) for parallel in (1, 8))
    assert 116e6 < one < 140e6 and 200e6 < many < 350e6


def test_the_cpu_runs_without_them_and_says_what_the_layer_is_for(
    models: Callable[[str], Checkpoint],
) -> None:
    path: Path = models("qwen3.5-mtp-tiny").path
    with LLM(path, "cpu", 64, 1) as llm:
        assert llm.config.draft_mtp == 0 and llm.loaded.draft is None and llm.speculation is None
        assert any("drafts tokens (MTP), which --draft-mtp uses" in note for note in llm.loaded.notes)
