"""Gemma 4 12B, whose images have no encoder: pixels and features of `transformers`, from folders and from GGUF."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.models.images.decode import ImageError
from quengine.models.vision import load_processor, load_vision
from quengine.models.vision.blocks import patches
from tests.models.vision import test_gemma4v
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
from tests.transformers_models import edit

CASE = VisionCase(
    "gemma4_unified",
    "Gemma4ImageProcessorPil",
    config={"audio_config": {"audio_embed_dim": 16}},
    vision={"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 80, "output_proj_dims": 32},
    text={"layer_types": ["full_attention"]},
    arguments={"max_soft_tokens": 70, "patch_size": 4},
)
SIDE = 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gemma4uv")
    return path, write_vision(path, CASE)


def reference_inputs(image: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Squares, channels last, and their places, as the model takes them."""
    squares = patches(image.pixels.double(), SIDE)
    _, rows, cols, _ = squares.shape
    x, y = torch.meshgrid(torch.arange(cols), torch.arange(rows), indexing="xy")
    flat = squares.view(1, -1, 3, SIDE * SIDE).transpose(2, 3).flatten(2)
    return flat, torch.stack([x, y], -1).view(1, -1, 2)


@pytest.mark.parametrize("size", test_gemma4v.SIZES)
def test_pixels_and_prompt(saved: tuple[Path, Any], size: tuple[int, int]) -> None:
    """As for the other models of the family: the processor of this one, which needs torchvision, has the same rule."""
    prepared = load_processor(saved[0]).prepare(png(picture(*size)))
    theirs = image_processor(CASE)([picture(*size)], return_tensors="pt")
    made = test_gemma4v.flat(prepared.pixels)
    assert torch.equal(made, torch.as_tensor(theirs["pixel_values"])[:, : made.shape[1]])
    assert written(prepared, "#") == f"<|image>{'#' * int(theirs['num_soft_tokens_per_image'][0])}<image|>"
    assert prepared.bidirectional and prepared.grid is None


def test_features(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, theirs = saved

    def reference(image: Any) -> torch.Tensor:
        pixels, places = reference_inputs(image)
        with torch.inference_mode():
            made = theirs.model.get_image_features(pixels, image_position_ids=places)
        return torch.cat(list(made.pooler_output))

    file = write_mmproj(folder, tmp_path / "mmproj-model-f32.gguf", CASE)
    assert_same_features([folder, file], [png(picture(100, 70)), png(picture(20, 90))], reference)
    prepared = load_vision(file, "cpu").prepare(png(picture(20, 20)))
    assert prepared.bidirectional and prepared.rows <= 280
    with pytest.raises(ImageError, match=r"2000 x 10 pixels need 236 patches in a row, .* places for 80"):
        load_vision(file, "cpu").prepare(png(picture(2000, 10)))


def test_a_table_shorter_than_an_image_is_refused(saved: tuple[Path, Any], tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((saved[0] / name).read_bytes())
    (tmp_path / "model.safetensors").symlink_to(saved[0] / "model.safetensors")
    edit(tmp_path, vision_config={**CASE.vision, "mm_posemb_size": 60})
    with pytest.raises(EngineError, match="60 positions are fewer than max_soft_tokens, 70"):
        load_processor(tmp_path)
