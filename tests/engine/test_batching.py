"""Many sequences at once on a tiny model, over the paged cache: each is the text that it is alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from quengine import LLM, EngineError, SamplingParams
from quengine.block_pool import CachePool
from quengine.config import BACKLOG_CHUNK
from quengine.request.output import Completion
from quengine.sampler import Sample
from quengine.scheduler import Scheduler
from quengine.step_plan import StepPlan
from quengine.structured.constraint_spec import ConstraintSpec
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.5, top_k=0, top_p=1, min_p=0, seed=11, max_tokens=40, ignore_eos=True, repeat_penalty=1.2
)
SHARED = list(range(5, 75))
PROMPTS = [
    SHARED,
    [*SHARED, 9, 9, 9],
    [7],
    list(range(100, 163)),
    SHARED[:64],
    [3, 1, 4, 1, 5, 9, 2, 6] * 11,
    [*SHARED[:33], 200],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=192)
    return write_tiny(tmp_path_factory.mktemp("batching") / "tiny.gguf", kind="Q8_0", sizes=sizes)


def load(model: Path, parallel: int, backend: str, **options: object) -> LLM:
    return LLM(model, device="cpu", backend=backend, parallel=parallel, threads=1, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["reference", "auto"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(model: Path, backend: str) -> Iterator[LLM]:
    with load(model, 1, backend) as llm:
        yield llm


@pytest.fixture(scope="module", params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    given: SamplingParams = request.param
    return given


@pytest.fixture(scope="module")
def expected(alone: LLM, params: SamplingParams) -> list[Completion]:
    return alone.generate(PROMPTS, params)


def paged(llm: LLM) -> Scheduler:
    return llm.scheduler


def limit_blocks(llm: LLM, blocks: int) -> None:
    """As if there were memory for so few blocks."""
    llm.loaded.cache.pools = (CachePool(blocks),)
    llm.scheduler = llm._make_scheduler()


def same(got: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [c.tokens for c in got] == [c.tokens for c in expected]
    assert [c.text for c in got] == [c.text for c in expected]


@pytest.mark.parametrize("parallel", [2, 3, 7, 16])
def test_a_text_is_the_same_alone_and_in_batches_of_any_size(
    model: Path, backend: str, params: SamplingParams, expected: list[Completion], parallel: int
) -> None:
    with load(model, parallel, backend, chunk_size=24) as llm:
        same(llm.generate(PROMPTS, params), expected)
        assert paged(llm).blocks.num_used == 0 and not paged(llm).waiting
        assert llm.scheduler.cache_size == 192 * parallel


@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_computed_in_one_step_give_the_texts_they_give_alone(
    model: Path, backend: str, expected: list[Completion], params: SamplingParams, deterministic: bool
) -> None:
    with load(model, 7, backend, chunk_size=128, deterministic=deterministic) as llm:
        computed: list[int] = []
        launch = llm.runner.launch

        def counted(plan: StepPlan) -> StepPlan:
            if plan.phase == "prefill":
                computed.append(len(plan.sequences))
            return launch(plan)

        llm.runner.launch = counted  # type: ignore[method-assign]
        same(llm.generate(PROMPTS, params), expected)
        # SHARED is the beginning of others, which wait for it; the CPU gains nothing by more than one at a time. Of 4
        # that can be together, those that come once a step has begun are in the next one.
        assert sum(computed) >= 6 and (max(computed) == 1 if backend == "auto" else 1 < max(computed) <= 4)
        assert paged(llm).blocks.num_used == 0


def test_a_step_of_several_prompts_may_be_longer_than_the_context_of_each(model: Path) -> None:
    prompts = [list(range(i, i + 60)) for i in range(6)]
    with load(model, 6, "reference", ctx_size=128) as llm, load(model, 1, "reference") as alone:
        streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
        for stream in streams:
            stream.start()
        llm.step()
        step, most = paged(llm).current, BACKLOG_CHUNK["cpu"]
        assert step is not None and sum(len(chunk.ids) for chunk in step.chunks) == most > llm.ctx_size
        for stream in streams:
            stream.close()
        same(llm.generate(prompts, GREEDY), alone.generate(prompts, GREEDY))


def test_a_prompt_whose_logits_are_not_finite_fails_alone_of_those_in_its_step(model: Path) -> None:
    prompts = [list(range(i, i + 20)) for i in range(3)]
    with load(model, 3, "reference") as llm, load(model, 1, "reference") as alone:
        streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
        sample = streams[1].sequence.sampler.sample

        def poisoned(logits: Tensor, history: list[int], position: int) -> Sample:
            return sample(logits * float("nan"), history, position)

        streams[1].sequence.sampler.sample = poisoned  # type: ignore[method-assign,assignment]
        for stream in streams:
            stream.start()
        llm.step()
        step = paged(llm).current
        assert step is not None and len(step.chunks) == 3
        with pytest.raises(EngineError, match=r"token 20: .* logits are not finite"):
            streams[1].finish()
        same([streams[i].finish() for i in (0, 2)], alone.generate([prompts[0], prompts[2]], GREEDY))
        assert paged(llm).blocks.num_used == 0


def test_texts_come_in_the_order_of_the_prompts_and_n(model: Path, backend: str, alone: LLM) -> None:
    params = replace(SEEDED, n=3)
    with load(model, 4, backend) as llm:
        same(llm.generate(["the", "a cat"], params), alone.generate(["the", "a cat"], params))


def test_preempted_texts_are_the_same_with_penalties_and_logprobs(
    model: Path, backend: str, params: SamplingParams, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(params, logprobs=2, max_tokens=70)
    prompts = [list(range(10 * i, 10 * i + 12 + 3 * i)) for i in range(6)]
    expected = alone.generate(prompts, params)
    # The CPU's kernels for prompts round otherwise than those for one token: what was generated may be computed again
    # by them in a run that is not deterministic.
    with load(model, 6, backend, chunk_size=24, deterministic=backend == "auto") as llm:
        limit_blocks(llm, 6)
        preempted: list[int] = []
        preempt = paged(llm)._preempt

        def watched(sequence: object) -> None:
            preempted.append(len(sequence.generated))  # type: ignore[attr-defined]
            preempt(sequence)  # type: ignore[arg-type]

        monkeypatch.setattr(paged(llm), "_preempt", watched)
        got = llm.generate(prompts, params)
        assert preempted and max(preempted) > 20
        same(got, expected)
        for mine, other in zip(got, expected, strict=True):
            assert mine.logprobs is not None and other.logprobs is not None
            assert [e.token for e in mine.logprobs] == mine.tokens
            # The CPU's kernels give the same bits in every batch; the reference's sums are torch's.
            near = 0.0 if backend == "auto" else 1e-9
            wanted = pytest.approx([e.logprob for e in other.logprobs], rel=near, abs=near)
            assert [e.logprob for e in mine.logprobs] == wanted
        assert paged(llm).blocks.num_used == 0


def test_preempted_texts_keep_to_their_schema_and_stop_strings(model: Path, backend: str, alone: LLM) -> None:
    spec = ConstraintSpec.regex("((ab|cd){3}e){20}")
    params = replace(SEEDED, constraint=spec, max_tokens=80, stop=("cdcdcde",))
    prompts = [list(range(10 * i, 10 * i + 12 + 3 * i)) for i in range(6)]
    with load(model, 6, backend, chunk_size=24, deterministic=backend == "auto") as llm:
        limit_blocks(llm, 5)
        got = llm.generate(prompts, params)
        assert any(c.finish_reason == "stop" for c in got) and any(len(c.tokens) > 60 for c in got)
        same(got, alone.generate(prompts, params))
        assert paged(llm).blocks.num_used == 0


@pytest.mark.parametrize("blocks", [24, 6])
def test_cancels_in_queue_prefill_and_decode_free_everything_and_change_no_other_text(
    model: Path, backend: str, params: SamplingParams, expected: list[Completion], blocks: int
) -> None:
    with load(model, 4, backend, chunk_size=24) as llm:
        limit_blocks(llm, blocks)
        streams = [llm.stream(prompt, params) for prompt in PROMPTS]
        for stream in streams:
            stream.start()
        cancelled = set()
        for step in range(10**6):
            if not any(llm.step()) and not paged(llm).waiting:
                break
            if step == 1 and paged(llm).prefilling:
                cancelled.add(paged(llm).prefilling[0])
            if step == 3:
                cancelled.add(paged(llm).waiting[-1])
            if step == 30:
                cancelled.add(paged(llm).decoding[0])
            for sequence in cancelled:
                llm.scheduler.cancel(sequence)
                assert sequence.block_tables == ()
        assert len(cancelled) == 3
        kept = [i for i, stream in enumerate(streams) if stream.sequence not in cancelled]
        same([streams[i].completion for i in kept], [expected[i] for i in kept])
        assert paged(llm).blocks.num_used == 0


def test_an_equal_beginning_is_computed_once(model: Path, backend: str, alone: LLM) -> None:
    with load(model, 4, backend) as llm:
        got = llm.generate([SHARED] * 3, GREEDY)
        same(got, alone.generate([SHARED] * 3, GREEDY))
        assert [c.timings.cached_tokens for c in got] == [0, 64, 64]
        again = llm.generate(SHARED + got[0].tokens, GREEDY)[0]
        assert again.timings.cached_tokens == 70 + 39


def test_a_deterministic_run_shares_prompts_only_and_computes_answers_again_token_by_token(
    model: Path, backend: str, expected: list[Completion], params: SamplingParams
) -> None:
    with load(model, 7, backend, chunk_size=24, deterministic=True) as llm:
        limit_blocks(llm, 6)
        decoded = []
        launch = llm.runner.launch

        def watched(plan: StepPlan) -> StepPlan:
            if plan.phase == "decode":
                decoded.extend((id(s), s.num_cached_tokens) for s in plan.sequences)
            assert all(chunk.end <= s.num_prompt_tokens for s, chunk in plan.running())
            return launch(plan)

        llm.runner.launch = watched  # type: ignore[method-assign]
        same(llm.generate(PROMPTS, params), expected)
        assert len(decoded) > len(set(decoded)), "nothing was computed again"
        assert paged(llm).blocks.num_used == 0


def test_two_streams_read_in_turns_lose_nothing(model: Path, backend: str, alone: LLM) -> None:
    with load(model, 2, backend) as llm:
        first, second = llm.stream("the cat", GREEDY), llm.stream("a dog", GREEDY)
        first.start()
        second.start()
        pieces: tuple[list[str], list[str]] = ([], [])
        running = [True, True]
        while any(running):
            for i, stream in enumerate((first, second)):
                piece = next(stream, None)
                running[i] = piece is not None
                pieces[i].append(piece or "")
        texts = ["".join(p) for p in pieces]
        assert texts == [c.text for c in alone.generate(["the cat", "a dog"], GREEDY)]


def test_logits_that_are_not_finite_fail_their_text_alone_and_are_not_shared(
    model: Path, backend: str, expected: list[Completion], params: SamplingParams
) -> None:
    with load(model, 4, backend) as llm:
        streams = [llm.stream(prompt, params) for prompt in PROMPTS[:4]]
        for stream in streams:
            stream.start()
        bad = streams[1].sequence
        sample = bad.sampler.sample

        def poisoned(logits: Tensor, history: list[int], position: int) -> Sample:
            if position == 78:
                logits[17] = float("nan")
            return sample(logits, history, position)

        bad.sampler.sample = poisoned  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineError, match=r"token 78: .* logits are not finite"):
            streams[1].finish()
        same([streams[i].finish() for i in (0, 2, 3)], [expected[i] for i in (0, 2, 3)])
        assert len(bad.generated) == 5 and paged(llm).blocks.num_used == 0
        assert paged(llm).blocks.allocate(bad.token_ids[:96], 96) is not None


def test_logits_are_not_computed_over_running_texts(model: Path, backend: str, alone: LLM) -> None:
    with load(model, 2, backend) as llm:
        stream = llm.stream(SHARED, GREEDY)
        next(stream)
        with pytest.raises(EngineError, match="finish or close the streams"):
            llm.logits(SHARED)
        stream.close()
        assert llm.logits(SHARED).allclose(alone.logits(SHARED))
        assert llm.generate(SHARED, GREEDY)[0].timings.cached_tokens == 0


def test_what_the_cache_holds_is_told(model: Path, backend: str) -> None:
    with load(model, 3, backend, ctx_size=100) as llm:
        assert llm.loaded.cache.pools[0].num_blocks == 3 * 4
        assert "for 384 tokens of up to 3 sequences at once" in llm.loaded.notes[-1]
    with pytest.raises(EngineError, match="parallel 0: must be at least 1"):
        load(model, 0, backend)
