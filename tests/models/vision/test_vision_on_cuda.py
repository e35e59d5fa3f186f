"""Encoders on a CUDA device, with fp16 matrices, against the CPU's fp32."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.vision_encoder import model_of
from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.vision import load_vision
from quengine.models.vision.blocks import UnitGrid
from quengine.models.vision.encoder_graphs import EncoderGraphs
from quengine.models.vision.vision_model import COMMON_SIDE
from quengine.request.image_prompts import blank_image
from tests.models.vision import (
    test_gemma3,
    test_gemma4uv,
    test_gemma4v,
    test_glm4v,
    test_idefics3,
    test_internvl,
    test_lfm2,
    test_pixtral,
    test_qwen_vl,
)
from tests.models.vision.vision_models import VisionCase, nmse, picture, png, write_mmproj, write_vision

CASES = {
    "idefics3": test_idefics3.CASE,
    "pixtral": test_pixtral.CASES["mistral3"],
    "gemma3": test_gemma3.CASE,
    "gemma4v": test_gemma4v.CASE,
    "gemma4uv": test_gemma4uv.CASE,
    "qwen3vl_merger": test_qwen_vl.QWEN3,
    "qwen2.5vl_merger": test_qwen_vl.CASES["small windows"],
    "internvl": test_internvl.CASE,
    "glm4v": test_glm4v.CASE,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    """Images of several sizes in one call; products of 16-bit floats are all that differs."""
    write_vision(tmp_path, CASES[name], test_gemma4v.with_bounds if name == "gemma4v" else None)
    host, device = load_vision(tmp_path, "cpu"), load_vision(tmp_path, "cuda")
    images = [host.prepare(png(picture(*size))) for size in ((100, 70), (40, 40), (100, 70))]
    for ours, theirs in zip(device.encode(images), host.encode(images), strict=True):
        assert ours.dtype == torch.float32 and ours.is_cuda
        assert nmse(ours.cpu(), theirs) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mistral-small", "qwen3.5"])
def test_an_image_of_a_common_size_is_encoded_in_the_workspace(name: str) -> None:
    """Of released shapes with one layer: all layers take the same memory."""
    settings = replace(PROJECTORS_OF[name], layers=1, text_size=64)
    vision = model_of(settings, torch.device("cuda"))
    image = vision.prepare(blank_image(COMMON_SIDE))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(3):
            vision.encode([image])
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert vision.workspace / 10 < taken < vision.workspace


@pytest.mark.gpu
def test_blocks_have_the_bits_of_expanded_matrices(tmp_path: Path) -> None:
    write_vision(tmp_path, CASES["idefics3"])
    file = write_mmproj(tmp_path, tmp_path / "mmproj-q8_0.gguf", CASES["idefics3"], "q8_0")
    blocks, halves = load_vision(file, "cuda"), load_vision(file, "cuda", dtype=torch.float16)
    image = blocks.prepare(png(picture(100, 70)))
    assert torch.equal(blocks.encode([image])[0], halves.encode([image])[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_graphs_give_the_bits_of_the_layers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units that come a second time are captured in slices, those of several sizes over one memory."""
    monkeypatch.setattr("quengine.models.vision.vision_model.SLICE", 1)  # a graph for each layer
    write_vision(tmp_path, CASES[name])
    vision = load_vision(tmp_path, "cuda")
    images = [vision.prepare(png(picture(*size))) for size in ((100, 70), (40, 40))]
    others = vision.prepare(png(picture(100, 70, seed=1)))
    expected = [vision.encode([image])[0] for image in images]
    graphs = vision._graphs
    assert graphs is not None
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            for image, rows in zip(images, expected, strict=True):
                assert torch.equal(vision.encode([image])[0], rows)
        assert graphs._captured
        assert not torch.equal(vision.encode([others])[0], expected[0])
        assert torch.equal(vision.encode([images[0]])[0], expected[0])
        monkeypatch.setattr(
            "quengine.models.vision.vision_model.MAX_PATCHES", 1
        )  # unit by unit, none waited for
        together = vision.encode([images[0], others, images[0], others])
        for first, second in ((0, 2), (1, 3)):
            assert torch.equal(together[first], together[second])
        assert nmse(together[0], expected[0]) < 1e-6 < nmse(together[1], expected[0])
    layers = vision.processor.settings.layers
    assert all(len(each.graphs) == layers + 1 for each in graphs._captured.values())


class Greedy:
    """An encoder that in a capture takes more memory than there is."""

    def __init__(self, encoder: Any) -> None:
        self.grid, self._encoder = encoder.grid, encoder

    def layers(self, pixels: torch.Tensor, grid: UnitGrid) -> Generator[None, None, torch.Tensor]:
        layers = self._encoder.layers(pixels, grid)
        next(layers)
        yield
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, device=pixels.device)
        return (yield from layers)


@pytest.mark.gpu
def test_without_memory_for_a_capture_kernels_are_launched_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_vision(tmp_path, CASES["pixtral"])
    vision = load_vision(tmp_path, "cuda")
    image = vision.prepare(png(picture(100, 70)))
    expected, plain = vision.encode([image])[0], vision._encoder
    vision._graphs = EncoderGraphs(Greedy(plain), vision.device)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(3):
            assert torch.equal(vision.encode([image])[0], expected)
        (line,) = (record.message for record in caplog.records if "capture" in record.message)
        assert line.startswith("no device memory left") and not vision._graphs._captured
        vision._graphs = EncoderGraphs(plain, vision.device)  # the device captures as before
        for _ in range(3):
            assert torch.equal(vision.encode([image])[0], expected)
        assert vision._graphs._captured


@pytest.mark.gpu
def test_large_activations_stay_finite(tmp_path: Path) -> None:
    """Products of a feed-forward that leave the range of fp16: rows are scaled before the last matrix."""

    def loud(model: torch.nn.Module) -> None:
        for key, weight in model.named_parameters():
            if key.endswith(("gate_proj.weight", "up_proj.weight")) and "vision_tower" in key:
                weight.mul_(300)

    case: VisionCase = CASES["pixtral"]
    write_vision(tmp_path, case, loud)
    host, device = load_vision(tmp_path, "cpu"), load_vision(tmp_path, "cuda")
    image = host.prepare(png(picture(100, 70)))
    assert nmse(device.encode([image])[0].cpu(), host.encode([image])[0]) < 1e-4


@pytest.mark.gpu
def test_lfm2_resamples_positions_alike(tmp_path: Path) -> None:
    import json

    write_vision(tmp_path, test_lfm2.CASE)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(test_lfm2.PROCESSOR))
    host, device = load_vision(tmp_path, "cpu"), load_vision(tmp_path, "cuda")
    image = host.prepare(png(picture(220, 110)))
    assert nmse(device.encode([image])[0].cpu(), host.encode([image])[0]) < 1e-5
