"""Parity of models that keep states: a healthy pair passes in every phase, and a wrong convolution fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quengine import LLM
from quengine.diagnostics.parity.parity import ParityReport, compare_sides
from quengine.diagnostics.parity.parity_rounding import RoundedSide
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.diagnostics.parity.parity_workload import Workload, plan_workload
from quengine.kernels.short_conv import ShortConvSpec
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic

TEXT = "The wheel turns, and 17 x 23 = 391; the old clock "


@pytest.fixture(scope="module", params=["lfm2-tiny", "qwen3.5moe-tiny", "nemotron-h-moe-tiny"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    preset = synthetic_preset(request.param)
    assert preset is not None
    small = replace(preset, embedding_length=256, feed_forward_length=256, vocab_size=512)
    if small.experts:
        small = replace(small, experts=8, experts_used=2)
    return write_synthetic(tmp_path_factory.mktemp("states") / "healthy.gguf", small)


@pytest.fixture(scope="module")
def workload(model: Path) -> Workload:
    return plan_workload(model, [TEXT], prompts=1, tokens=6, window=80)


@pytest.fixture(scope="module")
def reference(model: Path, workload: Workload) -> Iterator[LLMSide]:
    with LLM(model, "cpu", workload.ctx_size, 1, "reference", chunk_size=24) as llm:
        yield LLMSide("reference", llm)


def judged(
    reference: LLMSide, path: Path, workload: Workload, spoil: Callable[[LLM], None] = lambda _: None
) -> ParityReport:
    """The reference against the CPU's kernels, which take other chunks, after `spoil`."""
    with LLM(path, "cpu", workload.ctx_size, 1, chunk_size=16) as llm:
        spoil(llm)
        return compare_sides(reference, LLMSide("cpu", llm), workload, lambda _: None)


def test_a_healthy_pair_is_within_the_usual_budget(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    report = judged(reference, model, workload)
    assert report.failures == []
    assert report.phases["prefill"].nmse_max < 5e-5
    assert report.phases["decode"].nmse_max < 1e-6 and report.phases["decode"].cached_max < 1e-6


def test_a_wrong_convolution_fails(reference: LLMSide, model: Path, workload: Workload) -> None:
    def exchange_taps(llm: LLM) -> None:
        for block in llm.runner.decoder.blk:
            spec = getattr(block.mixer, "spec", None)
            weight = spec.weight if isinstance(spec, ShortConvSpec) else getattr(spec, "conv", None)
            if weight is not None:
                weight.copy_(weight[[1, 0, *range(2, len(weight))]])  # in place: captured steps read it there

    report = judged(reference, model, workload, exchange_taps)
    assert {failure.partition(":")[0] for failure in report.failures} >= {"prefill", "decode", "greedy"}


def test_rounding_goes_on_from_the_states_of_before(reference: LLMSide, workload: Workload) -> None:
    """What one rounding does to a sound model is little, wherever in a text it is measured."""
    if reference.has_experts:
        pytest.skip("rounding may choose other experts")
    ids = workload.windows[0]
    rounded = RoundedSide(reference, "prefill")
    for start in (0, 16, 32):
        part = ids[start : start + 16]
        exact = reference.forward(part, start)
        moved = rounded.forward(part, start)
        rounded.set_cached(start, start + len(part), [])
        assert float((exact - moved).square().sum() / exact.square().sum()) < 1e-4
