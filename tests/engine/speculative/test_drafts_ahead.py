"""Drafts that a device makes, verifies and accepts, a step ahead of the host: texts are those without drafts."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from quengine import LLM, SamplingParams
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.request.output import Completion
from quengine.request.sequence import Sequence
from quengine.structured.constraint_spec import ConstraintSpec
from tests.engine.speculative import test_speculation as longer
from tests.engine.speculative.draft_device import DraftDevice, drafts_on_device, schedule_anew
from tests.engine.speculative.test_draft_mtp import OTHERS, SIZES, certain_file
from tests.engine.speculative.test_speculation import all_free, counts, same
from tests.engine.test_steps_ahead import Device, load

MOST = 3
GREEDY, SEEDED, PENALIZED = (
    replace(params, max_tokens=28) for params in (longer.GREEDY, longer.SEEDED, longer.PENALIZED)
)
PROMPTS = [list(range(5, 45)), [3, 1, 4, 1, 5, 9] * 5, [7], [*range(5, 39), 200], [*range(60, 92)]]
Texts = Callable[[SamplingParams], list[Completion]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ahead")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_synthetic(folder / "hybrid.gguf", replace(PRESETS["qwen3.5-mtp-tiny"], **SIZES))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[Texts]:
    with load(model, 1, ctx_size=192) as llm:
        found = dict[str, list[Completion]]()

        def texts(params: SamplingParams) -> list[Completion]:
            if str(params) not in found:
                found[str(params)] = llm.generate(PROMPTS, params)
            return found[str(params)]

        yield texts


class Switching:
    """Takes the place of a `TimedLength`: plain steps and ones with drafts of all lengths, a few of each in turn."""

    def __init__(self, most: int, seed: int) -> None:
        self._random, self._most, self._left, self._length = random.Random(seed), most, 0, 0
        self.pays = True
        self.made = list[int]()

    @property
    def due(self) -> bool:
        return self._length > 0

    def skip(self) -> None:
        self._turn(0)

    def retry(self, _sequences: int) -> None: ...

    def note(self, _length: int, _seconds: float) -> None: ...

    def next(self, _rates: list[float], most: int) -> int:
        self._turn(length := min(self._length, most))
        return length

    def _turn(self, length: int) -> None:
        self.made.append(length)
        self._left -= 1
        if self._left <= 0:
            self._length = 0 if length else self._random.randint(1, self._most)
            self._left = self._random.choice([1, 2, 4, 9]) if length else self._random.randint(1, 4)


@contextmanager
def ahead(
    model: Path, parallel: int = 4, most: int = MOST, **options: object
) -> Iterator[tuple[LLM, Device, DraftDevice]]:
    with load(model, parallel, ctx_size=192, draft_mtp=most, **options) as llm:
        yield llm, *drafts_on_device(llm, most)
        assert all_free(llm)


def oracle_of(
    llm: LLM, texts: list[Completion], wrong: int = 4, prompts: list[list[int]] = PROMPTS
) -> Callable[[int, int], int | None]:
    """Drafts of the right tokens, but for every `wrong`-th position."""
    whole = [[*prompt, *text.tokens] for prompt, text in zip(prompts, texts, strict=True)]

    def token(slot: int, position: int) -> int | None:
        for sequence in llm.scheduler._running:
            if sequence.slot.index == slot:
                known = sequence.token_ids
                text = next((each for each in whole if each[: len(known)] == known), None)
                if text is not None and position < len(text):
                    return text[position] if (position + slot) % wrong else (text[position] + 1) % 250
        return None

    return token


def switches(llm: LLM, seed: int = 1) -> Switching:
    """Has all steps change between plain ones and ones with drafts."""
    assert llm.speculation is not None
    made = Switching(MOST, seed)
    llm.speculation._timed_length = lambda _sequences: made  # type: ignore[method-assign, assignment, return-value]
    return made


@pytest.mark.parametrize("parallel", [1, 4])
def test_texts_are_those_of_plain_steps_where_these_and_drafts_take_turns(
    model: Path, expected: Texts, parallel: int
) -> None:
    """In pauses shorter and longer than what the layer computes without the host."""
    for seed, params in enumerate((GREEDY, SEEDED)):
        with ahead(model, parallel, chunk_size=24, draft_on_device=True) as (llm, device, drafting):
            drafting.oracle, turns = oracle_of(llm, expected(params)), switches(llm, seed)
            same(llm.generate(PROMPTS, params), expected(params))
            assert drafting.drafted and turns.made.count(0) > 5 and len(set(turns.made)) > 2
            steps = [entry.split()[0] for entry in device.log if not entry.startswith(("read", "prompts"))]
            assert {"decode", "drafts"} == set(steps)
            assert not any(pool.spares for pool in llm.loaded.cache.pools), "states are not copied for drafts"


def test_what_the_host_samples_takes_plain_steps_where_the_device_alone_drafts(
    model: Path, expected: Texts
) -> None:
    """Alone, and beside others, which draft again once it has ended."""
    grammar = replace(SEEDED, constraint=ConstraintSpec.regex("((ab|cd){3}e){20}"))
    every = [GREEDY, PENALIZED, grammar, replace(GREEDY, logprobs=1), SEEDED]
    wanted = [expected(params)[number] for number, params in enumerate(every)]
    with ahead(model, 3, draft_on_device=True) as (llm, device, drafting):
        drafting.oracle, turns = oracle_of(llm, wanted), switches(llm)
        for number in (1, 2, 3):
            got = llm.generate(PROMPTS[number : number + 1], every[number])
            same(got, wanted[number : number + 1])
            assert not got[0].timings.drafts
        assert not drafting.drafted
        streams = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS, every, strict=True)]
        for stream in streams:
            stream.start()
        same([stream.finish() for stream in streams], wanted)
        device.log.clear()
        same(llm.generate(PROMPTS[:1], GREEDY), wanted[:1])
        assert drafting.drafted and turns.made


def test_preempted_sequences_and_shared_prefixes_go_on_where_steps_take_turns(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [list(range(10 * i, 10 * i + 29)) for i in range(4)], replace(GREEDY, max_tokens=24)
    second = [[*prompt, 7, 7] for prompt in prompts]
    with load(model, 1, ctx_size=192) as alone:
        wanted, later = alone.generate(prompts, params), alone.generate(second, params)
    with ahead(model, 4, draft_on_device=True, reuse_prefix=True) as (llm, _, drafting):
        paged, *states = llm.loaded.cache.pools
        llm.loaded.cache.pools = (replace(paged, num_blocks=5), *states)
        schedule_anew(llm)
        preempted, preempt = list[Sequence](), llm.scheduler._preempt
        monkeypatch.setattr(
            llm.scheduler, "_preempt", lambda each, **how: (preempted.append(each), preempt(each, **how))
        )
        drafting.oracle = oracle_of(llm, [*wanted, *later], 3, [*prompts, *second])
        switches(llm)
        same(llm.generate(prompts, params), wanted)
        same(llm.generate(second, params), later)
        assert preempted and drafting.drafted


@pytest.mark.parametrize(
    ("params", "parallel"),
    [(GREEDY, 3), (SEEDED, 1), (replace(GREEDY, logit_bias={9: 2.0}), 4)],
    ids=["greedy", "seeded", "biased"],
)
def test_texts_are_those_without_drafts(
    model: Path, expected: Texts, params: SamplingParams, parallel: int
) -> None:
    """With drafts that are right for some tokens, of a model that keeps states."""
    with ahead(model, parallel, chunk_size=24, reuse_prefix=True) as (llm, _, drafting):
        drafting.oracle = oracle_of(llm, expected(params))
        got = llm.generate(PROMPTS, params)
        same(got, expected(params))
        drafted, accepted = counts(got)
        assert drafted > accepted > 40


def test_texts_are_those_without_the_layers_own_drafts(folder: Path) -> None:
    """Nearly all of which are wrong, of a model without states."""
    small = replace(PRESETS["glm4moe-tiny"], **{"head_count_kv": 1, **OTHERS["glm4moe-tiny"]})  # type: ignore[arg-type]
    path = write_synthetic(folder / "attention.gguf", small)
    with load(path, 1, ctx_size=192) as alone:
        wanted = [alone.generate(PROMPTS, params) for params in (GREEDY, SEEDED)]
    for params, texts in zip((GREEDY, SEEDED), wanted, strict=True):
        with ahead(path, 3) as (llm, _, drafting):
            same(llm.generate(PROMPTS, params), texts)
            assert drafting.drafted


def test_a_step_is_launched_before_the_one_in_flight_is_read(model: Path, expected: Texts) -> None:
    with ahead(model, 1) as (llm, device, drafting):
        drafting.oracle = oracle_of(llm, expected(GREEDY))
        same(llm.generate(PROMPTS[:2], GREEDY), expected(GREEDY)[:2])
        launches = [n for n, entry in enumerate(device.log, 1) if entry.startswith("drafts")]
        before = [n for n, after in pairwise(launches) if f"read {n}" not in device.log[:after]]
        assert len(launches) > 12 and len(before) > 0.7 * len(launches)


def test_what_the_host_samples_is_as_without_drafts(model: Path, expected: Texts) -> None:
    """Alone, and beside sequences whose drafts the device makes."""
    grammar = replace(SEEDED, constraint=ConstraintSpec.regex("((ab|cd){3}e){20}"))
    every = [GREEDY, PENALIZED, grammar, replace(GREEDY, logprobs=1), SEEDED]
    wanted = [expected(params)[number] for number, params in enumerate(every)]
    with ahead(model, 3) as (llm, _, drafting):
        drafting.oracle = oracle_of(llm, wanted)
        for params, text in zip(every, wanted, strict=True):
            number = wanted.index(text)
            same(llm.generate(PROMPTS[number : number + 1], params), [text])
        streams = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS, every, strict=True)]
        for stream in streams:
            stream.start()
        same([stream.finish() for stream in streams], wanted)
        assert drafting.drafted


def test_the_device_drafts_again_once_the_host_has_no_part_in_a_step(model: Path, expected: Texts) -> None:
    """After steps of any number in which the host gave drafts."""
    with ahead(model, 2) as (llm, device, drafting):
        drafting.oracle = oracle_of(llm, expected(GREEDY))
        for count in range(2, 7):
            device.log.clear()
            stream = llm.stream(PROMPTS[0], GREEDY)
            beside = llm.stream(PROMPTS[2], replace(GREEDY, max_tokens=count, logprobs=1))
            stream.start()
            while len(stream.sequence.generated) < 5:
                llm.step()
            beside.start()
            assert beside.finish().tokens == expected(GREEDY)[2].tokens[:count]
            before = len(device.log)
            same([stream.finish()], [expected(GREEDY)[0]])
            assert any(entry.startswith("decode") for entry in device.log[:before])
            assert any(entry.startswith("drafts") for entry in device.log[before:])


def test_sequences_of_all_lengths_end_where_they_do_without_drafts(model: Path, expected: Texts) -> None:
    lengths = [1, 2, 23, 9, 28]
    with ahead(model, 5, 4) as (llm, _, drafting):
        drafting.oracle = oracle_of(llm, expected(GREEDY), 6)
        streams = [
            llm.stream(prompt, replace(GREEDY, max_tokens=length))
            for prompt, length in zip(PROMPTS, lengths, strict=True)
        ]
        for stream in streams:
            stream.start()
        found = [stream.finish().tokens for stream in streams]
        assert found == [text.tokens[:length] for text, length in zip(expected(GREEDY), lengths, strict=True)]


def test_preempted_sequences_go_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = [list(range(10 * i, 10 * i + 29)) for i in range(4)], replace(GREEDY, max_tokens=24)
    with load(model, 1, ctx_size=192) as alone:
        wanted = alone.generate(prompts, params)
    with ahead(model, 4) as (llm, _, drafting):
        paged, *states = llm.loaded.cache.pools
        llm.loaded.cache.pools = (replace(paged, num_blocks=5), *states)
        schedule_anew(llm)
        preempted, preempt = list[Sequence](), llm.scheduler._preempt
        monkeypatch.setattr(
            llm.scheduler, "_preempt", lambda each, **how: (preempted.append(each), preempt(each, **how))
        )
        drafting.oracle = oracle_of(llm, wanted, 2, prompts)
        same(llm.generate(prompts, params), wanted)
        assert preempted and drafting.drafted


def test_a_conversation_goes_on_and_drafts(model: Path) -> None:
    second = [5, 6, 7]
    with load(model, 1, ctx_size=192) as llm:
        first = llm.generate(PROMPTS[1], GREEDY)[0]
        wanted = llm.generate([*PROMPTS[1], *first.tokens, *second], GREEDY)
    with ahead(model, 2, reuse_prefix=True) as (llm, _, drafting):
        got = llm.generate(PROMPTS[1], GREEDY)[0]
        assert got.tokens == first.tokens
        answer = llm.generate([*PROMPTS[1], *first.tokens, *second], GREEDY)
        same(answer, wanted)
        assert answer[0].timings.cached_tokens >= 32 and drafting.drafted


def test_a_layer_that_is_right_is_accepted(folder: Path) -> None:
    """It reads the rows that the model has written of accepted tokens, and its own after them."""
    small = replace(PRESETS["qwen3.5-mtp-tiny"], **SIZES)  # type: ignore[arg-type]
    path = certain_file(write_synthetic(folder / "m.gguf", small), folder / "certain.gguf")
    for params in (GREEDY, SEEDED):
        with load(path, 1, ctx_size=192) as alone:
            texts = alone.generate(PROMPTS, params)
        for parallel in (1, 3):
            with ahead(path, parallel, 4) as (llm, _, _drafting):
                got = llm.generate(PROMPTS, params)
                same(got, texts)
                drafted, accepted = counts(got)
                assert accepted > 0.9 * drafted > 50
