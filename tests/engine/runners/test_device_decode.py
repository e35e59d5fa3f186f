"""Slots and lookahead of decode steps on a device that computes on the host: every token as if alone, a step ahead."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK
from quengine.request.sampling_params import SamplingParams
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.graph_keys import DECODE_ROWS, GREEDY, GraphKey, SamplingKind, padded_rows
from quengine.runners.static_inputs import DecodeInputs
from quengine.sampler import NO_CHOICE, Result, Sample

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
    block_tables: tuple[list[int], ...] = field(default_factory=lambda: ([],))
    num_cached_tokens: int = 0
    replay: int = 0
    max_positions: int = CTX

    @property
    def next_is_newest(self) -> bool:
        return self.num_cached_tokens + 1 == len(self.token_ids)

    def sample_next(self, logits: torch.Tensor) -> Sample | Exception:
        try:
            return self.sampler.sample(logits, self.token_ids, len(self.token_ids))
        except EngineError as error:
            return error


@dataclass
class FakeStep:
    log: list[str]
    number: int
    tokens: list[int]

    def wait(self) -> list[int]:
        self.log.append(f"wait {self.number}")
        return self.tokens

    def logits(self, row: int) -> torch.Tensor:
        return torch.tensor([float(self.tokens[row])])


@dataclass
class FakeRow:
    live: bool = False
    token: int = 0
    position: int = 0
    table: dict[int, int] = field(default_factory=dict)


class FakeDevice:
    """Rows over a pool of blocks that holds tokens where a cache holds their keys and values; graphs and inputs."""

    slots = DECODE_ROWS[-1]
    shares_sequences = False
    blocks = CTX // BLOCK_SIZE + 1
    groups = 1

    def __init__(self, padding_block: int) -> None:
        self.inputs = self
        self.states: dict[int, int] | None = None
        """Of each sequence, by its first block, how many tokens its state stands for, where no step may come twice."""
        self.padding_block = padding_block
        self.rows = [FakeRow() for _ in range(DECODE_ROWS[-1])]
        for row in self.rows:
            row.table[0] = padding_block
        self.pool: dict[tuple[int, int], int] = {}
        self.log: list[str] = []
        self.sizes: list[int] = []
        self.kinds: list[SamplingKind | None] = []
        self.configured: set[tuple[int, SamplingKind]] = set()
        self.counted: dict[int, list[int]] = {}

    def release(self, row: int) -> None:
        self.rows[row] = FakeRow(table={0: self.padding_block})
        self.configured = {known for known in self.configured if known[0] != row}
        self.counted.pop(row, None)

    def assign(self, row: int, tables: list[list[int]], entries: int) -> None:
        (blocks,) = tables
        self.rows[row].live = True
        self.rows[row].table = dict(enumerate([*blocks, *[self.padding_block] * (entries - len(blocks))]))

    def extend(self, row: int, group: int, first: int, blocks: list[int]) -> None:
        assert group == 0
        self.rows[row].table.update(enumerate(blocks, first))

    def set_input(self, row: int, token: int, position: int) -> None:
        self.rows[row].token, self.rows[row].position = token, position

    def configure(
        self, row: int, kind: SamplingKind, params: SamplingParams, _sampler: Any, ids: list[int]
    ) -> None:
        assert not params.penalizes or kind.penalties
        self.configured.add((row, kind))
        if params.penalizes:
            self.counted[row] = list(ids)

    def launch(self, key: GraphKey) -> FakeStep:
        self.sizes.append(key.rows)
        self.kinds.append(key.sampling)
        tokens = []
        for number, row in enumerate(self.rows[: key.rows]):
            if number in self.counted:
                assert self.counted[number][row.position :] == [row.token], "the penalties' window"
            self.pool[row.table[row.position // BLOCK_SIZE], row.position % BLOCK_SIZE] = row.token
            places = [(row.table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in range(row.position + 1)]
            token = next_token([self.pool[place] for place in places])
            tokens.append(token)
            if row.live and self.states is not None:
                assert self.states[row.table[0]] == row.position, "each token once"
                self.states[row.table[0]] += 1
            if row.live:
                row.token, row.position = max(token, 0), row.position + 1
                if number in self.counted:
                    self.counted[number].append(row.token)
        self.log.append(f"launch {len(self.sizes)}")
        return FakeStep(self.log, len(self.sizes), tokens)


class Engine:
    """What is around the decoder: blocks, prompts, and the sequences' own bookkeeping."""

    def __init__(self, blocks: int = 64, repeats: bool = True) -> None:
        self.device = FakeDevice(padding_block=blocks)
        self.device.states = None if repeats else {}
        self.free = list(range(blocks))
        self.decoder = DeviceDecoder(self.device, repeats)  # type: ignore[arg-type]

    def start(self, ids: list[int], params: SamplingParams = FREE, **fields: Any) -> FakeSequence:
        """A sequence whose prompt, but for the last token, was computed in a chunk."""
        sequence = FakeSequence(list(ids), params, **fields)
        self.prefill(sequence, len(ids) - 1)
        return sequence

    def prefill(self, sequence: FakeSequence, count: int) -> None:
        self.grow(sequence, count)
        for position, token in enumerate(sequence.token_ids[:count]):
            place = sequence.block_tables[0][position // BLOCK_SIZE], position % BLOCK_SIZE
            self.device.pool[place] = token
        sequence.num_cached_tokens = count
        if self.device.states is not None:
            self.grow(sequence, count)
            self.device.states[sequence.block_tables[0][0]] = count

    def grow(self, sequence: FakeSequence, position: int) -> None:
        reach = min(position + 2, sequence.max_positions)
        while len(sequence.block_tables[0]) * BLOCK_SIZE < reach:
            sequence.block_tables[0].append(self.free.pop(0))

    def drop(self, sequence: FakeSequence) -> None:
        """Its blocks are the next to be given away."""
        self.free = sequence.block_tables[0] + self.free
        sequence.block_tables = ([],)
        sequence.num_cached_tokens = 0

    def step(self, sequences: list[Any]) -> list[Result]:
        for sequence in sequences:
            self.grow(sequence, sequence.num_cached_tokens)
        results = self.decoder.step(sequences)
        assert results is not None
        for sequence, result in zip(sequences, results, strict=True):
            sequence.num_cached_tokens += 1
            if isinstance(result, Sample):
                sequence.token_ids.append(result.token)
        return results


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


def test_nothing_is_sent_in_a_step_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    pair = [engine.start([1, 2]), engine.start([5, 6, 7])]
    engine.step(pair)
    for name in ("release", "assign", "extend", "set_input", "configure"):
        monkeypatch.setattr(engine.device, name, lambda *_, name=name: pytest.fail(name))
    for _ in range(20):
        engine.step(pair)


def test_no_step_is_launched_behind_the_last_token() -> None:
    engine = Engine()
    sequence = engine.start([1, 2], max_positions=4)
    engine.step([sequence])
    engine.step([sequence])
    assert len(engine.device.sizes) == 2


def test_one_that_comes_and_one_that_goes_leave_the_others_results_good() -> None:
    engine = Engine()
    first, second, third = engine.start([1, 2]), engine.start([3, 4]), engine.start([5, 6])
    engine.step([first, second])
    engine.step([first, second])
    engine.step([second, third])
    engine.step([second, third])
    assert second.token_ids == as_alone([3, 4], 4)
    assert third.token_ids == as_alone([5, 6], 2)
    assert len(engine.device.sizes) == 5, "no step was computed for nothing"


def test_rows_that_are_not_equally_far_are_brought_together() -> None:
    engine = Engine()
    old = engine.start([1, 2])
    engine.step([old])
    new = engine.start([3, 4])
    for _ in range(8):
        engine.step([old, new])
    before = len(engine.device.sizes)
    assert before == 2 + 8 + 1, "one step was spent"
    engine.device.log.clear()
    engine.step([old, new])
    assert engine.device.log[0] == f"launch {before + 1}"
    assert [old.token_ids, new.token_ids] == [as_alone([1, 2], 10), as_alone([3, 4], 9)]


def test_rows_are_brought_together_at_once_where_no_step_may_come_twice() -> None:
    engine = Engine(repeats=False)
    launched: list[list[tuple[Any, int]]] = []
    engine.decoder.before_launch = lambda rows: launched.append(list(rows))
    old = engine.start([1, 2])
    engine.step([old])
    new = engine.start([3, 4])
    for _ in range(8):
        engine.step([old, new])
    assert len(engine.device.sizes) == 2 + 1 + 8
    assert launched[:4] == [[(old, 1)], [(old, 2)], [(new, 1)], [(old, 3), (new, 2)]]
    assert [old.token_ids, new.token_ids] == [as_alone([1, 2], 9), as_alone([3, 4], 8)]


def test_penalties_do_not_count_a_step_that_is_computed_again() -> None:
    engine = Engine()
    old = engine.start([1, 2], PENALIZED)
    engine.step([old])
    new = engine.start([3, 4], PENALIZED)
    for _ in range(9):
        engine.step([old, new])
    for number, sequence in ((0, old), (1, new)):
        assert engine.device.counted[number][:-1] == sequence.token_ids


def test_a_row_without_finite_logits_fails_alone() -> None:
    engine = Engine()
    good, bad = engine.start([1, 2]), engine.start([4, DAMAGED])
    results = engine.step([good, bad])
    assert isinstance(results[0], Sample) and results[1] is NO_CHOICE
    engine.step([good])
    assert good.token_ids == as_alone([1, 2], 2)


def test_a_row_that_the_device_cannot_sample_is_sampled_on_the_host_and_no_other() -> None:
    engine = Engine()
    free, logged = engine.start([1, 2]), engine.start([3, 4], ON_HOST)
    for _ in range(5):
        engine.step([free, logged])
    assert logged.sampler.positions == [2, 3, 4, 5, 6] and free.sampler.positions == []
    assert len(engine.device.sizes) == 5, "without its token there is nothing to launch"
    assert [free.token_ids, logged.token_ids] == [as_alone([1, 2], 5), as_alone([3, 4], 5)]


def test_what_was_generated_is_computed_again_without_sampling() -> None:
    engine = Engine()
    ids = as_alone([1, 2], 6)
    again, other = engine.start(ids), engine.start([3, 4])
    again.num_cached_tokens = 2
    engine.device.pool = {
        place: token for place, token in engine.device.pool.items() if place[0] != again.block_tables[0][0]
    }
    for position in range(2):
        engine.device.pool[again.block_tables[0][0], position] = ids[position]
    results = [engine.step([again, other])[0] for _ in range(7)]
    assert results[:5] == [None] * 5
    assert again.token_ids == as_alone([1, 2], 8)
    assert other.token_ids == as_alone([3, 4], 7)


def test_the_room_for_any_top_k_covers_all_others() -> None:
    small, large, any_at_all = (SamplingKind.of(SamplingParams(top_k=k)) for k in (40, 100, 0))
    assert small and large and any_at_all
    assert small.union(large) == large == large.union(small) != small
    assert any_at_all.union(large) == any_at_all == large.union(any_at_all)


def test_settings_are_kept_for_the_most_demanding_until_it_has_gone() -> None:
    engine = Engine()
    greedy, sampled = engine.start([1, 2]), engine.start([3, 4], SamplingParams(seed=1))
    engine.step([greedy])
    engine.step([greedy, sampled])
    engine.step([greedy])
    assert engine.device.kinds[-1] == SamplingKind(64, bias=False, penalties=False)
    engine.step([engine.start([5])])
    assert engine.device.kinds[-1] == GREEDY


def test_a_step_has_no_more_rows_than_the_smallest_captured_size() -> None:
    engine = Engine(blocks=200)
    many = [engine.start([n, n + 1]) for n in range(20, 31)]
    for _ in range(3):
        engine.step(many)
    assert engine.device.sizes[-1] == 16
    few = [many[10], many[1], many[9]]
    for _ in range(3):
        engine.step(few)
    assert engine.device.sizes[-1] == 4
    for sequence in few:
        assert sequence.token_ids == as_alone(sequence.token_ids[:2], 6)


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_any_coming_and_going_leaves_every_sequence_its_own_text(seed: int, repeats: bool) -> None:
    """Sequences start, end, lose their blocks to others at once and are computed again; some wait for a turn."""
    chance = random.Random(seed)
    engine = Engine(150, repeats)
    running: list[FakeSequence] = []
    prompts: dict[int, list[int]] = {}

    def start() -> None:
        ids = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 70))]
        ids += [DAMAGED] * (chance.random() < 0.05)
        params = chance.choice([FREE, FREE, FREE, ON_HOST, PENALIZED])
        most = min(CTX, len(ids) + chance.randrange(1, 90))
        running.append(engine.start(ids, params, max_positions=most))
        prompts[id(running[-1])] = ids

    actions: list[Callable[[], None]] = [
        start,
        lambda: engine.drop(running.pop(chance.randrange(len(running)))),
        lambda: lose_blocks(engine, chance.choice(running)),
    ]
    for _ in range(3):
        start()
    for _ in range(150):
        if running and len(running) < 12 and chance.random() < 0.25:
            chance.choices(actions, [3, 1, 1])[0]()
        if not running:
            start()
        batch = running if chance.random() < 0.9 else [s for s in running if chance.random() < 0.7]
        if not batch:
            continue
        for sequence, result in zip(list(batch), engine.step(batch), strict=True):
            if isinstance(result, EngineError) or len(sequence.token_ids) >= sequence.max_positions:
                running.remove(sequence)
                engine.drop(sequence)
            ids = prompts[id(sequence)]
            assert sequence.token_ids == as_alone(ids, len(sequence.token_ids) - len(ids))


def lose_blocks(engine: Engine, sequence: FakeSequence) -> None:
    """Preemption; then what it had is computed again as a prompt, in other blocks."""
    engine.drop(sequence)
    engine.free.reverse()
    engine.prefill(sequence, len(sequence.token_ids) - 1)


def test_more_rows_than_are_captured_are_left_to_the_host_and_come_back() -> None:
    engine = Engine()
    pair = [engine.start([1, 2]), engine.start([5, 6, 7])]
    engine.step(pair)
    engine.decoder._most_rows = 1
    assert engine.decoder.step(pair) is None  # type: ignore[arg-type]
    assert not any(row.live for row in engine.device.rows)
    engine.decoder._most_rows = 2
    for _ in range(3):
        engine.step(pair)
    assert [s.token_ids for s in pair] == [as_alone([1, 2], 4), as_alone([5, 6, 7], 4)]


def test_the_inputs_send_what_changed_and_nothing_else() -> None:
    inputs = DecodeInputs(5, 4, 2, torch.device("cpu"))
    assert (
        inputs.rows == 8 and inputs.tables.shape == (2, 8, 4) and bool((inputs.tables == PADDING_BLOCK).all())
    )
    inputs.assign(2, [[5, 6, 7], [1]], 4)
    inputs.set_input(2, 2**31 - 1, 70)
    inputs.extend(2, 0, 2, [8])
    inputs.send()
    assert inputs.live.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert inputs.positions[2] == 70 and inputs.tokens[2] == 2**31 - 1
    assert inputs.tables[:, 2].tolist() == [[5, 6, 8, PADDING_BLOCK], [1, *[PADDING_BLOCK] * 3]]
    before = inputs.all.clone()
    inputs.send()
    assert torch.equal(inputs.all, before)
    inputs.release(2)
    inputs.send()
    assert (
        not inputs.live.any()
        and not inputs.positions.any()
        and bool((inputs.tables[:, :, 0] == PADDING_BLOCK).all())
    )
