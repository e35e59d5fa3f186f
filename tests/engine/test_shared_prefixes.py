"""Prefixes of models with states are computed once: turns of long conversations, agents that share instructions."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quengine import LLM, SamplingParams
from quengine.request.output import Completion
from tests.engine.states import states_that_count, write_small
from tests.engine.test_states import computed_tokens, engine, tokens
from tests.engine.test_states_ahead import ahead

FEW = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
AGENTS = 16


@pytest.fixture(scope="module", autouse=True)
def counting() -> Iterator[None]:
    with states_that_count():
        yield


@pytest.fixture(scope="module", params=["lfm2-tiny", "qwen3.5-tiny"])
def tiny(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The one is computed by the definition, which counts, the other by the CPU's kernels."""
    return write_small(tmp_path_factory.mktemp("prefixes") / f"{request.param}.gguf", request.param)


def text(seed: int, length: int) -> list[int]:
    return [(seed * i + 3) % 250 for i in range(1, length + 1)]


def computed(counts: list[int]) -> int:
    """Rows of prompts in these steps."""
    return sum(count for count in counts if count > 0)


def agents(shared: list[int]) -> list[list[int]]:
    return [[*shared, n, *text(n + 2, 20)] for n in range(AGENTS)]


@pytest.mark.parametrize("options", [{}, {"draft_ngram": 2, "draft_tokens": 4}], ids=["plain", "drafts"])
def test_each_turn_of_a_long_conversation_computes_its_new_tokens(
    tiny: Path, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quengine.state_checkpoints.CHECKPOINT_EVERY", 128)
    with engine(tiny, ctx_size=512, chunk_size=128, **options) as llm:
        counts, params, before = computed_tokens(llm), replace(FEW, max_tokens=36), 0
        conversation = text(11, 350)
        for turn in range(3):
            counts.clear()
            answer = llm.generate(conversation, params)[0]
            cached = answer.timings.cached_tokens
            assert computed(counts) == len(conversation) - cached
            if turn:  # the last whole block of the turn before, or where a draft ended in front of it
                assert before - cached < (32 if not options else 4 * 32 + 32)
            before = len(conversation) + len(answer.tokens)
            conversation = [*conversation, *answer.tokens, *text(turn + 5, 9)]
    with engine(tiny, ctx_size=512, reuse_prefix=False) as llm:
        assert llm.generate(conversation[: before - 36], params)[0].tokens == answer.tokens


@pytest.mark.parametrize("parallel", [AGENTS, 3])
def test_agents_at_the_same_moment_compute_what_they_share_once(tiny: Path, parallel: int) -> None:
    prompts = agents(text(13, 160))
    with engine(tiny, ctx_size=512, reuse_prefix=False) as llm:
        expected = [llm.generate(prompt, FEW)[0].tokens for prompt in prompts[:: AGENTS - 1]]
    with engine(tiny, ctx_size=512, parallel=parallel) as llm:
        counts = computed_tokens(llm)
        found = llm.generate(prompts, FEW)
    assert [each.timings.cached_tokens for each in found] == [0] + [160] * (AGENTS - 1)
    assert computed(counts) == 160 + AGENTS * 21
    assert tokens(found[:: AGENTS - 1]) == expected


def test_agents_at_the_same_moment_on_a_device_a_step_ahead(tmp_path: Path) -> None:
    prompts = agents(text(13, 128))
    with ahead(write_small(tmp_path / "m.gguf", "lfm2-tiny"), parallel=AGENTS) as (llm, _):
        found: list[Completion] = llm.generate(prompts, FEW)
    assert [each.timings.cached_tokens for each in found] == [0] + [128] * (AGENTS - 1)


def control_token(llm: LLM) -> int:
    return next(token for token in range(llm.tokenizer.vocab_size) if llm.tokenizer.is_control(token))


def test_an_agent_that_comes_later_goes_on_from_the_first_message(tiny: Path) -> None:
    with engine(tiny, ctx_size=512, parallel=2) as llm:
        begin = control_token(llm)
        shared = [begin, *text(13, 299), begin]
        prompts = agents(shared)[:4]
        counts = computed_tokens(llm)
        found = [llm.generate(prompt, FEW)[0] for prompt in prompts]
        assert [each.timings.cached_tokens for each in found] == [0, 288, 288, 288], (
            "300 tokens in whole blocks"
        )
        assert computed(counts) == len(prompts[0]) + 3 * (len(prompts[0]) - 288)
    with engine(tiny, ctx_size=512, reuse_prefix=False) as llm:
        assert tokens(found) == tokens([llm.generate(prompt, FEW)[0] for prompt in prompts])


@pytest.mark.parametrize(("ids", "opening"), [([], 0), ([0, 1], 0), ([0, 7, 8, 0, 7, 0], 3), ([7, 7, 8], 0)])
def test_a_first_message_ends_where_a_control_token_comes_again(
    tiny: Path, ids: list[int], opening: int
) -> None:
    with engine(tiny) as llm:
        begin, plain = control_token(llm), iter(range(llm.tokenizer.vocab_size))
        ordinary = [next(token for token in plain if not llm.tokenizer.is_control(token)) for _ in range(3)]
        named = {0: begin, 1: ordinary[0], 7: ordinary[1], 8: ordinary[2]}
        assert llm._sequences._opening([named[each] for each in ids]) == opening
