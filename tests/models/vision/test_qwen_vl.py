"""Qwen3-VL, Qwen3.5 and Qwen2.5-VL: pixels and features of `transformers`, from folders and from GGUF."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.models.vision import ImageError, load_processor, load_vision
from tests.models.vision.vision_models import (
    VisionCase,
    assert_same_features,
    image_processor,
    picture,
    png,
    write_mmproj,
    write_vision,
)

VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "depth": 3,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
}
PIXELS = {"patch_size": 4, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
QWEN3 = VisionCase(
    "qwen3_vl",
    "Qwen2VLImageProcessorPil",
    vision={**VISION, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36},
    arguments={**PIXELS, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
)
CASES = {
    "qwen3_vl": QWEN3,
    "qwen3_5": replace(
        QWEN3,
        model_type="qwen3_5",
        vision={**VISION, "num_position_embeddings": 36},
        text={"layer_types": ["full_attention"]},
    ),
    "qwen2_5_vl": VisionCase(
        "qwen2_5_vl",
        "Qwen2VLImageProcessorPil",
        vision={**VISION, "fullatt_block_indexes": [1]},
        arguments={**PIXELS, "size": {"shortest_edge": 16 * 16, "longest_edge": 180 * 180}},
    ),
}
CASES["small windows"] = replace(
    CASES["qwen2_5_vl"], vision={**CASES["qwen2_5_vl"].vision, "window_size": 16}, arguments=PIXELS
)
SIZES = [(100, 70), (31, 200), (20, 20), (7, 3), (64, 2), (44, 20)]


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, path, write_vision(path, CASES[request.param])


def flat(pixels: torch.Tensor) -> torch.Tensor:
    """pixels [1, 3, H, W] as the processor of `transformers` lays them out: squares of patches, each of two frames."""
    _, channels, height, width = pixels.shape
    cut = pixels.view(channels, height // 8, 2, 4, width // 8, 2, 4).permute(1, 4, 2, 5, 0, 3, 6)
    return cut[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(-1, channels * 2 * 16)


def reference(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Rows with those of deepstack after them."""
    grid = torch.tensor([[1, pixels.shape[-2] // 4, pixels.shape[-1] // 4]])
    with torch.inference_mode():
        made = model.model.get_image_features(flat(pixels).to(model.dtype), image_grid_thw=grid)
    rows = [torch.cat(list(made.pooler_output))]
    return torch.cat(
        [*rows, *(feature[0] for feature in getattr(made, "deepstack_features", None) or [])], -1
    )


@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_grid(saved: tuple[str, Path, Any], size: tuple[int, int]) -> None:
    name, folder, _ = saved
    prepared = load_processor(folder).prepare(png(picture(*size)))
    theirs = image_processor(CASES[name])([picture(*size)], return_tensors="pt")
    assert torch.equal(flat(prepared.pixels), theirs["pixel_values"])
    grid = theirs["image_grid_thw"][0].tolist()
    assert prepared.grid == (1, grid[1] // 2, grid[2] // 2) and not prepared.bidirectional
    assert prepared.layout == ("<|vision_start|>", grid[1] * grid[2] // 4, "<|vision_end|>")


def test_features(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    """Those of a folder and of the converter's file, of images of several sizes in one call."""
    name, folder, theirs = saved
    images = [png(picture(44, 28)), png(picture(20, 20)), png(picture(44, 28, seed=1)), png(picture(7, 60))]
    images.append(png(picture(200, 130)))
    paths = [folder]
    if name != "small windows":  # a file says nothing of windows, which have 112 pixels
        paths.append(write_mmproj(folder, tmp_path / "mmproj-model-f32.gguf", CASES[name]))
    assert_same_features(paths, images, lambda image: reference(theirs, image.pixels))


def test_deepstack(saved: tuple[str, Path, Any]) -> None:
    """Of Qwen3-VL alone."""
    name, folder, _ = saved
    assert load_vision(folder, "cpu").deepstack == (2 if name == "qwen3_vl" else 0)


def test_sides_that_differ_too_much(saved: tuple[str, Path, Any]) -> None:
    with pytest.raises(ImageError, match="201 x 1 pixels, one side over 200 times the other"):
        load_processor(saved[1]).prepare(png(picture(201, 1)))


def test_other_patches_are_refused(tmp_path: Path) -> None:
    write_vision(tmp_path, replace(CASES["qwen2_5_vl"], arguments={**PIXELS, "patch_size": 5}))
    with pytest.raises(EngineError, match="patch_size: 5 is not implemented"):
        load_processor(tmp_path)
