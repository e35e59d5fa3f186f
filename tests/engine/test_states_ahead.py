"""States that cannot go back on a device that computes a step ahead of the host: each token once in each state."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from quengine import LLM, SamplingParams
from quengine.request.output import Completion
from tests.engine.states import states_that_count, write_small
from tests.engine.test_steps_ahead import Device, load, on_device

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SHARED = [(11 * i) % 250 for i in range(70)]
PROMPTS = [
    [7, 8],
    SHARED,
    [(7 * i + 3) % 250 for i in range(63)],
    [*SHARED, 9, 9, 9],
    [11],
    [*SHARED[:33], 200],
    [(3 * i) % 250 for i in range(60)],
]
LENGTHS = [40, 9, 33, 21, 40, 5, 30]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = write_small(tmp_path_factory.mktemp("ahead") / "lfm2.gguf", "lfm2-tiny")
    with states_that_count():
        yield path


def lengths(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of each prompt's completion, of unequal lengths, all at once."""
    pairs = zip(prompts, LENGTHS, strict=True)
    streams = [llm.stream(prompt, replace(PARAMS, max_tokens=length)) for prompt, length in pairs]
    for stream in streams:
        stream.start()
    return [stream.finish().tokens for stream in streams]


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[Completion]:
    with load(tiny, 1, ctx_size=192) as llm:
        return [llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS]


@contextmanager
def ahead(tiny: Path, **options: object) -> Iterator[tuple[LLM, Device]]:
    with load(tiny, ctx_size=192, **options) as llm:
        device = on_device(llm)
        llm.scheduler = llm._make_scheduler()
        yield llm, device
        assert all(pool.num_free == pool.shape.num_blocks for pool in llm.scheduler.blocks._pools)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 24}, {"deterministic": True}])
def test_every_sequence_has_its_own_tokens(
    tiny: Path, alone: list[Completion], options: dict[str, object]
) -> None:
    wanted = [each.tokens[:length] for each, length in zip(alone, LENGTHS, strict=True)]
    with ahead(tiny, **options) as (llm, device):
        assert lengths(llm, PROMPTS) == wanted
        # Steps are launched before the tokens of the one before are read.
        launches = [n for n, entry in enumerate(device.log, 1) if entry.startswith("decode")]
        before = [pair for pair in pairwise(launches) if f"read {pair[0]}" not in device.log[: pair[1]]]
        assert len(before) > len(launches) // 3


def test_preempted_sequences_go_on(tiny: Path, alone: list[Completion]) -> None:
    with ahead(tiny) as (llm, _):
        paged, state = llm.loaded.cache.pools
        llm.loaded.cache.pools = (replace(paged, num_blocks=8), state)
        llm.scheduler = llm._make_scheduler()
        found = llm.generate(PROMPTS, PARAMS)
    assert [each.tokens for each in found] == [each.tokens for each in alone]


def test_a_conversation_goes_on_from_its_last_full_block(tiny: Path, alone: list[Completion]) -> None:
    with ahead(tiny) as (llm, _):
        first = llm.generate(SHARED, PARAMS)[0]
        second = [*SHARED, *first.tokens, 5, 6]
        answer = llm.generate(second, replace(PARAMS, max_tokens=8))[0]
    assert first.tokens == alone[1].tokens and answer.timings.cached_tokens == 96, "of 70 and 39 tokens"
    with load(tiny, 1, ctx_size=192) as llm:
        assert answer.tokens == llm.generate(second, replace(PARAMS, max_tokens=8))[0].tokens
