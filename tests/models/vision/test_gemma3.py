"""Gemma 3: pixels and features of `transformers`, from folders and from GGUF."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
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

CASE = VisionCase(
    "gemma3",
    "Gemma3ImageProcessorPil",
    config={"mm_tokens_per_image": 4},
    vision={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
    },
    arguments={"size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.4, 0.5]},
    released=(("vision_tower.", "vision_tower.vision_model."),),
)
CASES = {
    "large squares": CASE,
    "smaller squares": replace(CASE, config={"mm_tokens_per_image": 16}),
}


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp("gemma3")
    return request.param, path, write_vision(path, CASES[request.param])


@pytest.mark.parametrize("size", [(100, 70), (31, 200), (32, 32), (7, 3)])
def test_pixels_and_prompt(saved: tuple[str, Path, Any], size: tuple[int, int]) -> None:
    name, folder, _ = saved
    prepared = load_processor(folder).prepare(png(picture(*size)))
    theirs = image_processor(CASES[name])([picture(*size)], return_tensors="pt")
    assert torch.equal(prepared.pixels, theirs["pixel_values"])
    rows = CASES[name].config["mm_tokens_per_image"]
    expected = f"\n\n<start_of_image>{'<image_soft_token>' * rows}<end_of_image>\n\n"
    assert written(prepared, "<image_soft_token>") == expected
    assert prepared.bidirectional and prepared.grid is None


def test_features(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, folder, theirs = saved

    def reference(image: Any) -> torch.Tensor:
        with torch.inference_mode():
            return theirs.model.get_image_features(image.pixels.double()).pooler_output[0]

    paths = [folder]
    if name == "large squares":  # the converter takes 256 rows an image where the processor does not say
        path = folder / "preprocessor_config.json"
        path.write_text(path.read_text().replace("{", '{"image_seq_length": 4,', 1))
        paths.append(write_mmproj(folder, tmp_path / "mmproj-model-f32.gguf", CASES[name]))
    assert_same_features(paths, [png(picture(100, 70)), png(picture(20, 20))], reference)


def test_squares_that_leave_a_rest_are_refused(tmp_path: Path) -> None:
    write_vision(tmp_path, replace(CASE, config={"mm_tokens_per_image": 9}))
    with pytest.raises(EngineError, match="mm_tokens_per_image: 9 rows are no squares of 8 x 8 patches"):
        load_processor(tmp_path)


def test_crops_are_refused(tmp_path: Path) -> None:
    write_vision(tmp_path, replace(CASE, arguments={**CASE.arguments, "do_pan_and_scan": True}))
    with pytest.raises(EngineError, match="do_pan_and_scan: True is not implemented"):
        load_processor(tmp_path)
