"""The scheduler of many sequences: turns, order, room, and that nothing stays held. No model is computed."""

import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

import pytest

from quengine.block_manager import LEAST_COPIED
from quengine.block_pool import BlockCopy, CachePool
from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import PADDING_BLOCK
from quengine.kv_cache import KVCache
from quengine.request.prompt_scores import PromptScores
from quengine.sampler import TokenLogprobs
from quengine.scheduler import Scheduler
from quengine.slot import Slot
from quengine.step_plan import StepPlan, scored_rows

BLOCK = 32


@dataclass(eq=False)
class FakeSequence:
    """What the scheduler needs of a sequence; it generates `wanted` tokens."""

    token_ids: list[int]
    wanted: int = 5
    num_cached_tokens: int = 0
    replay: int = 0
    reused_tokens: int = 0
    slot: Slot = field(default_factory=Slot)
    block_tables: tuple[list[int], ...] = ()
    block_keys: list[bytes] = field(default_factory=list)
    started: float = 0.0
    error: Exception | None = None
    pool: None = None
    ctx_size: int = 10**6
    scores: PromptScores | None = None
    images: None = None
    adapters: None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prefill_tokens = len(self.token_ids)
        self.max_positions = len(self.token_ids) + self.wanted

    @property
    def key_ids(self) -> list[int]:
        return self.token_ids

    def start(self) -> None:
        self.started = time.perf_counter()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def finish_reason(self) -> str | None:
        if self.error is not None:
            return "error"
        return "length" if len(self.token_ids) >= self.max_positions else None


def prompt(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(10**6) for _ in range(length)]


def make(blocks: int = 40, parallel: int = 4, deterministic: bool = False, packed: bool = False) -> Scheduler:
    cache = KVCache([], 1000, (CachePool(blocks),))
    return Scheduler(cache, parallel, 64, 16, deterministic=deterministic, packed=packed)


def test_a_chunk_beside_running_sequences_is_longer_while_many_prompts_wait() -> None:
    cache = KVCache([], 1000, (CachePool(40),))
    scheduler = Scheduler(cache, 4, 64, 16, packed=True, backlog_chunk=32)
    scheduler.add(FakeSequence(prompt(10), wanted=50))
    assert step(scheduler)
    lengths = []
    for count in (40, 30):
        scheduler.add(FakeSequence(prompt(count, seed=count)))
    while scheduler.waiting or scheduler.prefilling:
        batch = step(scheduler)
        assert batch is not None
        lengths += [len(chunk.ids) for chunk in batch.chunks]
    # 70 tokens are more than the 64 of the largest step; the 38 that are left are not.
    assert lengths == [32, 8, 16, 14]


def step(scheduler: Scheduler) -> StepPlan | None:
    """One step as the engine does it; checks that every token has its block, and only its own."""
    batch = scheduler.plan()
    if batch is None:
        return None
    writes: dict[int, object] = {}
    counts = {sequence: len(chunk.ids) for sequence, chunk in batch.running()}
    assert all(chunk.ids and chunk.start == s.num_cached_tokens for s, chunk in batch.running())
    for sequence in batch.sequences:
        count = counts.get(sequence, 1)
        for position in range(sequence.num_cached_tokens, sequence.num_cached_tokens + count):
            block = sequence.block_tables[0][position // BLOCK]
            assert writes.setdefault(block, sequence) is sequence
            others = [s for s in scheduler._running if s is not sequence and block in s.block_tables[0]]
            assert not others, "a block that is written has one owner"
        assert len(sequence.block_tables[0]) * BLOCK >= sequence.num_cached_tokens + count
    scheduler.commit(batch)
    for sequence in batch.sequences:
        if sequence.num_cached_tokens == len(sequence.token_ids):
            sequence.token_ids.append(len(sequence.token_ids))
    scheduler.release()
    return batch


def run(scheduler: Scheduler, most: int = 10**5) -> list[StepPlan]:
    steps = []
    while (batch := step(scheduler)) is not None:
        steps.append(batch)
        assert len(steps) < most
    return steps


def test_prompts_are_long_chunks_alone_and_short_ones_in_turn_with_decode_steps() -> None:
    scheduler = make()
    first, second = FakeSequence(prompt(100, 1), 50), FakeSequence(prompt(40, 2), 3)
    for sequence in (first, second):
        scheduler.add(sequence)
    kinds = []
    for batch in run(scheduler):
        for sequence, chunk in zip(batch.sequences, batch.chunks, strict=False):
            kinds.append(("first" if sequence is first else "second", len(chunk.ids)))
        if batch.phase == "decode":
            kinds.append(("decode", len(batch.sequences)))
    assert kinds[:8] == [
        ("first", 64),
        ("first", 36),
        ("decode", 1),
        ("second", 16),
        ("decode", 1),
        ("second", 16),
        ("decode", 1),
        ("second", 8),
    ]
    assert kinds[8:10] == [("decode", 2)] * 2 and kinds[10:] == [("decode", 1)] * (49 - 5)


def test_a_chunk_beside_running_texts_is_as_short_as_the_last_one_was_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("quengine.scheduler.time.perf_counter", lambda: now)
    scheduler = Scheduler(KVCache([], 1000, (CachePool(60),)), 4, 256, 128, mixed_seconds=0.5)
    scheduler.add(FakeSequence(prompt(10, 1), 100))
    step(scheduler)
    scheduler.add(FakeSequence(prompt(900, 2), 1))
    sizes = []
    for token_seconds in (0.001, 0.01, 0.02, 0.1, 0.003):
        step(scheduler)
        batch = scheduler.plan()
        assert batch is not None
        (chunk,) = batch.chunks
        sizes.append(len(chunk.ids))
        now += token_seconds * len(chunk.ids)
        scheduler.commit(batch)
    assert sizes == [128, 128, 48, 16, 16]
    step(scheduler)
    batch = scheduler.plan()
    assert batch is not None and len(batch.chunks[0].ids) == 128


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("blocks", [400, 14])
def test_a_running_text_waits_for_one_short_chunk_at_most(blocks: int, packed: bool) -> None:
    scheduler = make(blocks, parallel=5, packed=packed)
    numbers = random.Random(4)
    added = [FakeSequence(prompt(numbers.randrange(1, 200), i), numbers.randrange(1, 60)) for i in range(30)]
    for sequence in added:
        scheduler.add(sequence)
    between = 0
    while True:
        waiting_for_a_token = list(scheduler.decoding)
        batch = step(scheduler)
        if batch is None:
            break
        if batch.phase == "prefill":
            tokens = sum(len(chunk.ids) for chunk in batch.chunks)
            between = between + tokens if waiting_for_a_token else 0
            assert between <= 16
        else:
            between = 0
            # All that are running advance, but for those whose blocks others needed.
            assert set(batch.sequences) == set(waiting_for_a_token) - set(scheduler.waiting)
    assert all(s.finished for s in added) and scheduler.blocks.num_used == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_goes_fails_and_is_put_out_nothing_is_lost(
    seed: int, deterministic: bool, packed: bool
) -> None:
    scheduler = make(blocks=12, parallel=5, deterministic=deterministic, packed=packed)
    numbers = random.Random(seed)
    live: list[FakeSequence] = []
    for _ in range(600):
        if len(live) < 12 and numbers.random() < 0.2:
            ids = prompt(numbers.randrange(1, 150), numbers.randrange(3))
            live.append(FakeSequence(ids, numbers.randrange(1, 100)))
            scheduler.add(live[-1])
        if live and numbers.random() < 0.05:
            scheduler.cancel(live.pop(numbers.randrange(len(live))))
        if scheduler.decoding and numbers.random() < 0.03:
            numbers.choice(scheduler.decoding).error = EngineError("not finite")
            scheduler.release()
        step(scheduler)
        live = [sequence for sequence in live if not sequence.finished]
        assert sorted(map(id, live)) == sorted(map(id, [*scheduler.waiting, *scheduler._running]))
        tables = {block for sequence in scheduler._running for block in sequence.block_tables[0]}
        assert scheduler.blocks.num_used == len(tables)
        assert all(not sequence.block_tables for sequence in scheduler.waiting)
    run(scheduler)
    assert all(sequence.finished for sequence in live) and scheduler.blocks.num_used == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("blocks", [400, 14])
def test_sequences_get_their_first_token_in_order_of_arrival(blocks: int, packed: bool) -> None:
    scheduler = make(blocks, packed=packed)
    added = [FakeSequence(prompt(100 if i % 3 else 300, i), 40) for i in range(12)]
    order = []
    for sequence in added:
        scheduler.add(sequence)
    while (batch := step(scheduler)) is not None:
        assert len(scheduler._running) <= 4
        order += [s for s in batch.sequences if s not in order and len(s.token_ids) > s.num_prompt_tokens]
    assert order == added


def test_the_newest_gives_up_its_blocks_and_comes_back_first_with_what_it_had() -> None:
    scheduler = make(blocks=4)
    old, new, later = (FakeSequence(prompt(30, i), 50) for i in range(3))
    for sequence in (old, new, later):
        scheduler.add(sequence)
    while not (scheduler.waiting and scheduler.waiting[0] is new and new.started):
        assert step(scheduler) is not None
    assert new.block_tables == () and new.num_cached_tokens == 0
    generated = len(new.token_ids) - 30
    assert generated > 0 and later.started == 0.0 and scheduler.decoding == [old]
    steps = run(scheduler)
    who, again = next(each for plan in steps for each in zip(plan.sequences, plan.chunks, strict=False))
    # Its first block was free, but still held what it had computed.
    assert who is new and again.start == 32
    assert again.ids == new.token_ids[32 : 30 + generated]
    assert new.finished and later.finished and scheduler.blocks.num_used == 0


def test_a_deterministic_run_computes_generated_tokens_again_one_by_one() -> None:
    scheduler = make(blocks=4, deterministic=True)
    added = [FakeSequence(prompt(30, i), 50) for i in range(3)]
    for sequence in added:
        scheduler.add(sequence)
    steps = run(scheduler)
    prompts = [chunk for batch in steps for chunk in batch.chunks]
    assert len(prompts) > 3 and all(c.start + len(c.ids) <= 30 for c in prompts)
    assert all(s.finished for s in added) and scheduler.blocks.num_used == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_of_one_token_begins_in_the_decode_step_of_the_others(deterministic: bool) -> None:
    scheduler = make(deterministic=deterministic)
    first, second = FakeSequence(prompt(10), 5), FakeSequence([1], 5)
    for sequence in (first, second):
        scheduler.add(sequence)
    kinds = [(batch.phase, len(batch.sequences)) for batch in run(scheduler)]
    assert kinds == [("prefill", 1), *[("decode", 2)] * 4, ("decode", 1)]


def test_a_chunk_of_a_single_token_of_a_longer_prompt_is_prefill() -> None:
    scheduler = make()
    scheduler.add(FakeSequence(prompt(65), 3))
    steps = run(scheduler)
    assert [(b.phase, [len(c.ids) for c in b.chunks]) for b in steps[:3]] == [
        ("prefill", [64]),
        ("prefill", [1]),
        ("decode", []),
    ]


def test_without_sharing_every_request_starts_from_an_empty_cache() -> None:
    scheduler = Scheduler(KVCache([], 1000, (CachePool(40),)), 1, 64, 16, shares=False)
    added = [FakeSequence(prompt(70), 5) for _ in range(2)]
    for sequence in added:
        scheduler.add(sequence)
    prompts = [(c.start, len(c.ids)) for batch in run(scheduler) for c in batch.chunks]
    assert prompts == [(0, 64), (64, 6)] * 2 and not any(s.reused_tokens for s in added)


def test_a_deterministic_run_shares_no_answer() -> None:
    for deterministic, shared in ((False, 79), (True, 40)):
        scheduler = make(deterministic=deterministic)
        first = FakeSequence(prompt(40), 40)
        scheduler.add(first)
        run(scheduler)
        second = FakeSequence([*first.token_ids, 1], 2)
        scheduler.add(second)
        run(scheduler)
        assert second.reused_tokens == shared


@pytest.mark.parametrize("packed", [False, True])
def test_a_prompt_that_waits_shares_what_the_one_before_it_computes(packed: bool) -> None:
    scheduler = make(packed=packed)
    added = [FakeSequence(prompt(70), 20) for _ in range(3)]
    for sequence in added:
        scheduler.add(sequence)
    computed = sum(len(chunk.ids) for batch in run(scheduler) for chunk in batch.chunks)
    assert [s.reused_tokens for s in added] == [0, 64, 64] and computed == 70 + 6 + 6


def test_a_step_is_filled_with_the_prompts_that_wait() -> None:
    scheduler = make(packed=True, parallel=6)
    added = [FakeSequence(prompt(length, i), 5) for i, length in enumerate((30, 20, 1, 40, 5, 60, 3))]
    for sequence in added:
        scheduler.add(sequence)
    seen = [
        [(added.index(s), len(c.ids)) for s, c in zip(b.sequences, b.chunks, strict=False)]
        for b in run(scheduler)
    ]
    # 14 tokens are left behind the first two; fewer than 16 are not worth a part of the next prompt. The prompt of one
    # token decodes with the others. Then chunks are short, as there are texts that wait for their next token.
    assert seen[0] == [(0, 30), (1, 20)]
    assert [part for part in seen[1:] if part][:5] == [[(3, 16)], [(3, 16)], [(3, 8)], [(4, 5)], [(5, 16)]]
    assert all(s.finished for s in added) and scheduler.blocks.num_used == 0


def test_several_prompts_take_no_longer_step_than_a_captured_one() -> None:
    scheduler = Scheduler(KVCache([], 1000, (CachePool(40),)), 6, 64, 16, packed=True, backlog_chunk=32)
    for number, length in enumerate((10, 6, 10, 60)):
        scheduler.add(FakeSequence(prompt(length, number), 1))
    steps = [[len(chunk.ids) for chunk in batch.chunks] for batch in run(scheduler) if batch.chunks]
    # Of 32 tokens 6 are left, too few for a part of the last prompt, which alone may take all 64.
    assert steps == [[10, 6, 10], [60]]


def test_short_prompts_join_the_end_of_a_long_one() -> None:
    scheduler = make(packed=True)
    added = [FakeSequence(prompt(length, i), 1) for i, length in enumerate((100, 9, 8, 30))]
    for sequence in added:
        scheduler.add(sequence)
    seen = [
        [(added.index(s), c.start, len(c.ids)) for s, c in zip(b.sequences, b.chunks, strict=False)]
        for b in run(scheduler)
    ]
    assert seen == [[(0, 0, 64)], [(0, 64, 36), (1, 0, 9), (2, 0, 8)], [(3, 0, 30)]]


def test_no_more_prompts_join_than_may_run_or_have_blocks() -> None:
    for blocks, parallel, most in ((40, 2, 2), (2, 4, 2), (40, 4, 4)):
        scheduler = make(blocks, parallel, packed=True)
        for seed in range(5):
            scheduler.add(FakeSequence(prompt(10, seed), 20))
        batch = step(scheduler)
        assert batch is not None and len(batch.chunks) == most
        run(scheduler)
        assert scheduler.blocks.num_used == 0


def test_prompts_whose_step_failed_are_tried_one_by_one() -> None:
    scheduler = make(packed=True)
    added = [FakeSequence(prompt(10, i), 20) for i in range(3)]
    for sequence in added:
        scheduler.add(sequence)
    batch = scheduler.plan()
    assert batch is not None and len(batch.chunks) == 3
    scheduler.failed(batch)
    scheduler.retry_alone()
    scheduler.cancel(added[1])
    alone = [step(scheduler) for _ in range(2)]
    assert [b.sequences for b in alone if b is not None] == [[added[0]], [added[2]]]
    run(scheduler)
    assert added[0].finished and added[2].finished and scheduler.blocks.num_used == 0


def test_nobody_overtakes_a_prompt_that_waits_for_room() -> None:
    scheduler = make(blocks=6)
    first, big, small = FakeSequence(prompt(60, 1), 30), FakeSequence(prompt(120, 2), 5), FakeSequence([1], 5)
    for sequence in (first, big, small):
        scheduler.add(sequence)
    while not first.finished:
        step(scheduler)
        assert not small.started
    run(scheduler)
    assert big.finished and small.finished and big.started < small.started


def test_what_does_not_fit_into_the_whole_cache_is_refused_with_both_numbers() -> None:
    scheduler = make(blocks=2)
    with pytest.raises(EngineError, match="may take 65 tokens and the cache holds 64"):
        scheduler.add(FakeSequence(prompt(60), 5))
    scheduler.add(FakeSequence(prompt(59), 5))
    run(scheduler)


def test_a_cancel_frees_everything_in_queue_prefill_and_decode() -> None:
    scheduler = make()
    added = [FakeSequence(prompt(100, i), 50) for i in range(3)]
    for sequence in added:
        scheduler.add(sequence)
    while scheduler.prefilling != [added[1]] or added[1].num_cached_tokens < 40:
        step(scheduler)
    for held, sequence in zip((4, 0, 0), (added[1], added[0], added[2]), strict=True):
        scheduler.cancel(sequence)
        assert scheduler.blocks.num_used == held
    assert scheduler.plan() is None


def test_a_failed_sequence_leaves_nothing_to_share() -> None:
    scheduler = make()
    bad = FakeSequence(prompt(70), 20)
    scheduler.add(bad)
    for _ in range(3):
        step(scheduler)
    bad.error = EngineError("not finite")
    scheduler.release()
    assert scheduler.blocks.num_used == 0
    again = FakeSequence(prompt(70), 2)
    scheduler.add(again)
    run(scheduler)
    assert again.reused_tokens == 0


def test_a_step_that_failed_is_tried_for_each_of_its_sequences() -> None:
    scheduler = make()
    added = [FakeSequence(prompt(10, i), 20) for i in range(3)]
    for sequence in added:
        scheduler.add(sequence)
    while len(scheduler.decoding) < 3:
        step(scheduler)
    batch = scheduler.plan()
    assert batch is not None and batch.phase == "decode"
    scheduler.failed(batch)
    scheduler.retry_alone()
    scheduler.cancel(added[1])
    alone = [step(scheduler) for _ in range(3)]
    assert [b.sequences for b in alone if b is not None] == [[added[0]], [added[2]], [added[0], added[2]]]
    run(scheduler)
    assert scheduler.blocks.num_used == 0


def drafted_step(scheduler: Scheduler, numbers: random.Random) -> StepPlan | None:
    """One step in which sequences have drafts of any length, right up to any place."""
    batch = scheduler.plan()
    if batch is None:
        return None
    drafts = {}
    if batch.phase == "decode":
        for sequence in batch.sequences:
            left = sequence.max_positions - len(sequence.token_ids) - 1
            before = len(sequence.block_tables[0])
            free = scheduler.blocks.num_free
            if left > 0 and sequence.num_cached_tokens + 1 == len(sequence.token_ids):
                drafts[sequence] = scheduler.draft_room(sequence, min(left, numbers.randrange(1, 70)))
            taken = len(sequence.block_tables[0]) - before
            assert not taken or free > len(scheduler._running), "nobody is put out for a draft"
            end = len(sequence.token_ids) + drafts.get(sequence, 0)
            assert end <= len(sequence.block_tables[0]) * BLOCK and end < sequence.max_positions
    scheduler.commit(batch)
    for sequence in batch.sequences:
        if sequence.num_cached_tokens < len(sequence.token_ids):
            continue
        sequence.token_ids.append(numbers.randrange(10**6))
        for _ in range(numbers.randint(0, drafts.get(sequence, 0))):
            if sequence.finished:
                break
            scheduler.accepted(sequence)
            sequence.token_ids.append(numbers.randrange(10**6))
    scheduler.release()
    return batch


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_are_taken_and_rejected_lose_no_block_and_share_only_what_was_taken(
    seed: int, deterministic: bool
) -> None:
    scheduler = make(blocks=14, parallel=5, deterministic=deterministic)
    numbers = random.Random(seed)
    live: list[FakeSequence] = []
    finished: list[FakeSequence] = []
    for _ in range(300):
        if len(live) < 9 and numbers.random() < 0.3:
            again = numbers.choice(finished).token_ids if finished and numbers.random() < 0.5 else []
            ids = [*again[: numbers.randrange(120)], *prompt(numbers.randrange(1, 90), seed)]
            live.append(FakeSequence(ids, numbers.randrange(1, 120)))
            scheduler.add(live[-1])
        if live and numbers.random() < 0.03:
            scheduler.cancel(live.pop(numbers.randrange(len(live))))
        drafted_step(scheduler, numbers)
        finished += [sequence for sequence in live if sequence.finished]
        live = [sequence for sequence in live if not sequence.finished]
        tables = {block for sequence in scheduler._running for block in sequence.block_tables[0]}
        assert scheduler.blocks.num_used == len(tables)
        by_block: dict[int, list[int]] = {}
        for sequence in scheduler._running:
            assert sequence.num_cached_tokens < len(sequence.token_ids)
            for index, block in enumerate(sequence.block_tables[0]):
                held = sequence.token_ids[: (index + 1) * BLOCK]
                assert by_block.setdefault(block, held) == held, "a shared block is the same text"
    while drafted_step(scheduler, numbers) is not None:
        pass
    assert all(sequence.finished for sequence in live) and scheduler.blocks.num_used == 0
    assert any(sequence.reused_tokens for sequence in finished)


def test_a_prompt_that_is_scored_shares_only_what_has_been_scored_already() -> None:
    scheduler = make()
    numbers = prompt(100)
    scheduler.add(FakeSequence(numbers, 5))
    run(scheduler)
    scored = FakeSequence(numbers, 5, scores=PromptScores(numbers, 0))
    scheduler.add(scored)
    batch = scheduler.plan()
    assert (
        batch is not None and batch.chunks[0].start == 0 and scored_rows(scored, batch.chunks[0]) == range(64)
    )
    assert scored.scores is not None
    scored.scores.logprobs += [TokenLogprobs(token, 0.0, ()) for token in numbers[1:51]]
    scheduler._preempt(scored)
    batch = scheduler.plan()
    assert batch is not None and batch.chunks[0].start == 50, "the rows that are scored"
    assert scored_rows(scored, batch.chunks[0]) == range(54)
    scored.scores.logprobs += [TokenLogprobs(token, 0.0, ()) for token in numbers[51:]]
    scheduler._preempt(scored)
    batch = scheduler.plan()
    assert batch is not None and batch.chunks[0].start == 104 and not scored_rows(scored, batch.chunks[0])


WINDOWS = [
    (CachePool(17), CachePool(30, 50, 64)),
    (CachePool(9, 100, 64), CachePool(40)),
    (CachePool(10, 120, 64),),
    (CachePool(40), CachePool(9, 33, 64), CachePool(12, 150, 64)),
]


class Cells:
    """What the rows of each group's cache hold: the text up to their token."""

    def __init__(self, pools: tuple[CachePool, ...]) -> None:
        self.pools = pools
        self.held: list[dict[tuple[int, int], int]] = [{} for _ in pools]

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copies blocks, whatever rows are written."""
        for group, source, target in copies:
            held = self.held[group]
            for row in range(BLOCK):
                held[target, row] = held.get((source, row), 0)

    def compute(self, sequence: FakeSequence, ids: list[int], start: int, count: int) -> None:
        """Write `count` rows of these ids from position `start` on; every row then finds what it sees."""
        texts = [0]
        for token in ids:
            texts.append(hash((texts[-1], token)))
        for pool, table, held in zip(self.pools, sequence.block_tables, self.held, strict=True):
            for position in range(start, start + count):
                assert table[position // BLOCK] != PADDING_BLOCK
                held[table[position // BLOCK], position % BLOCK] = texts[position + 1]
            first = 0 if pool.window is None else max(0, start - pool.window + 1)
            for position in range(first, start + count):
                assert held[table[position // BLOCK], position % BLOCK] == texts[position + 1]


class FakeDevice:
    """Computes steps in the order of their launch; the host sees the tokens of each when the step is committed.

    A decode step has drafts of any length, of which any number is right. `most`: most steps in flight.
    """

    def __init__(self, scheduler: Scheduler, cells: Cells, seed: int, most: int) -> None:
        self.scheduler, self.cells, self.most = scheduler, cells, most
        self.in_flight = deque[tuple[StepPlan, dict[Slot, list[int]]]]()
        self.phases: set[tuple[str, ...]] = set()
        self._numbers = random.Random(seed)

    def step(self) -> bool:
        """Launches what may be launched, and commits the oldest step; False if there is none."""
        while self.in_flight and self.in_flight[0][0].cancelled:
            self.in_flight.popleft()
        while len(self.in_flight) < self.most:
            plan = self.scheduler.plan([plan for plan, _ in self.in_flight])
            if plan is None:
                break
            self.in_flight.append((plan, self._launch(plan)))
            self.phases.add(tuple(plan.phase for plan, _ in self.in_flight))
        if not self.in_flight:
            return False
        plan, sampled = self.in_flight.popleft()
        self.scheduler.commit(plan)
        for sequence, slot in zip(plan.sequences, plan.slots, strict=True):
            if sequence.slot is slot and not sequence.finished:
                self._take(sequence, sampled[slot])
        self.scheduler.release()
        return True

    def _launch(self, plan: StepPlan) -> dict[Slot, list[int]]:
        """Computes the rows; returns the tokens that are sampled in each slot."""
        sampled = {}
        for number, (sequence, slot) in enumerate(zip(plan.sequences, plan.slots, strict=True)):
            start, ids = plan.starts[number], list(sequence.token_ids)
            for _, before in self.in_flight:
                ids += before.get(slot, [])
            if plan.phase == "prefill":
                chunks = [chunk for p, _ in self.in_flight for s, chunk in p.running() if s is sequence]
                assert all(chunk.end <= start for chunk in chunks), "no row is computed twice"
                count, tokens = len(plan.chunks[number].ids), [self._numbers.randrange(3)]
            else:
                count, tokens = self._decode(sequence, slot, start, ids)
            self.cells.compute(sequence, ids, start, count)
            sampled[slot] = tokens if start + count >= len(ids) else []
        return sampled

    def _decode(
        self, sequence: FakeSequence, slot: Slot, start: int, ids: list[int]
    ) -> tuple[int, list[int]]:
        """Rows and sampled tokens of a decode step; `ids` gets the draft."""
        left, drafted = sequence.max_positions - len(ids) - 1, 0
        if slot.launched == 1 and start + 1 == len(ids) and left > 0 and self._numbers.random() < 0.7:
            drafted = self.scheduler.draft_room(sequence, min(left, self._numbers.randrange(4)))
        # The host has to see which drafts were right, and what it samples itself.
        slot.waits = drafted > 0 or start + 1 < len(ids) or self._numbers.random() < 0.1
        tokens = [self._numbers.randrange(3) for _ in range(self._numbers.randint(0, drafted) + 1)]
        ids += [*tokens[:-1], *[-1] * (drafted + 1 - len(tokens))]
        return drafted + 1, tokens

    def _take(self, sequence: FakeSequence, tokens: list[int]) -> None:
        for number, token in enumerate(tokens):
            if number:
                self.scheduler.accepted(sequence)
            sequence.token_ids.append(token)
            if self._numbers.random() < 0.01:  # an end that nobody knew of
                sequence.max_positions = len(sequence.token_ids)
            if sequence.finished:
                break


@pytest.mark.parametrize("pools", WINDOWS)
def test_every_token_finds_what_its_window_sees_whatever_is_released_shared_and_preempted(
    pools: tuple[CachePool, ...],
) -> None:
    """Half of the texts go on from earlier ones: the cases together preempt and reuse, with any seed."""
    preempted, reused, phases = 0, 0, set[tuple[str, ...]]()
    cases = product([1, 3], [False, True], [False, True])
    for seed, (most, deterministic, packed) in enumerate(cases):
        cache = KVCache([], 1000, pools)
        cells, way = Cells(pools), {"deterministic": deterministic, "packed": packed}
        scheduler = Scheduler(cache, 5, 64, 16, copy_blocks=cells.copy, **way)
        device = FakeDevice(scheduler, cells, seed, most)
        counts = run_at_random(scheduler, device, random.Random(seed))
        preempted, reused, phases = preempted + counts[0], reused + counts[1], phases | device.phases
    assert preempted and reused
    assert phases >= {("decode", "decode"), ("prefill", "prefill"), ("prefill", "decode", "prefill")}


def run_at_random(scheduler: Scheduler, device: FakeDevice, numbers: random.Random) -> tuple[int, int]:
    """Adds sequences, cancels some and lets some fail; returns how many were preempted, and reused a prefix."""
    live: list[FakeSequence] = []
    added: list[FakeSequence] = []
    preempted, preempt = [], scheduler._preempt
    scheduler._preempt = lambda s: (preempted.append(s), preempt(s))[1]  # type: ignore[method-assign,assignment,arg-type]
    for number in range(600):
        if len(live) < 9 and numbers.random() < 0.3:
            ended = [s for s in added if s.finished and s.error is None]
            again = numbers.choice(ended[-9:]).token_ids if ended and numbers.random() < 0.6 else []
            kept = 250 if numbers.random() < 0.5 else numbers.randrange(250)
            ids = [*again[:kept], *prompt(numbers.randrange(1, 40), number)]
            live.append(FakeSequence(ids, numbers.randrange(1, 240)))
            added.append(live[-1])
            scheduler.add(live[-1])
        if live and numbers.random() < 0.03:
            scheduler.cancel(live.pop(numbers.randrange(len(live))))
        if scheduler.decoding and numbers.random() < 0.02:
            numbers.choice(scheduler.decoding).error = EngineError("not finite")
            scheduler.release()
        device.step()
        live = [sequence for sequence in live if not sequence.finished]
        check_owners(scheduler, device.cells.pools)
    while device.step():
        pass
    assert all(sequence.finished for sequence in live) and scheduler.blocks.num_used == 0
    return len(preempted), sum(sequence.reused_tokens > 0 for sequence in added)


def check_owners(scheduler: Scheduler, pools: tuple[CachePool, ...]) -> None:
    """Every block that is not free is in the table of a running sequence; none has more than its window needs."""
    for group, pool in enumerate(pools):
        tables = [sequence.block_tables[group] for sequence in scheduler._running]
        owned = {block for table in tables for block in table} - {PADDING_BLOCK}
        assert scheduler.blocks._pools[group].num_free == pool.num_blocks - len(owned)
        for table in tables:
            assert len(table) - table.count(PADDING_BLOCK) <= pool.most_blocks(1000)


@pytest.mark.parametrize("pools", WINDOWS)
@pytest.mark.parametrize("most", [1, 3])
def test_a_text_goes_on_from_where_the_one_before_it_ended(pools: tuple[CachePool, ...], most: int) -> None:
    """With windows, and steps in flight when the earlier text ends: a block is noted before it is freed."""
    for length in range(3, 200, 13):
        cells = Cells(pools)
        scheduler = Scheduler(KVCache([], 1000, pools), 5, 64, 16, copy_blocks=cells.copy)
        device, numbers = FakeDevice(scheduler, cells, length, most), random.Random(length)
        text, held = prompt(length, length), 0
        for _turn in range(3):
            first, beside = FakeSequence([*text], numbers.randrange(1, 40)), FakeSequence([*text, 7], 1)
            scheduler.add(first)
            scheduler.add(beside)
            while device.step():
                pass
            assert first.finished and first.reused_tokens == held
            assert beside.reused_tokens >= len(text) // BLOCK * BLOCK
            held, text = len(first.token_ids) - 1, [*first.token_ids, *prompt(9)]
            held -= held % BLOCK if held % BLOCK < LEAST_COPIED else 0


def test_a_windowed_group_is_refused_by_what_it_needs_at_once() -> None:
    scheduler = Scheduler(KVCache([], 10**5, (CachePool(5, 50, 64),)), 1, 64, 16)
    scheduler.add(FakeSequence(prompt(20000), 5))
    assert len(run(scheduler)) > 300
    with pytest.raises(EngineError, match="may take 20005 tokens and the cache holds 128"):
        Scheduler(KVCache([], 10**5, (CachePool(4, 50, 64),)), 1, 64, 16).add(FakeSequence(prompt(20000), 5))


def test_full_length_sequences_run_together_in_a_pool_of_their_windows() -> None:
    """As many as there are windows for, though all positions of one would not fit."""
    each = CachePool(0, 64, 64).most_blocks(2000)
    scheduler = Scheduler(KVCache([], 2000, (CachePool(4 * each, 64, 64),)), 4, 64, 64)
    added = [FakeSequence(prompt(1000, i), 200) for i in range(4)]
    for sequence in added:
        scheduler.add(sequence)
    assert max(len(batch.sequences) for batch in run(scheduler)) == 4
    assert all(sequence.num_cached_tokens == 1199 for sequence in added), "none was preempted"
