"""Gemma 4: pixels and features of `transformers`, from folders and from GGUF."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quengine.models.vision import load_processor, load_vision
from quengine.models.vision.blocks import patches
from tests.models.vision.vision_models import (
    VisionCase,
    assert_same_features,
    image_processor,
    picture,
    png,
    write_mmproj,
    write_vision,
    written,
)

CASE = VisionCase(
    "gemma4",
    "Gemma4ImageProcessorPil",
    config={"audio_config": None},
    vision={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "position_embedding_size": 640,
        "standardize": True,
    },
    text={
        "use_bidirectional_attention": "vision",
        "layer_types": ["full_attention"],
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 300,
    },
    arguments={"max_soft_tokens": 70, "patch_size": 4},
)
CASES = {
    "bidirectional": CASE,
    "clamped": replace(
        CASE,
        vision={**CASE.vision, "standardize": False, "use_clipped_linears": True, "pooling_kernel_size": 3},
        text={**CASE.text, "use_bidirectional_attention": None},
    ),
}
SIZES = [(100, 70), (31, 200), (20, 20), (7, 3), (900, 2)]


def with_bounds(model: Any) -> None:
    """Bounds that clamp something, and a mean and deviation of rows."""
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(-0.75 if name.endswith("_min") else 0.875)
        elif name.endswith(("std_bias", "std_scale")):
            buffer.copy_((torch.rand_like(buffer) + 0.5).half())


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp("gemma4v")
    return request.param, path, write_vision(path, CASES[request.param], with_bounds)


def flat(pixels: torch.Tensor) -> torch.Tensor:
    """pixels [1, 3, H, W] as the processor lays them out: patch by patch, channels last."""
    grid = patches(pixels, 4)
    return grid.view(1, -1, 3, 16).transpose(2, 3).flatten(2)


def reference_inputs(image: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches and their places, as the model takes them."""
    rows, cols = (side // 4 for side in image.pixels.shape[-2:])
    x, y = torch.meshgrid(torch.arange(cols), torch.arange(rows), indexing="xy")
    return flat(image.pixels.double()), torch.stack([x, y], -1).view(1, -1, 2)


@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_prompt(saved: tuple[str, Path, Any], size: tuple[int, int]) -> None:
    name, folder, _ = saved
    prepared = load_processor(folder).prepare(png(picture(*size)))
    theirs = image_processor(CASES[name])([picture(*size)], return_tensors="pt")
    made = flat(prepared.pixels)
    expected = np.asarray(theirs["pixel_values"])[:, : made.shape[1]]
    assert np.array_equal(made.numpy(), expected)
    assert written(prepared, "#") == f"<|image>{'#' * int(theirs['num_soft_tokens_per_image'][0])}<image|>"
    assert prepared.bidirectional == (name == "bidirectional") and prepared.grid is None


def test_features(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, folder, theirs = saved

    def reference(image: Any) -> torch.Tensor:
        pixels, places = reference_inputs(image)
        with torch.inference_mode():
            made = theirs.model.get_image_features(pixels, image_position_ids=places)
        return torch.cat(list(made.pooler_output))

    file = write_mmproj(folder, tmp_path / "mmproj-model-f32.gguf", CASES[name])
    assert_same_features([folder, file], [png(picture(100, 70)), png(picture(20, 90))], reference)
    prepared = load_vision(file, "cpu").prepare(png(picture(20, 20)))
    assert prepared.bidirectional == (name == "bidirectional") and prepared.rows <= 280
