"""Pixtral: pixels, prompt and features of `transformers`, from folders and from GGUF."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.models.vision import load_processor
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

VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 112,
    "patch_size": 7,
    "hidden_act": "silu",
}
CASES = {
    "mistral3": VisionCase(
        "mistral3",
        "PixtralImageProcessorPil",
        vision=VISION,
        text={"model_type": "mistral", "rms_norm_eps": 1e-5},
        arguments={"size": {"longest_edge": 112}, "patch_size": {"height": 7, "width": 7}},
        tokens=("[IMG_BREAK]",),
    ),
    "biases": VisionCase(
        "mistral3",
        "PixtralImageProcessorPil",
        config={"multimodal_projector_bias": True, "spatial_merge_size": 3},
        vision={**VISION, "hidden_act": "gelu"},
        text={"model_type": "mistral", "rms_norm_eps": 1e-2},
        arguments={"size": {"longest_edge": 112}},
    ),
    "pixtral": VisionCase(
        "llava",
        "PixtralImageProcessorPil",
        config={"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_seq_length": 1},
        vision=VISION,
        text={"model_type": "mistral"},
        arguments={"size": {"longest_edge": 112}},
        tokens=("[IMG_BREAK]",),
    ),
}
MERGE = {"mistral3": 2, "biases": 3, "pixtral": 1}
SIZES = [(100, 70), (31, 200), (20, 20), (7, 3), (112, 1)]


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, path, write_vision(path, CASES[request.param])


def reference(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([pixels.shape[-2:]])
    with torch.inference_mode():
        made = model.model.get_image_features(pixels.to(model.dtype), image_sizes=sizes)
    return torch.cat(list(made.pooler_output))


@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_prompt(saved: tuple[str, Path, Any], size: tuple[int, int]) -> None:
    """Every pixel, and what PixtralProcessor, which needs torchvision, puts into the prompt."""
    name, folder, _ = saved
    prepared = load_processor(folder).prepare(png(picture(*size)))
    step = 7 * MERGE[name]
    patch = {"height": step, "width": step}
    theirs = image_processor(CASES[name])([picture(*size)], patch_size=patch, return_tensors="pt")
    assert torch.equal(prepared.pixels, theirs["pixel_values"])
    rows, cols = (side // step for side in theirs["image_sizes"][0].tolist())
    expected = ("[IMG]" * cols + "[IMG_BREAK]") * rows
    assert written(prepared, "[IMG]") == expected.removesuffix("[IMG_BREAK]") + "[IMG_END]"
    assert prepared.grid is None and not prepared.bidirectional


def test_a_side_that_the_limit_makes_nothing(saved: tuple[str, Path, Any]) -> None:
    """One row of patches, where the processor of `transformers` fails."""
    name, folder, _ = saved
    step = 7 * MERGE[name]
    assert load_processor(folder).prepare(png(picture(300, 1))).pixels.shape[-2] == step


def test_features(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    """Those of a folder and of the converter's file, of images of several sizes in one call."""
    name, folder, theirs = saved
    images = [png(picture(100, 70)), png(picture(30, 20)), png(picture(100, 70, seed=1))]
    case = CASES[name]
    paths = [folder]
    if case.tokens:
        paths.append(write_mmproj(folder, tmp_path / "mmproj-model-f32.gguf", case))
    assert_same_features(paths, images, lambda image: reference(theirs, image.pixels))
