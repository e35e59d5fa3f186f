"""The scheduler: prompts in chunks, one sequence at a time, the cache's bookkeeping."""

from dataclasses import dataclass, field

from quengine.kv_cache import KVCache
from quengine.scheduler import Scheduler


@dataclass
class FakeSequence:
    """What the scheduler needs of a sequence."""

    token_ids: list[int]
    num_cached_tokens: int = 0
    reused_tokens: int = 0
    finished: bool = False
    started: float = field(default=0.0)
    pool: None = None


def make(chunk: int = 4, reuse: bool = False) -> Scheduler:
    return Scheduler(KVCache([], ctx_size=64), chunk, reuse)


def run_to_sample(scheduler: Scheduler) -> list[tuple[int, list[int]]]:
    """Compute batches until one samples; returns (start, ids) of each."""
    seen = []
    while True:
        batch = scheduler.next_batch()
        assert batch is not None
        seen.append((batch.start, batch.ids))
        samples = batch.samples
        scheduler.computed()
        if samples:
            return seen


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    scheduler = make(chunk=4)
    scheduler.add(FakeSequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert run_to_sample(scheduler) == [(0, [1, 2, 3, 4]), (4, [5, 6, 7, 8]), (8, [9])]
    assert scheduler.cache.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_decode_computes_the_one_new_token() -> None:
    scheduler = make()
    sequence = FakeSequence([1, 2])
    scheduler.add(sequence)
    run_to_sample(scheduler)
    sequence.token_ids.append(7)
    assert run_to_sample(scheduler) == [(2, [7])]
    assert scheduler.cache.tokens == [1, 2, 7]


def test_sequences_are_served_in_order_of_arrival() -> None:
    scheduler = make()
    first, second = FakeSequence([1]), FakeSequence([2])
    scheduler.add(first)
    scheduler.add(second)
    run_to_sample(scheduler)
    first.finished = True
    scheduler.release()
    assert run_to_sample(scheduler) == [(0, [2])]
    second.finished = True
    scheduler.release()
    assert scheduler.next_batch() is None


def test_a_shared_prefix_is_not_computed_again_when_reuse_is_on() -> None:
    scheduler = make(reuse=True)
    first = FakeSequence([1, 2, 3, 4])
    scheduler.add(first)
    run_to_sample(scheduler)
    first.finished = True
    scheduler.release()
    second = FakeSequence([1, 2, 3, 9, 9])
    scheduler.add(second)
    assert run_to_sample(scheduler) == [(3, [9, 9])]
    assert second.reused_tokens == 3


def test_an_identical_prompt_still_computes_its_last_token() -> None:
    scheduler = make(reuse=True)
    for _ in range(2):
        sequence = FakeSequence([1, 2, 3])
        scheduler.add(sequence)
        batches = run_to_sample(scheduler)
        sequence.finished = True
        scheduler.release()
    assert batches == [(2, [3])]


def test_without_reuse_every_request_starts_from_an_empty_cache() -> None:
    scheduler = make(reuse=False)
    for _ in range(2):
        sequence = FakeSequence([1, 2, 3])
        scheduler.add(sequence)
        assert run_to_sample(scheduler) == [(0, [1, 2, 3])]
        sequence.finished = True
        scheduler.release()


def test_rows_being_overwritten_are_not_taken_for_valid_after_a_cancel() -> None:
    scheduler = make(chunk=2, reuse=True)
    first = FakeSequence([1, 2, 3, 4])
    scheduler.add(first)
    run_to_sample(scheduler)
    first.finished = True
    scheduler.release()
    second = FakeSequence([1, 8, 8, 8])
    scheduler.add(second)
    assert scheduler.next_batch() is not None  # its rows may be half written when it is cancelled
    scheduler.cancel(second)
    assert scheduler.cache.tokens == [1]


def test_a_cancelled_waiting_sequence_is_never_computed() -> None:
    scheduler = make()
    first, second = FakeSequence([1]), FakeSequence([2])
    scheduler.add(first)
    scheduler.add(second)
    scheduler.cancel(first)
    assert run_to_sample(scheduler) == [(0, [2])]
