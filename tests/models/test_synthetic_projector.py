"""Projector files of released models' shapes: their settings, types and rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from quengine.models.gguf import open_gguf
from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.synthetic.synthetic_projector import write_synthetic_projector
from quengine.models.vision import load_vision
from tests.models.vision.vision_models import picture, png

SMALL = {"width": 64, "heads": 4, "layers": 2, "feed_forward": 112, "patch": 14}
SIZES = {"mistral-small": 56, "smolvlm2-500m": 56, "gemma-3": 56, "qwen3.5": 84, "gemma-4": 1}


@pytest.mark.parametrize("name", PROJECTORS_OF)
def test_a_written_projector_is_read_with_its_settings(name: str, tmp_path: Path) -> None:
    spec = replace(PROJECTORS_OF[name], **SMALL, image_size=SIZES[name], min_pixels=0)
    if name == "smolvlm2-500m":
        spec = replace(spec, tile=56, longest_edge=112)
    first, again = (write_synthetic_projector(tmp_path / f"{i}.gguf", spec, 96, "Q8_0") for i in "ab")
    assert first.read_bytes() == again.read_bytes()
    vision = load_vision(first, "cpu")
    found = vision.processor.settings
    for field in ("projector", "text_size", "merge", "activation", *SMALL):
        assert getattr(found, field) == getattr(replace(spec, text_size=96), field), field
    image = vision.prepare(png(picture(60, 40)))
    (rows,) = vision.encode([image])
    assert rows.shape == (image.rows, 96) and 0.1 < float(rows.std()) < 10
    types = {each.type_name for each in open_gguf(first).tensors.values()}
    assert types == {"Q8_0", "F16", "F32"}  # rows of 112 values are no whole blocks
