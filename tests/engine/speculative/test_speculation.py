"""Speculative decoding on tiny models: whatever is drafted, a text is the text that it is without drafts."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quengine import LLM, EngineError, SamplingParams
from quengine.block_pool import CachePool
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.phase import Phase
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.request.output import Completion
from quengine.request.sequence import Sequence
from quengine.scheduler import Scheduler
from quengine.speculative.speculation import Speculation
from quengine.step_plan import SequenceRows
from quengine.structured.constraint_spec import ConstraintSpec
from tests.engine.runners.test_cpu_batches import write_mixed
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

CTX = 192
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=11, max_tokens=40, ignore_eos=True)
PENALIZED = SamplingParams(
    temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, repeat_penalty=1.2, presence_penalty=0.3
)
CHAINED = SamplingParams(
    seed=4, max_tokens=40, ignore_eos=True, dry_multiplier=1.0, xtc_probability=0.5, dynatemp_range=0.3
)
MIROSTAT = SamplingParams(seed=4, max_tokens=40, ignore_eos=True, mirostat=2, mirostat_tau=2.0)
PROMPTS = [
    list(range(5, 75)),
    [3, 1, 4, 1, 5, 9, 2, 6] * 11,
    [7],
    list(range(100, 163)),
    [*range(5, 69), 200],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=CTX)
    return write_tiny(folder / "target.gguf", kind="Q8_0", sizes=sizes)


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """A model of other weights, with a shorter context."""
    sizes = ModelSizes(embedding=32, feed_forward=64, blocks=1, context=128)
    return write_tiny(folder / "other.gguf", kind="Q8_0", sizes=sizes, seed=9)


def load(model: Path, **options: object) -> LLM:
    return LLM(model, device="cpu", threads=1, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[LLM]:
    with load(model) as llm:
        yield llm


def same(got: list[Completion], expected: list[Completion]) -> None:
    assert [c.tokens for c in got] == [c.tokens for c in expected]
    assert [c.text for c in got] == [c.text for c in expected]
    assert [c.finish_reason for c in got] == [c.finish_reason for c in expected]


def counts(completions: list[Completion]) -> tuple[int, int]:
    """Drafted and accepted tokens of all texts."""
    timings = [c.timings for c in completions]
    return sum(t.drafted_tokens for t in timings), sum(t.accepted_tokens for t in timings)


def all_free(llm: LLM) -> bool:
    assert isinstance(llm.scheduler, Scheduler)
    return llm.scheduler.blocks.num_used == 0 and not llm.scheduler.waiting


def limit_blocks(llm: LLM, blocks: int) -> None:
    """As if there were memory for so few blocks."""
    llm.loaded.cache.pools = (CachePool(blocks),)
    llm.scheduler = llm._make_scheduler()
    llm.speculation = Speculation.of(llm.config, llm.scheduler, llm.loaded.draft, "cpu")


class Drafter:
    """Drafts what `choose` says of a sequence and a count; takes the place of a draft model."""

    bytes_per_token = 0

    def __init__(self, choose: Callable[[Sequence, int], list[int]]) -> None:
        self.choose = choose

    def follow(self, sequence: Sequence, end: int) -> None:
        del sequence, end

    def follow_all(self, ends: Mapping[Sequence, int]) -> None:
        del ends

    def room(self, sequence: Sequence) -> int:
        return CTX - len(sequence.token_ids)

    def most_on_device(self, _sequences: int) -> int:
        return 0

    def goes_on(self, _sequence: Sequence) -> bool:
        return False

    def draft(self, asked: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        drafts = {sequence: self.choose(sequence, count) for sequence, count in asked.items()}
        for sequence, draft in drafts.items():
            end = len(sequence.token_ids) + len(draft)
            assert len(draft) <= asked[sequence] and end < sequence.max_positions
            assert len(sequence.block_tables[0]) * BLOCK_SIZE >= end
        return drafts


def drafted_by(llm: LLM, choose: Callable[[Sequence, int], list[int]], most: int = 6, rows: int = 40) -> None:
    assert isinstance(llm.scheduler, Scheduler)
    llm.speculation = Speculation(llm.scheduler, 0, Drafter(choose), most, rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize(
    "params",
    [GREEDY, SEEDED, PENALIZED, CHAINED, MIROSTAT],
    ids=["greedy", "seeded", "penalized", "chained", "mirostat"],
)
def test_texts_with_look_up_are_those_without(
    model: Path, alone: LLM, params: SamplingParams, parallel: int
) -> None:
    with load(model, parallel=parallel, draft_ngram=1, chunk_size=24) as llm:
        got = llm.generate(PROMPTS, params)
        same(got, alone.generate(PROMPTS, params))
        drafted, accepted = counts(got)
        assert drafted > accepted and (accepted > 0 or params is not GREEDY)
        assert all_free(llm)


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "penalized"])
def test_a_model_that_drafts_for_itself_is_always_right(
    model: Path, alone: LLM, params: SamplingParams, parallel: int
) -> None:
    options = {"parallel": parallel, "draft_model": model, "draft_tokens": 5, "reuse_prefix": True}
    with load(model, **options, chunk_size=24) as llm:
        got = llm.generate(PROMPTS, params)
        same(got, alone.generate(PROMPTS, params))
        drafted, accepted = counts(got)
        # In a batch a text may have no draft for some steps; what the draft model then makes up for in a chunk has
        # other bits than the steps, and a token may follow from that.
        assert 0.95 * drafted < accepted <= drafted and drafted > 100
        if parallel == 1:
            assert all(c.timings.drafts == 7 and c.timings.accept_length > 5 for c in got)
        # Again, over blocks that both models still hold.
        again = llm.generate(PROMPTS, params)
        same(again, got)
        assert again[0].timings.cached_tokens == 64 and counts(again)[1] > 0.95 * counts(again)[0]
        assert all_free(llm)


@pytest.mark.parametrize("parallel", [1, 3])
def test_texts_with_a_draft_model_that_is_wrong_are_those_without(
    model: Path, other: Path, alone: LLM, parallel: int
) -> None:
    params = replace(SEEDED, max_tokens=None)
    with load(model, parallel=parallel, draft_model=other, draft_ngram=2, draft_tokens=3) as llm:
        assert "up to position 128 only, its own context" in llm.loaded.notes[-1]
        got = llm.generate(PROMPTS, params)
        same(got, alone.generate(PROMPTS, params))
        assert all(c.prompt_tokens + len(c.tokens) == CTX for c in got)
        assert counts(got)[0] > counts(got)[1] and all_free(llm)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("parallel", [1, 4])
def test_wrong_right_and_random_drafts_change_nothing(model: Path, parallel: int, backend: str) -> None:
    numbers = random.Random(1)
    params = replace(SEEDED, max_tokens=40 if backend == "auto" else 12)  # the reference is slow
    with load(model, backend=backend) as llm:
        expected = llm.generate(PROMPTS, params)
    texts = {tuple(p): p + c.tokens for p, c in zip(PROMPTS, expected, strict=True)}

    def right(sequence: Sequence, count: int) -> list[int]:
        known = texts[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        return known[len(sequence.token_ids) :][:count]

    def wrong(sequence: Sequence, count: int) -> list[int]:
        return [(token + 1) % 200 for token in right(sequence, count)]

    def any_of_them(sequence: Sequence, count: int) -> list[int]:
        draft = right(sequence, count)
        return [token if numbers.random() < 0.7 else numbers.randrange(200) for token in draft]

    with load(model, parallel=parallel, backend=backend, draft_ngram=1) as llm:
        accepted = []
        for choose in (wrong, right, any_of_them):
            drafted_by(llm, choose)
            got = llm.generate(PROMPTS, params)
            same(got, expected)
            accepted.append(counts(got)[1])
            assert all_free(llm)
        assert accepted[0] == 0 and accepted[0] < accepted[2] < accepted[1]


def test_rejected_drafts_are_never_shared(model: Path, alone: LLM) -> None:
    """Blocks are known for what the texts took, though wrong tokens were computed in them in between."""
    params = replace(GREEDY, max_tokens=100)
    with load(model, parallel=2, draft_ngram=1) as llm:
        drafted_by(llm, lambda _, count: [199] * count)
        first = llm.generate(PROMPTS[0], params)[0]
        assert first.timings.drafted_tokens > 10 and 199 not in first.tokens
        longer = PROMPTS[0] + first.tokens
        again = llm.generate(longer, GREEDY)[0]
        assert again.timings.cached_tokens == 169
        shrunk = llm.generate([*longer[:70], 199, 199, *longer[72:]], GREEDY)[0]
        assert shrunk.timings.cached_tokens == 64
        assert first.tokens == alone.generate(PROMPTS[0], params)[0].tokens


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafts", ["ngram", "model"])
def test_preempted_texts_are_the_same(
    model: Path, alone: LLM, params: SamplingParams, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(params, logprobs=2, max_tokens=70)
    prompts = [list(range(10 * i, 10 * i + 12 + 3 * i)) for i in range(5)]
    options = {"draft_ngram": 1} if drafts == "ngram" else {"draft_model": model}
    with load(model, parallel=5, chunk_size=24, deterministic=True, **options) as llm:
        limit_blocks(llm, 6)
        assert isinstance(llm.scheduler, Scheduler)
        preempted: list[int] = []
        preempt = llm.scheduler._preempt

        def watched(sequence: Sequence) -> None:
            preempted.append(len(sequence.generated))
            preempt(sequence)

        monkeypatch.setattr(llm.scheduler, "_preempt", watched)
        got, expected = llm.generate(prompts, params), alone.generate(prompts, params)
        assert preempted and max(preempted) > 20
        same(got, expected)
        assert [c.logprobs for c in got] == [c.logprobs for c in expected]
        assert counts(got)[0] > 0 and all_free(llm)
        # A draft model computes what a text had lost in chunks, which a sampled token may tell.
        assert drafts == "ngram" or counts(got)[1] > 0.9 * counts(got)[0]


def test_a_text_ends_at_a_stop_string_an_end_token_and_max_tokens_within_a_draft(
    model: Path, alone: LLM
) -> None:
    whole = alone.generate(PROMPTS[3], SEEDED)[0]
    stop = whole.text[len(whole.text) // 2 :][:2]
    cases = [
        replace(SEEDED, stop=(stop,)),
        replace(SEEDED, stop_token_ids=(whole.tokens[9],)),
        *(replace(SEEDED, max_tokens=count) for count in (1, 2, 3, 6, 7)),
    ]
    with load(model, draft_ngram=1) as llm:
        drafted_by(llm, lambda s, count: whole.tokens[len(s.generated) :][:count])
        for params in cases:
            (got,), (expected,) = llm.generate(PROMPTS[3], params), alone.generate(PROMPTS[3], params)
            same([got], [expected])
            assert len(got.tokens) < 40
            assert got.timings.accepted_tokens == got.timings.drafted_tokens or params.max_tokens == 40
            assert (got.timings.drafted_tokens > 0) == (params.max_tokens not in (1, 2))
        assert all_free(llm)


def test_a_grammar_and_logprobs_hold_row_by_row(model: Path, alone: LLM) -> None:
    spec = ConstraintSpec.regex("((ab|cd){3}e){20}")
    for params in (replace(SEEDED, constraint=spec, logprobs=3), replace(GREEDY, logprobs=0)):
        with load(model, parallel=2, draft_ngram=1) as llm:
            got, expected = llm.generate(PROMPTS[:3], params), alone.generate(PROMPTS[:3], params)
            same(got, expected)
            assert [c.logprobs for c in got] == [c.logprobs for c in expected]
            assert counts(got)[1] > 0


def test_a_context_is_filled_to_its_end_and_no_further(model: Path, alone: LLM) -> None:
    params = replace(GREEDY, max_tokens=None)
    (expected,) = alone.generate(PROMPTS[1], params)
    with load(model, draft_model=model, draft_tokens=31) as llm:
        (got,) = llm.generate(PROMPTS[1], params)
        same([got], [expected])
        assert got.finish_reason == "length" and len(got.tokens) == CTX - len(PROMPTS[1])
        assert got.timings.accepted_tokens == got.timings.drafted_tokens


def test_a_window_and_a_q8_0_cache_hold_with_drafts(folder: Path) -> None:
    path = write_mixed(folder / "window.gguf", **{"llama.attention.sliding_window": 50})
    with load(path, ctx_size=CTX, cache_type="q8_0") as llm:
        expected = llm.generate(PROMPTS[:4], GREEDY)
    for options in ({"draft_ngram": 1}, {"draft_model": path, "parallel": 3}):
        with load(path, ctx_size=CTX, cache_type="q8_0", **options) as llm:
            got = llm.generate(PROMPTS[:4], GREEDY)
            same(got, expected)
            assert counts(got)[0] > 0


@pytest.mark.parametrize("fails", ["the step", "its drafts"])
def test_a_step_that_fails_is_tried_for_each_text_and_again_with_drafts(
    model: Path, alone: LLM, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(model, parallel=3, draft_model=model) as llm:
        assert isinstance(llm.scheduler, Scheduler)
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
        for stream in streams:
            stream.start()
        while len(llm.scheduler.decoding) < 3:
            llm.step()
        failing = (llm.runner, "forward") if fails == "the step" else (llm.loaded.draft, "draft")
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="all of them"):
            patched.setattr(*failing, _failing)
            llm.step()
        llm.scheduler.retry_alone()
        same([s.finish() for s in streams], alone.generate(PROMPTS[:3], GREEDY))
        assert all_free(llm)


def _failing(*what: object, **how: object) -> Tensor:
    raise RuntimeError(f"a step of all of them: {what}, {how}")


def test_a_cancelled_text_frees_its_blocks_and_leaves_the_others_alone(model: Path, alone: LLM) -> None:
    with load(model, parallel=3, draft_model=model) as llm:
        streams = [llm.stream(prompt, SEEDED) for prompt in PROMPTS[:3]]
        for stream in streams:
            stream.start()
        for _ in range(8):
            llm.step()
        streams[1].close()
        assert streams[1].sequence.block_tables == ()
        same([streams[i].finish() for i in (0, 2)], [alone.generate(PROMPTS[i], SEEDED)[0] for i in (0, 2)])
        assert all_free(llm)


def test_rows_of_a_step_stay_within_their_number(model: Path) -> None:
    with load(model, parallel=4, draft_ngram=1) as llm:
        drafted_by(llm, lambda _, count: [1] * count, most=6, rows=9)
        sizes: list[int] = []
        forward = llm.runner.forward

        def watched(phase: Phase, rows: list[SequenceRows], **how: Any) -> Tensor:
            if phase == "decode":
                sizes.append(sum(len(part.ids) for part in rows))
            return forward(phase, rows, **how)

        llm.runner.forward = watched  # type: ignore[method-assign,assignment]
        llm.generate(PROMPTS[:4], GREEDY)
        assert max(sizes) == 9


def test_a_steps_bytes_count_the_experts_that_its_drafted_rows_are_expected_to_read(folder: Path) -> None:
    path = write_synthetic(folder / "experts.gguf", replace(PRESETS["qwen3moe-tiny"], vocab_size=500))
    with load(path) as llm:
        (expected,) = llm.generate(PROMPTS[0], GREEDY)
        decoder, cache = llm.loaded.decoder, llm.cache_bytes(len(PROMPTS[0]) + 41 // 2)
        assert expected.timings.bytes_per_token == decoder.step_bytes(1) + cache
    with load(path, draft_ngram=1) as llm:
        drafted_by(llm, lambda s, count: expected.tokens[len(s.generated) :][:count])
        rows: list[int] = []
        forward = llm.runner.forward

        def watched(phase: Phase, parts: list[SequenceRows], **how: Any) -> Tensor:
            rows.extend(len(part.ids) for part in parts if phase == "decode")
            return forward(phase, parts, **how)

        llm.runner.forward = watched  # type: ignore[method-assign,assignment]
        (got,) = llm.generate(PROMPTS[0], GREEDY)
        same([got], [expected])
        assert max(rows) > 4 and decoder.step_bytes(max(rows)) > decoder.step_bytes(1)
        read = decoder.step_bytes(1) + sum(map(decoder.step_bytes, rows))  # the first is the prompt's
        assert got.timings.bytes_per_token == read // 40 + cache


def test_logits_that_are_not_finite_behind_a_drafted_token_fail_the_text_there(
    model: Path, alone: LLM
) -> None:
    (expected,) = alone.generate(PROMPTS[0], GREEDY)
    with load(model, draft_ngram=1) as llm:
        drafted_by(llm, lambda s, count: expected.tokens[len(s.generated) :][:count])
        stream = llm.stream(PROMPTS[0], GREEDY)
        sample = stream.sequence.sampler.sample

        def poisoned(logits, history, position):  # type: ignore[no-untyped-def]
            if position == 78:
                logits = logits.clone()
                logits[17] = float("nan")
            return sample(logits, history, position)

        stream.sequence.sampler.sample = poisoned  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"token 78: .* logits are not finite"):
            stream.finish()
        assert stream.sequence.generated == expected.tokens[:8] and all_free(llm)


def test_what_cannot_be_is_said_in_a_line(folder: Path, model: Path) -> None:
    for options, message in [
        ({"draft_ngram": -1}, r"draft_ngram -1: must be 0 \(no look-up\) to 16 tokens"),
        ({"draft_tokens": 32, "draft_ngram": 2}, "draft_tokens 32: must be from 1 to 31"),
        ({"draft_tokens": 4}, "draft_tokens 4: nothing drafts; ask for a draft model"),
        ({"draft_model": folder / "none.gguf"}, r"draft model: .*none\.gguf"),
    ]:
        with pytest.raises(EngineError, match=message):
            load(model, **options)
