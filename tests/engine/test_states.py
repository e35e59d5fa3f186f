"""Models whose states cannot go back: every token is computed once in each state, and none that a checkpoint holds."""

import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from quengine import LLM, EngineError, SamplingParams
from quengine.context.prefix_file import PrefixFiles
from quengine.context.saved_prefix import restore_prefix, save_prefix
from quengine.request.output import Completion
from quengine.request.sequence import Sequence
from quengine.scheduler import Scheduler
from quengine.speculative.speculation import Speculation
from tests.engine.states import states_that_count, write_small

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
FEW = replace(PARAMS, max_tokens=3)
PROMPTS = [
    [(7 * i + 3 * n) % 250 for i in range(length)] for n, length in enumerate((40, 1, 130, 97, 33, 64))
]


@pytest.fixture(scope="module", params=["lfm2-tiny", "qwen3.5-tiny", "nemotron-h-moe-tiny"])
def tiny(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The one is computed by the definition, which counts, the other by the CPU's kernels."""
    return write_small(tmp_path_factory.mktemp("states") / f"{request.param}.gguf", request.param)


@pytest.fixture(scope="module", autouse=True)
def counting() -> Iterator[None]:
    with states_that_count():
        yield


@contextmanager
def engine(tiny: Path, **options: object) -> Iterator[LLM]:
    backend = "reference" if "lfm2" in tiny.name else "auto"
    options = {"ctx_size": 256, "backend": backend, "reuse_prefix": True, **options}
    with LLM(tiny, "cpu", **options) as llm:  # type: ignore[arg-type]
        yield llm
        assert all(pool.num_free == pool.shape.num_blocks for pool in llm.scheduler.blocks._pools)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[Completion]:
    """Each prompt by itself, in an engine that reuses nothing."""
    with engine(tiny, reuse_prefix=False) as llm:
        return [llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [each.tokens for each in completions]


def computed_tokens(llm: LLM) -> list[int]:
    """What the rows of each step are, from now on: how many tokens of prompts, and negative those of decode steps."""
    counts, forward = list[int](), llm.runner.forward

    def counted(phase, rows, *args, **options):  # type: ignore[no-untyped-def]
        rows_in_all = sum(len(part.ids) for part in rows)
        counts.append(rows_in_all if phase == "prefill" else -rows_in_all)
        return forward(phase, rows, *args, **options)

    llm.runner.forward = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("chunk_size", [16, 512])
def test_batches_and_chunks(tiny: Path, alone: list[Completion], chunk_size: int) -> None:
    with engine(tiny, parallel=4, chunk_size=chunk_size) as llm:
        assert tokens(llm.generate(PROMPTS, PARAMS)) == tokens(alone)
        assert llm.scheduler.blocks.num_used == 0


def test_the_second_turn_computes_its_new_tokens(tiny: Path, alone: list[Completion]) -> None:
    with engine(tiny) as llm:
        counts = computed_tokens(llm)
        first = llm.generate(PROMPTS[2], PARAMS)[0]
        assert first.tokens == alone[2].tokens and counts[:2] == [130, -1]
        # 130 tokens and 39 of the answer have states: the copy is of the first 160.
        second = [*PROMPTS[2], *first.tokens, 5, 6, 7]
        counts.clear()
        answer = llm.generate(second, FEW)[0]
        assert answer.timings.cached_tokens == 160 and counts == [len(second) - 160, -1, -1]
        # Another answer in its place goes on from the end of the prompt.
        counts.clear()
        other = llm.generate([*PROMPTS[2], 9, 9, 9], FEW)[0]
        assert other.timings.cached_tokens == 128 and counts == [5, -1, -1]
        # One before which a template writes the prompt's last tokens otherwise, from the block in front of these.
        changed = llm.generate([*PROMPTS[2][:127], 9, 9, 9], FEW)[0]
        assert changed.timings.cached_tokens == 96
    with engine(tiny, reuse_prefix=False) as llm:
        assert answer.tokens == llm.generate(second, FEW)[0].tokens


def test_requests_that_part_compute_what_they_share_once(tiny: Path) -> None:
    shared = [(11 * i) % 250 for i in range(100)]
    prompts = [[*shared, *([n] * 40)] for n in range(1, 5)]
    with engine(tiny, reuse_prefix=False) as llm:
        expected = [llm.generate(prompt, FEW)[0].tokens for prompt in prompts]
    with engine(tiny, parallel=2) as llm:  # they wait for each other
        counts = computed_tokens(llm)
        found = llm.generate(prompts, FEW)
        assert tokens(found) == expected
        assert [each.timings.cached_tokens for each in found] == [0, 96, 96, 96]
        assert sum(count for count in counts if count > 0) == 96 + 4 * 44
    with engine(
        tiny
    ) as llm:  # they come one after the other: the second finds keys and values of what they share
        found = [llm.generate(prompt, FEW)[0] for prompt in prompts]
        assert tokens(found) == expected
        assert [each.timings.cached_tokens for each in found] == [0, 0, 96, 96]


@pytest.mark.parametrize(("chunk_size", "steps"), [(48, [32, 32, 32, 32, 32, 40]), (512, [128, 72])])
def test_a_long_prompt_has_checkpoints_on_the_way(
    tiny: Path, chunk_size: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quengine.state_checkpoints.CHECKPOINT_EVERY", 64)
    prompt = [(13 * i) % 250 for i in range(200)]
    with engine(tiny, chunk_size=chunk_size) as llm:
        counts = computed_tokens(llm)
        llm.generate(prompt, FEW)
        assert [count for count in counts if count > 0] == steps
        changed = [llm.generate([*prompt[:end], 251, 1], FEW)[0] for end in (70, 130)]
        assert [each.timings.cached_tokens for each in changed] == [64, 128]


def test_where_there_is_room_for_few_those_at_the_ends_of_prompts_stay(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quengine.state_checkpoints.CHECKPOINT_EVERY", 64)
    with engine(tiny, parallel=3, chunk_size=48, state_checkpoints=1) as llm:
        prompts = [[n, *((13 * i) % 250 for i in range(200))] for n in range(3)]
        for each in prompts:
            llm.generate(each, FEW)
        assert [llm.generate(each, FEW)[0].timings.cached_tokens for each in prompts[::-1]] == [192, 192, 0]


def test_checkpoints_are_as_many_as_requested(tiny: Path) -> None:
    with engine(tiny, state_checkpoints=3) as llm:
        prompts = [[n, *PROMPTS[2]] for n in range(5)]
        for prompt in prompts:
            llm.generate(prompt, FEW)
        assert [llm.generate(prompts[n], FEW)[0].timings.cached_tokens for n in (4, 0)] == [128, 0]
        assert llm.loaded.cache.pools[1].num_blocks == 1 + 3
        assert (
            "for states of" in llm.loaded.notes[0] and "1 of sequences, 3 checkpoints" in llm.loaded.notes[0]
        )
    with engine(tiny, state_checkpoints=0) as llm:
        assert [llm.generate(PROMPTS[2], FEW)[0].timings.cached_tokens for _ in range(2)] == [0, 0]


def test_a_saved_conversation_goes_on_in_another_engine(tiny: Path, tmp_path: Path) -> None:
    with engine(tiny) as llm:
        first = llm.generate(PROMPTS[2], PARAMS)[0]
        text = [*PROMPTS[2], *first.tokens]
        files = PrefixFiles(llm.loaded, "f16", False)
        files.write(tmp_path / "saved", save_prefix(llm.scheduler, llm.model_config, text[:-1]))
        expected = llm.generate([*text, 5], FEW)[0]
    data = bytearray((tmp_path / "saved").read_bytes())
    data[-3] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    with engine(tiny) as llm:
        files = PrefixFiles(llm.loaded, "f16", False)
        with pytest.raises(EngineError, match=r"^it is damaged: its contents do not have its digest"):
            files.read(tmp_path / "damaged")
        saved, _ = files.read(tmp_path / "saved")
        restore_prefix(llm.scheduler, llm.model_config, saved)
        found = llm.generate([*text, 5], FEW)[0]
    assert expected.timings.cached_tokens == found.timings.cached_tokens == saved.reusable_tokens == 160
    assert found.tokens == expected.tokens


def short_of_blocks(llm: LLM, blocks: int) -> list[Sequence]:
    """As if there were memory for so few blocks of keys and values; gives the sequences that are preempted."""
    paged, state = llm.loaded.cache.pools
    llm.loaded.cache.pools = (replace(paged, num_blocks=blocks), state)
    llm.scheduler = llm._make_scheduler()
    preempted, preempt = list[Sequence](), Scheduler._preempt

    def noted(sequence: Sequence, keeps: bool = True) -> None:
        preempted.append(sequence)
        preempt(llm.scheduler, sequence, keeps)

    llm.scheduler._preempt = noted  # type: ignore[method-assign]
    return preempted


def test_preempted_sequences_get_their_tokens(tiny: Path) -> None:
    prompts = [[(3 * i + n) % 250 for i in range(33)] for n in range(4)]
    params = replace(PARAMS, max_tokens=70)
    with engine(tiny, reuse_prefix=False) as llm:
        expected = [llm.generate(prompt, params)[0] for prompt in prompts]
    for deterministic in (False, True):
        with engine(tiny, parallel=4, deterministic=deterministic) as llm:
            preempted = short_of_blocks(llm, 7)
            assert tokens(llm.generate(prompts, params)) == tokens(expected), deterministic
            assert preempted


def test_a_preempted_prompt_goes_on_from_where_it_was(tiny: Path) -> None:
    with engine(tiny, parallel=2, chunk_size=32) as llm:
        counts = computed_tokens(llm)
        streams = [llm.stream(PROMPTS[2], FEW), llm.stream(PROMPTS[3], FEW)]
        for stream in streams:
            stream.start()
        llm.step()
        llm.step()
        (sequence,) = llm.scheduler.prefilling
        assert sequence.num_cached_tokens == 64
        llm.scheduler._preempt(sequence)
        for stream in streams:
            stream.finish()
        assert sum(count for count in counts if count > 0) == len(PROMPTS[2]) + len(PROMPTS[3])


def test_a_full_context_discards_tokens_and_computes_the_rest_again(tiny: Path) -> None:
    params = replace(PARAMS, max_tokens=60, context_shift=True)
    found = []
    for reuse in (False, True):
        with engine(tiny, ctx_size=96, reuse_prefix=reuse) as llm:
            found.append(llm.generate(PROMPTS[5], params)[0])
    assert found[0].timings.shifts and found[0].tokens == found[1].tokens


REPEATED = [1, 2, 3, 4] * 12


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Completion:
    """Of `REPEATED`, without drafts."""
    with engine(tiny, reuse_prefix=False) as llm:
        return llm.generate(REPEATED, PARAMS)[0]


@pytest.mark.parametrize("parallel", [1, 3])
def test_texts_with_look_up_are_those_without(
    tiny: Path, alone: list[Completion], plain: Completion, parallel: int
) -> None:
    with engine(tiny, parallel=parallel, draft_ngram=2, draft_tokens=7) as llm:
        found = llm.generate([*PROMPTS, REPEATED], PARAMS)
        again = llm.generate([*REPEATED, *found[-1].tokens, 5], FEW)[0]
    assert tokens(found) == [*tokens(alone), plain.tokens]
    drafts = [each.timings for each in found]
    assert sum(t.drafted_tokens for t in drafts) > sum(t.accepted_tokens for t in drafts)
    assert again.timings.cached_tokens >= 64


def test_a_draft_model_drafts_for_one_with_states(
    tiny: Path, alone: list[Completion], tmp_path: Path
) -> None:
    other = write_small(tmp_path / "other.gguf", "qwen3moe-tiny")
    with engine(tiny, parallel=2, draft_model=other, draft_tokens=3) as llm:
        found = llm.generate(PROMPTS, PARAMS)
    assert tokens(found) == tokens(alone)
    assert sum(each.timings.drafts for each in found) > 10


def test_prompts_are_pooled_and_scored_whatever_their_chunks(tiny: Path) -> None:
    found = []
    for chunk_size in (16, 512):
        with engine(tiny, parallel=2, chunk_size=chunk_size) as llm:
            vectors = llm.embed(PROMPTS[2:5])
            scored = llm.generate(PROMPTS[3], replace(FEW, logprobs=2))[0]
            found.append((vectors, scored.tokens, llm.generate(PROMPTS[3], FEW)[0].timings.cached_tokens))
    (small, tokens_small, cached), (large, tokens_large, _) = found
    assert tokens_small == tokens_large and cached == 96
    for one, other in zip(small, large, strict=True):
        assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-3  # keys and values are fp16


class HalfRight:
    """Drafts the text as it will be, at random with one wrong token; takes the place of a draft model."""

    bytes_per_token = 0

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.random = random.Random(5)

    def follow_all(self, ends: Mapping[Sequence, int]) -> None:
        del ends

    def most_on_device(self, _sequences: int) -> int:
        return 0

    def goes_on(self, _sequence: Sequence) -> bool:
        return False

    def room(self, sequence: Sequence) -> int:
        return 256 - len(sequence.token_ids)

    def draft(self, asked: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        drafts = {}
        for sequence, count in asked.items():
            done = len(sequence.token_ids)
            text = next((each for each in self.texts if each[:done] == sequence.token_ids), [])
            draft = text[done : done + count]
            if draft and self.random.random() < 0.6:
                draft[self.random.randrange(len(draft))] = 3
            drafts[sequence] = draft
        return drafts


@pytest.mark.parametrize("preempts", [False, True])
def test_drafts_of_a_model_are_taken_back_where_they_are_wrong(
    tiny: Path, alone: list[Completion], preempts: bool
) -> None:
    texts = [[*prompt, *each.tokens] for prompt, each in zip(PROMPTS, alone, strict=True)]
    with engine(tiny, parallel=3, draft_ngram=1) as llm:
        llm.speculation = Speculation(llm.scheduler, 0, HalfRight(texts), 6, 12)  # type: ignore[arg-type]
        streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
        for stream in streams:
            stream.start()
        for count in itertools.count():
            if preempts and count % 5 == 4 and llm.scheduler._running:
                llm.scheduler._preempt(llm.scheduler._running[-1])
            if not llm.step() and not llm.scheduler.sequences:
                break
        found = [stream.finish() for stream in streams]
        copies = llm.scheduler.blocks._kept_copies
        again = llm.generate([*texts[0][:-1], 9], FEW)[0]
    assert tokens(found) == tokens(alone) and not copies
    drafts = [each.timings for each in found]
    assert 0 < sum(t.accepted_tokens for t in drafts) < sum(t.drafted_tokens for t in drafts)
    assert again.timings.cached_tokens == 64, "40 tokens of the prompt and 24 of the answer"


def test_a_prompt_that_failed_has_no_checkpoint(tiny: Path, alone: list[Completion]) -> None:
    with engine(tiny) as llm:
        stream, forward = llm.stream(PROMPTS[2], PARAMS), llm.runner.forward
        stream.start()

        def fails(*args, **options):  # type: ignore[no-untyped-def]
            forward(*args, **options)
            raise MemoryError("in the middle of a prompt")

        llm.runner.forward = fails  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            llm.step()
        (states,) = llm.scheduler.blocks._states
        assert not states.by_key and states.num_free == states.shape.num_blocks
        llm.runner.forward = forward  # type: ignore[method-assign]
        llm.scheduler.retry_alone()
        assert stream.finish().tokens == alone[2].tokens and states.by_key


def test_a_step_that_failed_is_computed_from_the_beginning(tiny: Path, alone: list[Completion]) -> None:
    with engine(tiny, parallel=3) as llm:
        streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS[2:5]]
        for stream in streams:
            stream.start()
        while len(llm.scheduler.decoding) < 3:
            llm.step()
        forward = llm.runner.forward

        def fails(*args, **options):  # type: ignore[no-untyped-def]
            forward(*args, **options)
            raise MemoryError("in the middle of a step")

        llm.runner.forward = fails  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            llm.step()
        llm.runner.forward = forward  # type: ignore[method-assign]
        llm.scheduler.retry_alone()
        assert tokens([stream.finish() for stream in streams]) == tokens(alone[2:5])
