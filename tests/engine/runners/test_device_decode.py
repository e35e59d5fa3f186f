"""Slots and lookahead of decode steps on a device that computes on the host: every token as if alone, a step ahead."""

import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.runners.cuda_graphs import LaunchedStep
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.graph_keys import DECODE_ROWS, GREEDY, SamplingKind, padded_rows
from quengine.runners.static_inputs import DecodeInputs, step_rows
from quengine.sampler import NO_CHOICE, Result, Sample
from quengine.slot import Slot
from quengine.step_plan import TOKENS_ALONE, GivenRows, SequenceRows, StepPlan

CTX = 200
VOCAB = 997
DAMAGED = VOCAB
"""Behind this token there are no finite logits; it follows no other."""

FREE = SamplingParams(temperature=0)
ON_HOST = SamplingParams(temperature=0, logprobs=1)
PENALIZED = SamplingParams(temperature=0, presence_penalty=0.5)


def next_token(inputs: list[int]) -> int:
    """What follows these tokens: depends on each and on its place, as attention does."""
    if inputs[-1] == DAMAGED:
        return NO_TOKEN
    return sum(token * (place + 3) for place, token in enumerate(inputs)) * 7919 % VOCAB


class FakeSampler:
    """Samples on the host; notes what was sampled at."""

    def __init__(self) -> None:
        self.positions: list[int] = []

    def sample(self, logits: torch.Tensor, _history: list[int], position: int) -> Sample:
        self.positions.append(position)
        if logits[0] < 0:
            raise EngineError("not finite")
        return Sample(int(logits[0]))


@dataclass(eq=False)
class FakeSequence:
    token_ids: list[int]
    params: SamplingParams = FREE
    draft: list[int] = field(default_factory=list)
    sampler: FakeSampler = field(default_factory=FakeSampler)
    slot: Slot = field(default_factory=Slot)
    block_tables: tuple[list[int], ...] = field(default_factory=lambda: ([],))
    num_cached_tokens: int = 0
    replay: int = 0
    max_positions: int = CTX
    images: None = None
    adapters: None = None

    @property
    def next_is_newest(self) -> bool:
        return self.num_cached_tokens + 1 == len(self.token_ids)

    sampled_after = Sequence.sampled_after


class FakeEvent:
    """An event that notes when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self.log.append(self.name)


def fake_step(log: list[str], number: int, tokens: list[int], on_host: Seq[int]) -> LaunchedStep:
    logits = {row: torch.tensor([float(tokens[row])]) for row in on_host}
    return torch.tensor(tokens), FakeEvent(log, f"wait {number}"), logits  # type: ignore[return-value]


@dataclass
class FakeSlot:
    """What a device has of a slot."""

    token: int = 0
    position: int = 0
    table: dict[int, int] = field(default_factory=dict)
    history: dict[int, int] = field(default_factory=dict)
    counted: int | None = None
    """How many tokens its penalties count."""
    kind: SamplingKind | None = None
    """What it has settings for."""


class FakeDevice:
    """Slots over a pool of blocks that holds tokens where a cache holds their keys and values; graphs and inputs.

    Each place is written once in the life of a block, and by one row: states that a step changes allow no more.
    """

    rows = DECODE_ROWS[-1]
    slots = 40
    shares_sequences = False
    blocks = CTX // BLOCK_SIZE + 1
    groups = 1

    def __init__(self) -> None:
        self.inputs = self
        self.drafted: list[FakeSlot] | None = None
        self.of_slots = self.history = [FakeSlot() for _ in range(self.slots + 1)]
        self.step: list[tuple[int, ...]] = []
        self.states: dict[int, int] = {}
        """Of each sequence, by its first block, how many tokens its state stands for."""
        self.pool: dict[tuple[int, int], int] = {}
        self.log: list[str] = []
        self.sent: list[str] = []
        self.sizes: list[int] = []
        self.counts: list[int] = []
        self.kinds: list[SamplingKind | None] = []
        self.prompt_kinds: list[SamplingKind] = []

    def set_adapters(self, _slot: int, scales: object) -> None:
        assert scales is None

    def set_lag(self, _slot: int, lag: int) -> None:
        """No images are in these prompts."""
        assert lag == 0

    def extend(self, slot: int, group: int, first: int, blocks: list[int]) -> None:
        assert group == 0 and first + len(blocks) <= self.blocks
        held = self.of_slots[slot]
        if not first:  # else those of the sequence before
            held.counted = held.kind = None
        held.table.update(enumerate(blocks, first))
        self.sent.append("blocks")

    def configure(
        self,
        slot: int,
        kind: SamplingKind,
        params: SamplingParams,
        _sampler: Any,
        ids: list[int],
        in_flight: int = 0,
    ) -> None:
        assert not params.penalizes or kind.penalties
        held = self.of_slots[slot]
        held.counted, held.kind = None, kind
        if params.penalizes:
            held.history.update(enumerate(ids))
            held.counted = len(ids) + in_flight
        self.sent.append("settings")

    def prefill(
        self,
        rows: list[SequenceRows],
        slots: list[int],
        kind: SamplingKind,
        on_host: Seq[int] = (),
        given: GivenRows = TOKENS_ALONE,
        configure: Callable[[], None] = lambda: None,
    ) -> LaunchedStep:
        """Chunks of prompts, and the tokens after those whose slots take one; what others get nobody is to read."""
        assert given is TOKENS_ALONE
        configure()
        self.prompt_kinds.append(kind)
        tokens = []
        for part, slot in zip(rows, slots, strict=True):
            table = part.block_tables[0]
            for position, token in enumerate(part.ids, part.start):
                self.pool[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = token
            self.states[table[0]] = part.end
            held = FakeSlot(table=dict(enumerate(table))) if slot == self.slots else self.of_slots[slot]
            tokens.append(self._sample(held, slot, part.end - 1))
        self.log.append("prompts")
        return fake_step(self.log, 0, tokens, on_host)

    def launch(
        self,
        slots: list[Slot],
        given: dict[int, SequenceRows],
        kind: SamplingKind,
        on_host: Seq[int] = (),
    ) -> LaunchedStep:
        rows = step_rows(slots, given, self.slots)
        going_on = [slot.index for number, slot in enumerate(slots) if number not in given]
        assert all(self.of_slots[index].kind == kind for index in going_on)
        if rows != self.step:
            self.sent.append("rows")
        self.step = rows
        self.sizes.append(padded_rows(len(rows)))
        self.counts.append(len(rows))
        self.kinds.append(kind)
        placed = []
        for slot, target, token, position in rows:
            if token < -1:
                assert self.drafted is not None
                token = max(0, self.drafted[-2 - token].history[position])
                self.step = []  # is sent again
            held = self.of_slots[slot]
            at = position if token >= 0 else held.position
            placed.append((held, target, at))
            self._write(held, token if token >= 0 else max(held.token, 0), at)
        tokens = [self._sample(*each) for each in placed]
        self.log.append(f"launch {len(self.sizes)}")
        return fake_step(self.log, len(self.sizes), tokens, on_host)

    def _write(self, held: FakeSlot, token: int, at: int) -> None:
        self.pool[held.table[at // BLOCK_SIZE], at % BLOCK_SIZE] = token
        if not self.shares_sequences:
            assert self.states[held.table[0]] == at, "each token once"
            self.states[held.table[0]] += 1

    def _sample(self, held: FakeSlot, target: int, at: int) -> int:
        places = [(held.table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in range(at + 1)]
        inputs = [self.pool[place] for place in places]
        if held.counted is not None and at + 1 == held.counted:
            counted = [max(held.history[p], 0) for p in range(at + 1)]
            assert counted == inputs, "the penalties' window"
        token = next_token(inputs)
        taken = self.of_slots[target]
        taken.token, taken.position = token, at + 1
        taken.history[at + 1] = token
        if taken.counted is not None:
            assert taken.counted == at + 1
            taken.counted += 1
        return token


class Engine:
    """What is around the decoder: slots, blocks, prompts, steps in flight, and the sequences' own bookkeeping."""

    def __init__(self, blocks: int = 64) -> None:
        self.device = FakeDevice()
        self.free = list(range(blocks))
        self.free_slots = list(range(FakeDevice.slots))
        self.in_flight = deque[StepPlan]()
        self.decoder = DeviceDecoder(self.device)  # type: ignore[arg-type]

    def start(self, ids: list[int], params: SamplingParams = FREE, **fields: Any) -> FakeSequence:
        """A sequence whose prompt, but for the last token, was computed in a chunk."""
        sequence = FakeSequence(list(ids), params, **fields)
        self.prefill(sequence, len(ids) - 1)
        return sequence

    def prefill(self, sequence: FakeSequence, count: int) -> None:
        sequence.slot = Slot(self.free_slots.pop(0))
        self.grow(sequence, count + 1)
        for position, token in enumerate(sequence.token_ids[:count]):
            place = sequence.block_tables[0][position // BLOCK_SIZE], position % BLOCK_SIZE
            self.device.pool[place] = token
        sequence.num_cached_tokens = self.device.states[sequence.block_tables[0][0]] = count

    def prompts(self, sequences: list[FakeSequence], rest: int = 0) -> None:
        """Launches a step of all of these prompts, but for their last `rest` tokens."""
        chunks = []
        for sequence in sequences:
            if sequence.slot.index < 0:
                sequence.slot = Slot(self.free_slots.pop(0))
            self.grow(sequence, len(sequence.token_ids) + 1)
            start, end = sequence.num_cached_tokens, len(sequence.token_ids) - rest
            chunks.append(SequenceRows(sequence.token_ids[start:end], start, sequence.block_tables))
            sequence.num_cached_tokens = end  # as of steps in flight
        plan = StepPlan.prefill(list(sequences), chunks)  # type: ignore[arg-type]
        self.decoder.launch_prompts(plan)
        self.in_flight.append(plan)

    def grow(self, sequence: FakeSequence, positions: int) -> None:
        while len(sequence.block_tables[0]) * BLOCK_SIZE < positions:
            sequence.block_tables[0].append(self.free.pop(0))

    def drop(self, sequence: FakeSequence) -> None:
        """Its blocks and its slot are the next to be given away."""
        self.free = sequence.block_tables[0] + self.free
        self.free_slots.insert(0, sequence.slot.index)
        sequence.block_tables, sequence.slot = ([],), Slot()
        sequence.num_cached_tokens = 0

    def launch(self, sequences: list[FakeSequence]) -> None:
        """The next step of those whose input is known, or will be on the device. As by the scheduler, the device is
        told of those that may lack something."""
        ready, changed, ahead = list[FakeSequence](), list[int](), bool(self.in_flight)
        for each in sequences:
            launched = each.slot.launched
            if ahead and launched and each.num_cached_tokens + launched < each.slot.reach:
                ready.append(each)
                continue
            sampled = each.num_cached_tokens < len(each.token_ids) or each.slot.has_token
            reaches = each.num_cached_tokens + launched + 1 < each.max_positions
            if sampled and (not launched or (not each.slot.waits and reaches)):
                self.grow(each, each.num_cached_tokens + launched + 1)
                if ahead and not each.slot.waits:
                    each.slot.reach = min(len(each.block_tables[0]) * BLOCK_SIZE, each.max_positions - 1)
                changed.append(len(ready))
                ready.append(each)
        if ready:
            plan = StepPlan.decode(ready, changed if ahead else None)  # type: ignore[arg-type]
            assert self.decoder.launch(plan)
            self.in_flight.append(plan)

    def step(self, sequences: list[FakeSequence]) -> dict[FakeSequence, Result]:
        """Two steps are in flight, and the results of the first are taken."""
        while len(self.in_flight) < 2:
            before = len(self.in_flight)
            self.launch(sequences)
            if len(self.in_flight) == before:
                break
        if not self.in_flight:
            return {}
        plan = self.in_flight.popleft()
        taken = dict[FakeSequence, Result]()
        for each, slot, result in zip(plan.sequences, plan.slots, plan.results(), strict=True):
            if each.slot is not slot:
                continue
            sequence: FakeSequence = each  # type: ignore[assignment]
            if plan.phase == "decode":
                slot.launched -= 1
                slot.waits = False
                sequence.num_cached_tokens += 1
            taken[sequence] = result
            if isinstance(result, Sample):
                sequence.token_ids.append(result.token)
        return taken


def as_alone(ids: list[int], count: int) -> list[int]:
    """The prompt and the `count` tokens behind it."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens


def test_a_captured_size_holds_its_rows() -> None:
    assert [padded_rows(n) for n in (1, 2, 3, 8, 9, 17, 64, 65, 128)] == [1, 2, 4, 8, 16, 24, 64, 96, 128]


def test_the_next_step_is_launched_before_the_tokens_are_read() -> None:
    engine = Engine()
    pair = [engine.start([1, 2]), engine.start([5, 6, 7])]
    for _ in range(3):
        engine.step(pair)
    launches = [entry for entry in engine.device.log if entry.startswith("launch")]
    assert launches == ["launch 1", "launch 2", "launch 3", "launch 4"]
    assert engine.device.log.index("launch 3") < engine.device.log.index("wait 2")
    assert [s.token_ids for s in pair] == [as_alone([1, 2], 3), as_alone([5, 6, 7], 3)]


def test_a_prompts_first_token_is_the_input_of_a_step_before_it_is_read() -> None:
    """Its settings are sent once, and those of sequences under way stay."""
    engine = Engine()
    sampled = SamplingParams(seed=1)
    old, new = engine.start([1, 2], sampled), FakeSequence([3, 4, 5])
    engine.step([old])
    engine.step([])
    engine.device.sent.clear()
    engine.device.log.clear()
    engine.prompts([new])
    engine.launch([old, new])
    assert engine.device.log == ["prompts", "launch 3"] and engine.device.counts[-1] == 2
    for _ in range(3):
        engine.step([old, new])
    assert engine.device.sent == ["blocks", "settings", "rows"]
    assert new.token_ids == as_alone([3, 4, 5], 3) and old.token_ids == as_alone([1, 2], 4)
    assert engine.device.prompt_kinds == [SamplingKind.of(sampled)] and engine.device.kinds[-1] != GREEDY


def test_first_tokens_of_several_prompts_are_sampled_where_they_can_be() -> None:
    """On the device with penalties too, on the host with log-probabilities, and not after a part of a prompt."""
    engine = Engine()
    prompts = [[1, 2], list(range(40, 80)), [3, 4, 5], [6, DAMAGED]]
    settings = [PENALIZED, FREE, ON_HOST, FREE]
    free, part, logged, bad = many = [
        FakeSequence(list(ids), params) for ids, params in zip(prompts, settings, strict=True)
    ]
    engine.prompts([part], rest=10)
    engine.step([])
    assert part.token_ids == prompts[1] and not part.slot.has_token
    engine.prompts(many)
    assert [each.slot.has_token for each in many] == [True, True, False, True]
    engine.launch([free, part, logged])
    assert engine.device.counts == [2], "the host samples for one of them first"
    assert engine.step([])[bad] is NO_CHOICE and logged.sampler.positions == [3]
    for _ in range(4):
        engine.step([free, part, logged])
    assert free.sampler.positions == [] and engine.device.of_slots[free.slot.index].counted == 2 + 6
    for sequence, ids in zip(many[:3], prompts, strict=False):
        assert sequence.token_ids == as_alone(ids, len(sequence.token_ids) - len(ids))
        assert len(sequence.token_ids) > len(ids) + 2


def test_a_prompt_that_is_cancelled_with_its_step_in_flight_leaves_the_others_alone() -> None:
    engine = Engine()
    gone, stays = FakeSequence([1, 2, 3], ON_HOST), FakeSequence([4, 5])
    engine.prompts([gone, stays])
    engine.launch([stays])
    engine.drop(gone)
    taken = engine.step([stays])
    assert set(taken) == {stays} and gone.sampler.positions == []
    for _ in range(3):
        engine.step([stays])
    assert stays.token_ids == as_alone([4, 5], 4)


def test_nothing_is_sent_in_a_step_that_changes_nothing() -> None:
    engine = Engine()
    pair = [engine.start([1, 2]), engine.start([5, 6, 7])]
    engine.step(pair)
    assert engine.device.sent == ["blocks", "blocks", "settings", "settings", "rows", "rows"]
    for _ in range(20):
        engine.step(pair)
    assert len(engine.device.sent) == 6


def test_no_step_is_launched_after_the_last_token() -> None:
    engine = Engine()
    sequence = engine.start([1, 2], max_positions=4)
    engine.step([sequence])
    engine.step([sequence])
    assert len(engine.device.sizes) == 2


def test_one_that_joins_and_one_that_leaves_cost_the_others_nothing() -> None:
    engine = Engine()
    first, second, third = engine.start([1, 2]), engine.start([3, 4]), engine.start([5, 6])
    engine.step([first, second])
    engine.step([first, second])
    engine.drop(first)
    for _ in range(3):
        engine.step([second, third])
    assert second.token_ids == as_alone([3, 4], 5)
    assert third.token_ids == as_alone([5, 6], 2), "it joins behind the step in flight"
    assert len(engine.device.sizes) == 6, "no step was computed for nothing"


def test_a_slot_is_given_away_while_a_step_of_its_last_sequence_is_in_flight() -> None:
    engine = Engine()
    old = engine.start([1, 2])
    engine.step([old])
    index = old.slot.index
    engine.drop(old)
    new = engine.start([3, 4])
    assert new.slot.index == index
    for _ in range(4):
        engine.step([new])
    assert new.token_ids == as_alone([3, 4], 3)


def test_penalties_count_what_is_in_flight_when_another_kind_of_sampling_joins() -> None:
    engine = Engine()
    old = engine.start([1, 2], PENALIZED)
    engine.step([old])
    new = engine.start([3, 4], SamplingParams(top_k=0, seed=1))
    for _ in range(9):
        engine.step([old, new])
    held = engine.device.of_slots[old.slot.index]
    assert held.counted == len(old.token_ids) + 1
    assert [held.history[n] for n in range(len(old.token_ids))] == old.token_ids == as_alone([1, 2], 10)


def test_a_prompt_of_another_kind_of_sampling_gives_settings_of_it_to_those_that_go_on() -> None:
    engine = Engine()
    old, new = engine.start([1, 2]), FakeSequence([3, 4, 5], PENALIZED)
    for _ in range(3):
        engine.step([old])
    engine.prompts([new])
    for _ in range(6):
        engine.step([old, new])
    assert old.token_ids == as_alone([1, 2], len(old.token_ids) - 2) and len(old.token_ids) > 6
    kinds = {engine.device.of_slots[each.slot.index].kind for each in (old, new)}
    assert kinds == {SamplingKind.of(PENALIZED)}


def test_a_row_without_finite_logits_fails_alone() -> None:
    engine = Engine()
    good, bad = engine.start([1, 2]), engine.start([4, DAMAGED])
    results = engine.step([good, bad])
    assert isinstance(results[good], Sample) and results[bad] is NO_CHOICE
    engine.drop(bad)
    engine.step([good])
    assert good.token_ids == as_alone([1, 2], 2)


def test_a_row_that_the_host_samples_waits_for_it_and_no_other_does() -> None:
    engine = Engine()
    free, logged = engine.start([1, 2]), engine.start([3, 4], ON_HOST)
    for _ in range(6):
        engine.step([free, logged])
    assert engine.device.counts == [2, 1, 2, 1, 2, 1, 2]
    assert logged.sampler.positions == [2, 3, 4] and free.sampler.positions == []
    assert engine.device.log.index("launch 2") < engine.device.log.index("wait 1")
    assert [free.token_ids, logged.token_ids] == [as_alone([1, 2], 6), as_alone([3, 4], 3)]


def test_rows_of_the_host_alone_are_not_launched_ahead() -> None:
    engine = Engine()
    logged = engine.start([3, 4], ON_HOST)
    for _ in range(5):
        engine.step([logged])
    assert len(engine.device.sizes) == 5 and logged.token_ids == as_alone([3, 4], 5)


def test_what_was_generated_is_computed_again_without_sampling() -> None:
    engine = Engine()
    ids = as_alone([1, 2], 6)
    again, other = engine.start(ids), engine.start([3, 4])
    first_block = again.block_tables[0][0]
    again.num_cached_tokens = engine.device.states[first_block] = 2
    engine.device.pool = {
        place: token for place, token in engine.device.pool.items() if place[0] != first_block
    }
    for position in range(2):
        engine.device.pool[first_block, position] = ids[position]
    results = []
    while len(again.token_ids) < len(ids) + 2:
        results += [r for s, r in engine.step([again, other]).items() if s is again]
    assert results[:5] == [None] * 5
    assert again.token_ids == as_alone([1, 2], 8)
    assert other.token_ids == as_alone([3, 4], len(other.token_ids) - 2)


def test_the_room_for_any_top_k_covers_all_others() -> None:
    small, large, any_at_all = (SamplingKind.of(SamplingParams(top_k=k)) for k in (40, 100, 0))
    assert small and large and any_at_all
    assert small.union(large) == large == large.union(small) != small
    assert any_at_all.union(large) == any_at_all == large.union(any_at_all)


def test_settings_are_kept_for_the_most_demanding_until_it_has_gone() -> None:
    engine = Engine()
    greedy, sampled = engine.start([1, 2]), engine.start([3, 4], SamplingParams(seed=1))
    engine.step([greedy])
    for _ in range(2):
        engine.step([greedy, sampled])
    engine.drop(sampled)
    engine.step([greedy])
    assert engine.device.kinds[-1] == SamplingKind(64, bias=False, penalties=False)
    engine.drop(greedy)
    other = engine.start([5])
    for _ in range(2):
        engine.step([other])
    assert engine.device.kinds[-1] == GREEDY


def test_a_step_has_no_more_rows_than_the_smallest_captured_size_and_slots_stay() -> None:
    engine = Engine(blocks=200)
    many = [engine.start([n, n + 1]) for n in range(20, 31)]
    for _ in range(3):
        engine.step(many)
    assert engine.device.sizes[-1] == 16
    few = [many[10], many[1], many[9]]
    slots = [sequence.slot.index for sequence in few]
    for sequence in set(many) - set(few):
        engine.drop(sequence)
    engine.device.sent.clear()
    for _ in range(4):
        engine.step(few)
    assert engine.device.sizes[-1] == 4 and slots == [10, 1, 9]
    assert engine.device.sent == ["rows"], "which of the slots, and nothing else"
    for sequence in few:
        assert sequence.token_ids == as_alone(sequence.token_ids[:2], 7)


@pytest.mark.parametrize("seed", range(16))
def test_any_coming_and_going_leaves_every_sequence_its_own_text(seed: int) -> None:
    """Sequences start, end, lose their blocks to others at once and are computed again; some wait for a turn."""
    chance = random.Random(seed)
    engine = Engine(150)
    running: list[FakeSequence] = []
    prompts: dict[FakeSequence, list[int]] = {}

    def start() -> None:
        ids = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 70))]
        ids += [DAMAGED] * (chance.random() < 0.05)
        params = chance.choice([FREE, FREE, FREE, ON_HOST, PENALIZED])
        most = min(CTX, len(ids) + chance.randrange(1, 90))
        if chance.random() < 0.5:
            running.append(FakeSequence(list(ids), params, max_positions=most))
            engine.prompts([running[-1]])
        else:
            running.append(engine.start(ids, params, max_positions=most))
        prompts[running[-1]] = ids

    actions: list[Callable[[], None]] = [
        start,
        lambda: engine.drop(running.pop(chance.randrange(len(running)))),
        lambda: lose_blocks(engine, chance.choice(running)),
    ]
    for _ in range(3):
        start()
    taken = 0
    for _ in range(150):
        if running and len(running) < 12 and chance.random() < 0.25:
            chance.choices(actions, [3, 1, 1])[0]()
        if not running:
            start()
        batch = running if chance.random() < 0.9 else [s for s in running if chance.random() < 0.7]
        for sequence, result in engine.step(batch).items():
            taken += 1
            if isinstance(result, EngineError) or len(sequence.token_ids) >= sequence.max_positions:
                running.remove(sequence)
                engine.drop(sequence)
            ids = prompts[sequence]
            assert sequence.token_ids == as_alone(ids, len(sequence.token_ids) - len(ids))
    assert taken > 300


def lose_blocks(engine: Engine, sequence: FakeSequence) -> None:
    """Preemption; then what it had is computed again as a prompt, in other blocks and perhaps another slot."""
    engine.drop(sequence)
    engine.free.reverse()
    engine.prefill(sequence, len(sequence.token_ids) - 1)


def test_more_rows_than_are_captured_are_left_to_the_host_and_come_back() -> None:
    engine = Engine()
    pair = [engine.start([1, 2]), engine.start([5, 6, 7])]
    engine.step(pair)
    for _ in range(2):
        engine.step([])
    engine.decoder.most_rows = 1
    assert not engine.decoder.launch(StepPlan.decode(list(pair)))  # type: ignore[arg-type]
    for sequence in pair:  # as the host computes it
        sequence.slot.launched -= 1
        block = sequence.block_tables[0][0]
        engine.device.pool[block, sequence.num_cached_tokens] = sequence.token_ids[-1]
        sequence.num_cached_tokens += 1
        engine.device.states[block] += 1
        sequence.token_ids.append(next_token(sequence.token_ids))
    engine.decoder.most_rows = 2
    for _ in range(3):
        engine.step(pair)
    assert [s.token_ids for s in pair] == [as_alone([1, 2], 6), as_alone([5, 6, 7], 6)]


def test_the_inputs_send_what_changed_and_nothing_else() -> None:
    inputs = DecodeInputs(5, 6, 4, 2, torch.device("cpu"))
    tables = inputs.of_slots.tables
    assert inputs.rows == 8 and tables.shape == (2, 8, 4) and bool((tables == PADDING_BLOCK).all())
    assert inputs.step.slots.tolist() == inputs.step.targets.tolist() == [6] * 8, "padding"
    inputs.extend(2, 0, 0, [5, 6, 7])
    inputs.extend(2, 1, 0, [1])
    inputs.extend(2, 0, 2, [8])
    slots, given = [Slot(2), Slot(3)], {0: SequenceRows([7, 2**31 - 1], 69, ())}
    assert inputs.set_rows(slots, given) == 3
    inputs.send()
    assert tables[:, 2].tolist() == [[5, 6, 8, PADDING_BLOCK], [1, *[PADDING_BLOCK] * 3]]
    assert [part[:3].tolist() for part in inputs.step] == [
        [2, 2, 3],
        [6, 2, 3],
        [7, 2**31 - 1, -1],
        [69, 70, 0],
    ]
    before = inputs.all.clone()
    assert inputs.set_rows(slots, given) == 3 and not inputs.changes
    assert inputs.set_rows(slots[1:], {}) == 1 and len(inputs.changes) == 12
    inputs.send()
    assert inputs.set_rows(slots[1:], {}) == 1 and not inputs.changes
    assert [part[:3].tolist() for part in inputs.step] == [[3, 6, 6], [3, 6, 6], [-1, 0, 0], [0, 0, 0]]
    assert torch.equal(inputs.all[4 * inputs.rows :], before[4 * inputs.rows :])
