"""Idefics3 and SmolVLM: pixels, prompt and features of `transformers`, from folders and from GGUF."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.models.vision import VisionModel, load_vision
from tests.models.vision.vision_models import (
    VisionCase,
    assert_same_features,
    image_processor,
    nmse,
    picture,
    png,
    write_mmproj,
    write_vision,
)

CASE = VisionCase(
    "idefics3",
    "Idefics3ImageProcessorPil",
    vision={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
    },
    arguments={"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}},
)
SIZES = [(100, 70), (31, 200), (20, 20), (7, 3), (128, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("idefics3")
    return path, write_vision(path, CASE)


def reference(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Rows of each unit of `pixels` [units, 3, H, W]."""
    with torch.inference_mode():
        made = model.model.get_image_features(pixels[None].to(model.dtype))
    return torch.cat([rows.flatten(0, -2) for rows in made.pooler_output])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("split", [True, False])
def test_pixels_and_prompt(folder: tuple[Path, Any], size: tuple[int, int], split: bool) -> None:
    """Every pixel, and what the processor of `transformers` puts into the prompt."""
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    model = load_vision(folder[0], "cpu")
    model.processor.settings = replace(model.processor.settings, split=split)
    image = picture(*size)
    theirs = image_processor(CASE)(
        [[image]], return_tensors="pt", return_row_col_info=True, do_image_splitting=split
    )
    prepared = model.prepare(png(image))
    assert torch.equal(prepared.pixels, theirs["pixel_values"][0])
    writer = Idefics3Processor.__new__(Idefics3Processor)
    writer.fake_image_token, writer.image_token = "<fake_token_around_image>", "<image>"
    writer.global_image_tag, writer.image_seq_len = "<global-img>", 16
    expected = writer.replace_image_token(theirs, 0)
    written = "".join(part if isinstance(part, str) else "<image>" * part for part in prepared.layout)
    assert written == expected and prepared.grid is None and not prepared.bidirectional
    if split and size != (20, 20):
        assert len(prepared.pixels) > 1


def test_features(folder: tuple[Path, Any], tmp_path: Path) -> None:
    """Those of a folder and of the converter's file, of images of different numbers of tiles in one call."""
    images = [png(picture(100, 70)), png(picture(20, 20)), png(picture(31, 100))]
    file = write_mmproj(folder[0], tmp_path / "mmproj-model-f32.gguf", CASE)
    assert_same_features([folder[0], file], images, lambda image: reference(folder[1], image.pixels))
    assert load_vision(file, "cpu").deepstack == 0


def test_positions_of_a_smaller_tile(tmp_path: Path) -> None:
    """A tile of fewer patches than there are positions, and one of a number that no power of two is."""
    vision = {**CASE.vision, "image_size": 44}
    case = VisionCase("smolvlm", "SmolVLMImageProcessorPil", vision=vision, arguments=dict(CASE.arguments))
    theirs = write_vision(tmp_path, case)
    model: VisionModel = load_vision(tmp_path, "cpu", dtype=torch.float64)
    prepared = model.prepare(png(picture(40, 20)))
    assert nmse(model.encode([prepared])[0], reference(theirs, prepared.pixels)) < 1e-12
