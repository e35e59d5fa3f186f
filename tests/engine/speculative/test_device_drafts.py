"""Rows that several tokens of a sequence share, against a device that computes on the host: texts as if alone."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_graphs import LaunchedStep
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.device_rows import Drafted
from quengine.runners.graph_keys import DECODE_ROWS, GREEDY, SamplingKind
from quengine.runners.static_inputs import step_rows
from quengine.sampler import NO_CHOICE, Result, Sample, Sampler, Verified
from quengine.slot import Slot
from quengine.speculative.device_drafts import DeviceDraftSteps
from quengine.speculative.draft_model import DraftJob
from quengine.step_plan import SequenceRows, StepPlan
from tests.engine.runners.test_device_decode import (
    DAMAGED,
    VOCAB,
    FakeDevice,
    FakeSequence,
    as_alone,
    next_token,
)

FREE = SamplingParams(temperature=0, seed=0)
ON_HOST = SamplingParams(temperature=0, seed=0, logprobs=1)
PENALIZED = SamplingParams(temperature=0, seed=0, presence_penalty=0.5)
WIDTH = 7  # blocks of a context


class Device(FakeDevice):
    """Writes all rows before it reads any, as steps with several rows of a sequence do."""

    shares_sequences = True
    blocks = WIDTH

    def configure(
        self,
        slot: int,
        kind: SamplingKind,
        params: SamplingParams,
        sampler: Any,
        ids: list[int],
        in_flight: int = 0,
    ) -> None:
        assert not params.penalizes
        super().configure(slot, kind, params, sampler, ids, in_flight)

    def launch(
        self,
        slots: list[Slot],
        given: dict[int, SequenceRows],
        kind: SamplingKind,
        on_host: Seq[int] = (),
    ) -> LaunchedStep:
        written, rows = set(), step_rows(slots, given, self.slots)
        for slot, _, token, position in rows:
            held = self.of_slots[slot]
            at = held.position if token == -1 else position
            written.add((held.table[at // BLOCK_SIZE], at % BLOCK_SIZE))
        assert len(written) == len(rows), "two rows write one place"
        return super().launch(slots, given, kind, on_host)


class Engine:
    """What is around the decoder: blocks, prompts, drafts, and the sequences' own bookkeeping."""

    def __init__(self, blocks: int = 64) -> None:
        self.device = Device()
        self.free = list(range(blocks))
        self.started = 0
        self.decoder = DeviceDecoder(self.device)  # type: ignore[arg-type]

    def start(self, ids: list[int], params: SamplingParams = FREE) -> FakeSequence:
        sequence = FakeSequence(list(ids), params, slot=Slot(self.started % Device.slots))
        self.started += 1
        self.grow(sequence, len(ids))
        for position, token in enumerate(ids[:-1]):
            self.device.pool[sequence.block_tables[0][position // BLOCK_SIZE], position % BLOCK_SIZE] = token
        sequence.num_cached_tokens = len(ids) - 1
        return sequence

    def grow(self, sequence: FakeSequence, positions: int) -> None:
        while len(sequence.block_tables[0]) * BLOCK_SIZE < positions:
            sequence.block_tables[0].append(self.free.pop(0))

    def step(self, sequences: list[Any]) -> list[Result]:
        for sequence in sequences:
            self.grow(sequence, len(sequence.token_ids) + len(sequence.draft))
        plan = StepPlan.decode(list(sequences))
        assert self.decoder.launch(plan)
        results = plan.results()
        for sequence, result in zip(sequences, results, strict=True):
            sequence.slot.launched -= 1
            draft, sequence.draft = sequence.draft, []
            sequence.num_cached_tokens += 1
            if isinstance(result, Sample):
                sequence.token_ids.append(result.token)
            elif isinstance(result, Verified):
                sequence.token_ids.append(result.first.token)
                for number, token in enumerate(draft, 1):
                    later = result.later(number) if sequence.token_ids[-1] == token else None
                    if not isinstance(later, Sample):
                        break
                    sequence.num_cached_tokens += 1
                    sequence.token_ids.append(later.token)
        return results


@pytest.mark.parametrize("params", [FREE, ON_HOST, PENALIZED], ids=["device", "logprobs", "penalties"])
@pytest.mark.parametrize("seed", range(3))
def test_texts_are_as_if_alone_whatever_was_drafted_and_whoever_comes_and_goes(
    seed: int, params: SamplingParams
) -> None:
    engine, numbers = Engine(), random.Random(seed)
    live: list[FakeSequence] = []
    begun: dict[FakeSequence, int] = {}
    for _ in range(60):
        if len(live) < 5 and numbers.random() < 0.4:
            ids = [numbers.randrange(VOCAB) for _ in range(numbers.randrange(1, 60))]
            live.append(engine.start(ids, params if numbers.random() < 0.5 else FREE))
            begun[live[-1]] = len(ids)
        for sequence in live:
            right = as_alone(sequence.token_ids, 6)[len(sequence.token_ids) :]
            draft = right[: numbers.randrange(7)]
            sequence.draft = [t if numbers.random() < 0.8 else numbers.randrange(VOCAB) for t in draft]
        if live:
            engine.step(live)
        for sequence in list(live):
            assert sequence.token_ids == as_alone(
                sequence.token_ids[: begun[sequence]], len(sequence.token_ids) - begun[sequence]
            )
            if len(sequence.token_ids) > 150 or numbers.random() < 0.05:
                live.remove(sequence)
                engine.free = sequence.block_tables[0] + engine.free
    assert any(len(s.token_ids) > 70 for s in begun)
    assert any(s.sampler.positions for s in begun) == (params is not FREE)


def test_a_right_draft_is_taken_whole_in_one_step() -> None:
    engine = Engine()
    sequence = engine.start([1, 2])
    sequence.draft = as_alone([1, 2], 5)[2:]
    engine.step([sequence])
    assert sequence.token_ids == as_alone([1, 2], 6) and engine.device.sizes == [8]


def test_who_stays_keeps_its_row_and_settings() -> None:
    engine = Engine()
    pair = [engine.start([1, 2]), engine.start([3, 4])]
    pair[0].draft = [9, 9]
    engine.step(pair)
    engine.device.sent.clear()
    pair[0].draft = [8, 8]
    engine.step(pair)
    assert engine.device.sent == ["rows"]


def test_a_row_without_finite_logits_fails_its_sequence_where_it_is() -> None:
    engine = Engine()
    good, bad, drafted = engine.start([1, 2]), engine.start([4, DAMAGED]), engine.start([5, 6])
    bad.draft = [7]
    drafted.draft = [next_token([5, 6]), DAMAGED]
    results = engine.step([good, bad, drafted])
    assert isinstance(results[0], Sample) and results[1] is NO_CHOICE
    assert isinstance(results[2], Verified)
    assert drafted.token_ids == as_alone([5, 6], 2)


def test_what_was_generated_is_computed_again_without_sampling() -> None:
    engine = Engine()
    sequence = engine.start([1, 2, 3])
    sequence.num_cached_tokens = 1
    assert engine.step([sequence]) == [None]
    engine.step([sequence])
    assert sequence.token_ids == as_alone([1, 2, 3], 1)


def jobs_of(device: Device, texts: list[list[int]], missing: list[int], counts: list[int]) -> list[DraftJob]:
    jobs = []
    for number, (ids, behind, count) in enumerate(zip(texts, missing, counts, strict=True)):
        table = [10 * number + i for i in range(WIDTH + 2)]  # the other model's context is longer
        start = len(ids) - behind
        for position, token in enumerate(ids[:start]):
            device.pool[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = token
        sampler = Sampler(PENALIZED if number == 1 else FREE, VOCAB)
        jobs.append(DraftJob(ids[start:], start, table, count, list(ids), sampler))
    return jobs


def test_drafts_are_made_without_waiting_for_the_device() -> None:
    device = Device()
    steps = DeviceDraftSteps(device)  # type: ignore[arg-type]
    texts = [[1, 2, 3], [4, 5], list(range(60))]
    for _ in range(2):
        device.log.clear()
        drafts = steps.draft(jobs_of(device, texts, [1, 2, 3], [4, 1, 3]))
        assert drafts == [
            as_alone(ids, count)[len(ids) :] for ids, count in zip(texts, (4, 1, 3), strict=True)
        ]
        waits = [entry.startswith("wait") for entry in device.log]
        assert waits == sorted(waits) and waits.count(False) == 4
    assert device.sizes[:4] == [8, 2, 2, 1], "later steps have the rows of drafts that go on, and no others"
    assert set(device.kinds) == {GREEDY} and max(device.sizes) <= DECODE_ROWS[-1]


def test_drafts_on_the_device_are_rows_of_a_step_before_they_are_read() -> None:
    """Right ones and wrong ones, and one after which the model that drafts finds no token."""
    engine, other = Engine(), Device()
    other.log = engine.device.log
    steps = DeviceDraftSteps(other, engine.device)  # type: ignore[arg-type]
    texts = [[1, 2, 3], [4, 5], list(range(60))]
    begun = [len(ids) for ids in texts]
    sequences = [engine.start(ids) for ids in texts]
    for number in range(4):
        engine.device.log.clear()
        known = [list(each.token_ids) for each in sequences]
        if number == 1:
            known[0][0] = 9
        elif number == 2:
            known[0][-1] = DAMAGED
        jobs = jobs_of(other, known, [1, 2, 1], [4, 1, 3])
        for sequence, draft in zip(sequences, steps.draft(jobs), strict=True):
            assert isinstance(draft, Drafted) and set(draft.inputs) == {draft.inputs[0]}
            sequence.draft = draft  # type: ignore[assignment]
        results = engine.step(sequences)
        kinds = [entry.split()[0] for entry in engine.device.log]
        assert kinds[:5] == ["launch"] * 5, "of the drafts, and of the model"
        assert all(isinstance(result, Verified) for result in results)
        for sequence, ids, length in zip(sequences, texts, begun, strict=True):
            assert sequence.token_ids == as_alone(ids, len(sequence.token_ids) - length)
    assert len(sequences[1].token_ids) == 2 + 4 * 2 and len(sequences[2].token_ids) == 60 + 4 * 4
    assert len(sequences[0].token_ids) == 3 + 5 + 1 + 1 + 5


def test_a_draft_ends_where_there_is_no_token() -> None:
    device = Device()
    steps = DeviceDraftSteps(device)  # type: ignore[arg-type]
    assert steps.draft(jobs_of(device, [[1, DAMAGED], [4, 5]], [1, 1], [3, 2])) == [
        [],
        as_alone([4, 5], 2)[2:],
    ]
