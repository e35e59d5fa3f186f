"""Logits behind a checkpoint are those of the uninterrupted sequence, bit for bit, on the CPU's kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quengine import LLM, SamplingParams
from quengine.kernels.phase import Phase
from quengine.step_plan import SequenceRows
from tests.engine.states import states_that_count, write_small

PROMPT = [(7 * i + 5) % 250 for i in range(130)]
NEXT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module", params=["lfm2-tiny", "qwen3.5-tiny", "nemotron-h-moe-tiny"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = write_small(tmp_path_factory.mktemp("bits") / "tiny.gguf", request.param)
    with states_that_count():
        yield path


def first_logits(llm: LLM, prompt: list[int], count: int) -> tuple[Tensor, list[int], int]:
    """Of a request: the logits behind its prompt, its tokens, how many tokens came from the cache."""
    seen = list[Tensor]()
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    choose = stream.sequence.sampler.sample

    def noted(logits: Tensor, *args):  # type: ignore[no-untyped-def]
        seen.append(logits.clone())
        return choose(logits, *args)

    stream.sequence.sampler.sample = noted  # type: ignore[method-assign]
    completion = stream.finish()
    return seen[0], completion.tokens, completion.timings.cached_tokens


def step(llm: LLM, phase: Phase, ids: list[int], start: int) -> Tensor:
    """The logits behind the last of these tokens, in the cache's first blocks."""
    return llm.runner.forward(phase, [SequenceRows(ids, start, llm.loaded.cache.whole_tables)])[-1].clone()


def test_the_next_turn_is_that_of_the_sequence_that_goes_on(model: Path) -> None:
    with LLM(model, "cpu", ctx_size=256, reuse_prefix=True) as llm:
        _, answer, _ = first_logits(llm, PROMPT, 40)
        text = [*PROMPT, *answer, *NEXT]
        found, _, cached = first_logits(llm, text, 1)
        assert cached == 160
        llm.scheduler.reset()
        step(llm, "prefill", PROMPT[:128], 0)
        step(llm, "prefill", PROMPT[128:], 128)
        for position in range(130, 160):
            step(llm, "decode", text[position : position + 1], position)
        uninterrupted = step(llm, "prefill", text[160:], 160)
    assert torch.equal(found, uninterrupted)


@pytest.mark.parametrize("chunk_size", [32, 512])
def test_a_prompt_that_begins_as_another_is_that_of_the_whole(model: Path, chunk_size: int) -> None:
    other = [*PROMPT, *NEXT]
    with LLM(model, "cpu", ctx_size=256, reuse_prefix=True, chunk_size=chunk_size) as llm:
        first_logits(llm, PROMPT, 1)
        found, tokens, cached = first_logits(llm, other, 20)
    with LLM(model, "cpu", ctx_size=256) as llm:
        expected, whole, nothing = first_logits(llm, other, 20)
    assert (cached, nothing) == (128, 0)
    assert torch.equal(found, expected) and tokens == whole
