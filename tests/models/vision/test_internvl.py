"""InternVL: pixels and features of `transformers`, from folders and from GGUF."""

import json
from dataclasses import replace
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

CASE = VisionCase(
    "internvl",
    "GotOcr2ImageProcessorPil",
    vision={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": [32, 32],
        "patch_size": [4, 4],
        "attention_bias": True,
        "architectures": ["InternVisionModel"],
    },
    text={"model_type": "qwen2", "head_dim": None},
    arguments={"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 6},
    released=(("vision_tower.", "model.vision_tower."), ("multi_modal_", "model.multi_modal_")),
)
CASES = {
    "layer norms": CASE,
    "rms norms": replace(
        CASE,
        vision={**CASE.vision, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
        arguments={**CASE.arguments, "crop_to_patches": False},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp("internvl")
    return request.param, path, write_vision(path, CASES[request.param])


@pytest.mark.parametrize("size", [(100, 70), (31, 200), (32, 32), (7, 3), (64, 64), (20, 20), (300, 30)])
def test_pixels_and_prompt(saved: tuple[str, Path, Any], size: tuple[int, int]) -> None:
    name, folder, _ = saved
    prepared = load_processor(folder).prepare(png(picture(*size)))
    theirs = image_processor(CASES[name])([picture(*size)], return_tensors="pt")
    assert torch.equal(prepared.pixels, theirs["pixel_values"])
    assert written(prepared, "#") == f"<img>{'#' * 16 * int(theirs['num_patches'][0])}</img>"


def test_features(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, folder, theirs = saved

    def reference(image: Any) -> torch.Tensor:
        with torch.inference_mode():
            return theirs.model.get_image_features(image.pixels.double()).pooler_output.flatten(0, 1)

    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["architectures"] = ["InternVisionModel"]
    (folder / "config.json").write_text(json.dumps(config))
    file = write_mmproj(folder, tmp_path / "mmproj-model-f32.gguf", CASES[name])
    assert_same_features([folder, file], [png(picture(100, 70)), png(picture(20, 20))], reference)
