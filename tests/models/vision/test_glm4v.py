"""GLM-4.1V and after it: pixels and features of `transformers`, from folders and from GGUF."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.models.vision import load_processor
from tests.models.vision.test_qwen_vl import flat, reference
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
    "glm4v",
    "Glm4vImageProcessorPil",
    vision={
        "hidden_size": 32,
        "intermediate_size": 40,
        "depth": 3,
        "num_heads": 2,
        "patch_size": 4,
        "image_size": 24,
        "out_hidden_size": 48,
    },
    arguments={"patch_size": 4, "size": {"shortest_edge": 2 * 16 * 16, "longest_edge": 2 * 64 * 64}},
)
SIZES = [(100, 70), (31, 200), (20, 20), (7, 3), (64, 2), (44, 20)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("glm4v")
    return path, write_vision(path, CASE)


@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_grid(saved: tuple[Path, Any], size: tuple[int, int]) -> None:
    prepared = load_processor(saved[0]).prepare(png(picture(*size)))
    theirs = image_processor(CASE)([picture(*size)], return_tensors="pt")
    assert torch.equal(flat(prepared.pixels), theirs["pixel_values"])
    _, rows, cols = theirs["image_grid_thw"][0].tolist()
    assert prepared.grid == (1, rows // 2, cols // 2)
    assert written(prepared, "#") == f"<|begin_of_image|>{'#' * (rows * cols // 4)}<|end_of_image|>"


def test_features(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, theirs = saved
    file = write_mmproj(folder, tmp_path / "mmproj-model-f32.gguf", CASE)
    images = [png(picture(44, 28)), png(picture(20, 20)), png(picture(7, 60)), png(picture(64, 64))]
    assert_same_features([folder, file], images, lambda image: reference(theirs, image.pixels))
