"""LFM2-VL: sizes, tiles and the prompt, and features of `transformers`, from folders and from GGUF.

The image processor of `transformers` needs torchvision, which the tests do without.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.models.vision import load_processor
from quengine.models.vision.blocks import patches
from tests.models.vision.vision_models import (
    VisionCase,
    assert_same_features,
    picture,
    png,
    write_mmproj,
    write_vision,
    written,
)

CASE = VisionCase(
    "lfm2_vl",
    "SiglipImageProcessorPil",
    config={"projector_hidden_size": 56},
    vision={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_patches": 256,
        "patch_size": 16,
        "vision_use_head": False,
    },
    text={"head_dim": None, "layer_types": ["full_attention"]},
    released=(("vision_tower.", "vision_tower.vision_model."),),
)
CASES = {
    "norm": CASE,
    "no norm": replace(
        CASE, config={**CASE.config, "projector_use_layernorm": False, "projector_bias": False}
    ),
}
PROCESSOR = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "tile_size": 64,
    "min_image_tokens": 2,
    "max_image_tokens": 9,
    "max_tiles": 6,
    "resample": 2,
}


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("lfm2")
    model = write_vision(path, CASES[request.param])
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path, model


@pytest.mark.parametrize(
    ("size", "units", "prompt"),
    [
        ((60, 90), [(96, 64)], "<|image_start|>######<|image_end|>"),
        ((10, 10), [(64, 64)], "<|image_start|>####<|image_end|>"),
        (
            (220, 110),
            [(64, 64), (64, 64), (64, 128)],
            "<|image_start|><|img_row_1_col_1|>####<|img_row_1_col_2|>####<|img_thumbnail|>########<|image_end|>",
        ),
    ],
)
def test_units_and_prompt(
    saved: tuple[Path, Any], size: tuple[int, int], units: list[tuple[int, int]], prompt: str
) -> None:
    prepared = load_processor(saved[0]).prepare(png(picture(*size)))
    assert [tuple(unit.shape[1:]) for unit in prepared.pixels] == units
    assert written(prepared, "#") == prompt


def test_features(saved: tuple[Path, Any], tmp_path: Path) -> None:
    """Of images with units of several sizes."""
    folder, theirs = saved

    def reference(image: Any) -> torch.Tensor:
        rows = []
        for unit in image.pixels:
            grid = patches(unit[None].double(), 16)
            height, width = grid.shape[1:3]
            flat = (
                grid.view(1, height * width, 3, 256).transpose(2, 3).flatten(2)
            )  # channels last within a patch
            shape = torch.tensor([[height, width]])
            mask = torch.ones(1, height * width, dtype=torch.long)
            with torch.inference_mode():
                made = theirs.model.get_image_features(flat, spatial_shapes=shape, pixel_attention_mask=mask)
            rows.append(made.pooler_output[0])
        return torch.cat(rows)

    file = write_mmproj(folder, tmp_path / "mmproj-model-f32.gguf", CASE)
    assert_same_features([folder, file], [png(picture(220, 110)), png(picture(60, 90))], reference)
