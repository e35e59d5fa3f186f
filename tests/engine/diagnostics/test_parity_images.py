"""Parity of models with a projector: a healthy pair passes, and every side with a damaged encoder fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM, EngineError
from quengine.config import EngineConfig
from quengine.diagnostics.parity import parity_images
from quengine.diagnostics.parity.parity import ParityReport, compare_sides
from quengine.diagnostics.parity.parity_images import AFTER, BEFORE, compare_images, image_tokens, pictures
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.diagnostics.parity.parity_workload import Workload
from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.synthetic.synthetic_projector import write_synthetic_projector
from tests.engine.diagnostics.test_parity import MODEL, quiet

CONTEXT = 512
ALONE = Workload([], [], 0, 0, CONTEXT)
"""Images alone."""
VISION = replace(
    PROJECTORS_OF["mistral-small"],
    width=64,
    heads=4,
    layers=3,
    feed_forward=96,
    patch=14,
    image_size=224,
    longest_edge=224,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity_images")
    write_synthetic_projector(folder / "mmproj-m.gguf", VISION, MODEL.embedding_length)
    return write_synthetic(folder / "m.gguf", replace(MODEL, context_length=CONTEXT))


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[LLMSide]:
    with LLM(model, "cpu", CONTEXT, 1, "reference") as llm:
        yield LLMSide("reference", llm)


def judged(reference: LLMSide, model: Path, spoil: Callable[[Any], None] = lambda _: None) -> ParityReport:
    """The reference against the CPU, after `spoil` has had its way with the latter's vision model."""
    with LLM(model, "cpu", CONTEXT, 1) as llm:
        assert llm.images is not None
        spoil(llm.images._vision)
        return compare_sides(reference, LLMSide("cpu", llm), ALONE, quiet)


def test_healthy_sides_are_within_the_budget(reference: LLMSide, model: Path) -> None:
    report = judged(reference, model)
    assert report.failures == [] and report.images is not None
    assert report.images.pictures == 2 and 0 < report.images.nmse_max < 1e-9
    assert report.phases["images"].positions > report.images.rows == 88
    assert reference.llm.images is not None
    sizes = [len(reference.llm.images.make(_ids(reference), [each]).ids) for each in pictures()]
    assert image_tokens(model, EngineConfig()) == max(sizes) + 1


def _ids(side: LLMSide) -> list[int]:
    assert side.llm.images is not None
    encode = side.llm.tokenizer.encode
    return encode(BEFORE) + side.llm.images.marker_ids + encode(AFTER)


def _scaled(vision: Any) -> None:
    """A head's rows of one layer's output matrix, larger by a thousandth."""
    out = vision._encoder.blocks[1].attention.out
    matrix = out.weight.clone()
    matrix[:, :16] *= 1.001
    object.__setattr__(out, "matrix", matrix)


def _swapped(vision: Any) -> None:
    encoder = vision._encoder
    first, second, *others = encoder.blocks
    vision._encoder = replace(encoder, blocks=(second, first, *others))


def _other_epsilon(vision: Any) -> None:
    encoder = vision._encoder
    first, *others = encoder.blocks
    changed = replace(first, norm2=replace(first.norm2, eps=1e-3))
    vision._encoder = replace(encoder, blocks=(changed, *others))


def _turned(vision: Any) -> None:
    """Positions off by a row of patches."""
    grid = vision._encoder.grid
    vision._encoder = _Around(vision._encoder, lambda height, width: grid(height, width), roll=1)


class _Around:
    """An encoder whose rows are out of their order by `roll`."""

    def __init__(self, encoder: Any, grid: Callable[[int, int], Any], roll: int) -> None:
        self.grid, self._encoder, self._roll = grid, encoder, roll

    def layers(self, pixels: torch.Tensor, grid: Any) -> Any:
        rows = yield from self._encoder.layers(pixels, grid)
        return rows.roll(self._roll, 1)


@pytest.mark.parametrize("spoil", [_scaled, _swapped, _other_epsilon, _turned])
def test_a_damaged_encoder_fails(reference: LLMSide, model: Path, spoil: Callable[[Any], None]) -> None:
    failures = judged(reference, model, spoil).failures
    assert failures and all(each.startswith("images: NMSE") for each in failures)


@pytest.mark.parametrize(("mean", "by"), [(0.51, "0.02"), (float("nan"), "nan")])
def test_other_pixels_fail(reference: LLMSide, model: Path, mean: float, by: str) -> None:
    def brighter(vision: Any) -> None:
        vision.processor.settings = replace(vision.processor.settings, mean=(0.5, 0.5, mean))

    failures = judged(reference, model, brighter).failures
    assert failures[:2] == [f"images: picture {n}: pixels differ by up to {by}" for n in (1, 2)]


def test_other_layouts_fail(reference: LLMSide, model: Path) -> None:
    def larger(vision: Any) -> None:
        vision.processor.settings = replace(vision.processor.settings, longest_edge=400)

    failures = judged(reference, model, larger).failures
    assert failures[0].startswith("images: picture 1: it is 48 rows of a prompt on side a and ")


def test_a_text_model_that_is_wrong_at_rows_of_images_fails(
    reference: LLMSide, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features are the same on both sides, so that the logits are the text model's."""
    from quengine.request.prompt_images import PromptImages

    with LLM(model, "cpu", CONTEXT, 1) as llm:
        side = LLMSide("cpu", llm)
        forward = side.forward

        def off_by_one(ids: list[int], start: int) -> torch.Tensor:
            images = side.images
            assert isinstance(images, PromptImages)
            side.images = replace(images, rows=tuple(replace(r, start=r.start - 1) for r in images.rows))
            logits = forward(ids, start)
            side.images = images
            return logits

        monkeypatch.setattr(side, "forward", off_by_one)
        failures = compare_sides(reference, side, ALONE, quiet).failures
    assert failures and all(each.startswith("images: ") for each in failures)
    assert any("NMSE median" in each for each in failures)


def test_one_side_without_a_projector_is_an_error(reference: LLMSide, model: Path) -> None:
    with LLM(model, "cpu", CONTEXT, 1, no_mmproj=True) as llm:
        side = LLMSide("cpu", llm)
        with pytest.raises(EngineError, match="side reference reads images and side cpu does not"):
            compare_images(reference, side, quiet)
        assert compare_images(side, side, quiet) is None
    assert image_tokens(model, EngineConfig(no_mmproj=True)) == 0


def test_what_amplifies_rounding_has_a_wider_budget(reference: LLMSide) -> None:
    """By what fp16 matrices do to side a; here there is less than the budget."""
    found = parity_images._widened(reference, parity_images.pictures()[:1], quiet)
    assert found == parity_images.WIDE


def test_a_gpu_beyond_the_budget_is_judged_by_the_wider_one(
    reference: LLMSide, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 is nearer than fp16 matrices, whatever the budget was."""
    monkeypatch.setattr(parity_images, "WIDE", parity_images.FeatureBudget(0.0, 0.0, 0.0))
    with LLM(model, "cpu", CONTEXT, 1) as llm:
        found = compare_images(reference, LLMSide("b", llm, "cuda"), quiet)
        assert found is not None and found.metrics.failures == []
        assert found.metrics.budget.median > found.metrics.nmse_median > 0
        assert llm.images is not None
        _swapped(llm.images._vision)
        found = compare_images(reference, LLMSide("b", llm, "cuda"), quiet)
    assert found is not None and any("NMSE" in failure for failure in found.metrics.failures)
