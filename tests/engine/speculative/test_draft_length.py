"""How long drafts are: after how they went, and what many sequences get of a step."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine.speculative.draft_length import (
    FIRST_PLAIN,
    LONGEST_PAUSE,
    LONGEST_PLAIN,
    NEW_PLAIN,
    AcceptRate,
    DraftLength,
    TimedLength,
    divide,
)


def lengths(length: DraftLength, steps: int, right: bool) -> list[int]:
    """What is drafted in so many steps, all right or all wrong."""
    drafted = []
    for _ in range(steps):
        drafted.append(length.next())
        if drafted[-1]:
            length.update(drafted[-1], drafted[-1] if right else 0)
    return drafted


def test_drafts_that_are_right_stay_long() -> None:
    assert lengths(DraftLength(7), 5, right=True) == [7] * 5


def test_drafts_that_are_wrong_become_short_and_rare_and_long_again_when_they_are_right() -> None:
    length = DraftLength(8)
    wrong = lengths(length, 120, right=False)
    assert wrong[:9] == [8, 0, 1, 0, 0, 1, 0, 0, 0]
    assert max(wrong[1:]) == 1 and wrong[-2 * LONGEST_PAUSE :].count(1) in (1, 2)
    while not length.next():
        pass
    length.update(1, 1)
    assert lengths(length, 4, right=True) == [2, 4, 8, 8]


def test_the_next_draft_is_one_longer_than_what_was_right() -> None:
    length = DraftLength(8)
    length.update(8, 3)
    assert length.next() == 4
    length.update(2, 2)  # there was no room for more
    assert length.next() == 4


@settings(deadline=None, derandomize=True)
@given(wanted=st.lists(st.integers(0, 6), max_size=6), room=st.integers(-3, 30))
def test_a_share_is_never_more_than_wanted_and_nobody_gets_two_more_than_another(
    wanted: list[int], room: int
) -> None:
    granted = divide(room, wanted)
    assert all(0 <= got <= want for got, want in zip(granted, wanted, strict=True))
    assert sum(granted) == min(sum(wanted), max(0, room))
    short = [got for got, want in zip(granted, wanted, strict=True) if got < want]
    assert not short or max(granted) - min(short) <= 1


def test_an_accept_rate_follows_what_was_accepted_where_it_could_be() -> None:
    rate = AcceptRate()
    for _ in range(40):
        rate.update(3, 3)
    assert rate.value > 0.99
    for _ in range(80):
        rate.update(3, 0)
    assert rate.value < 0.05
    before = rate.value
    rate.update(0, 0)
    assert rate.value == before
    one, three = AcceptRate(), AcceptRate()
    one.update(1, 0)
    three.update(3, 0)
    assert one.value == three.value, "after the first one that is wrong no other could be accepted"


def timed(plain: float, *drafting: float) -> TimedLength:
    """After steps of each length that took so many seconds."""
    made = TimedLength(len(drafting))
    for length, seconds in enumerate((plain, *drafting)):
        made.note(length, seconds)
        made.note(length, seconds)
    return made


def run(made: TimedLength, steps: int, rate: float, seconds: list[float]) -> list[int]:
    """The lengths of so many steps, which take so long, one after the other."""
    found = []
    for _ in range(steps):
        found.append(made.next([rate], len(seconds) - 1))
        made.note(found[-1], seconds[found[-1]])
    return found


def test_drafts_are_as_long_as_they_pay() -> None:
    cheap, dear = timed(5, 5.2, 5.4, 5.6, 5.8, 6, 6.2), timed(5, 8, 11, 14, 17, 20, 23)
    assert cheap.next([0.95], 6) == 6 and cheap.next([0.95], 2) == 2
    assert 0 < cheap.next([0.5], 6) < 6
    assert 0 < dear.next([0.95], 6) < cheap.next([0.95], 6)
    assert dear.next([0.9], 6) > dear.next([0.9, 0.4], 6)
    assert dear.next([0.5], 6) == 0


def test_first_steps_are_plain_until_one_was_timed() -> None:
    made = TimedLength(3)
    assert not made.due and made.pays and made.next([0.9], 3) == 0
    made.note(0, 1.0)
    assert made.due and made.next([0.9], 3) == 0, "the first may have captured a graph"
    made.note(0, 1.0)
    assert made.due and made.next([0.9], 3) > 0
    untimed = TimedLength(3)
    never = [untimed.next([0.9], 3) for _ in range(9)]
    assert never[0] == 0 and never[-1] > 0, "as where prompts come between steps"


def test_drafts_that_do_not_pay_pause_longer_each_time_until_they_do() -> None:
    seconds = [1.0, 1.4, 1.8, 2.2]
    made = timed(*seconds)
    found = run(made, 3000, 0.2, seconds)
    assert set(found) == {0, 1} and not made.pays
    drafts = [number for number, length in enumerate(found) if length]
    pauses = [after - before for before, after in pairwise(drafts) if after > before + 1]
    assert drafts[0] == FIRST_PLAIN and pauses[0] > FIRST_PLAIN
    assert pauses == sorted(pauses) and pauses[-1] > LONGEST_PLAIN
    assert sum(0.4 for _ in drafts) < 0.01 * sum(seconds[length] for length in found)
    again = run(made, 2 * LONGEST_PLAIN, 0.95, seconds)
    assert again[-1] > 1 and again.count(0) <= LONGEST_PLAIN
    assert run(made, 40, 0.0, seconds)[:2] == [0, 0], "what does not pay any longer ends at once"


@pytest.mark.parametrize("costs", [[1, 1.08, 1.16, 1.24], [1, 1.25, 1.5, 1.75], [1, 1.3, 1.35, 1.4]])
@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("sequences", [1, 8])
def test_chosen_lengths_give_what_the_best_one_does(costs: list[float], right: float, sequences: int) -> None:
    """Steps with noise, the first ones with drafts after plain ones longer by half a step, as the host takes part."""
    chance, made, rates = random.Random(3), TimedLength(3), [AcceptRate() for _ in range(sequences)]
    tokens, seconds, plain, before = 0, 0.0, 0, -1
    for _ in range(4000):
        length = made.next([rate.value for rate in rates], 3)
        for rate in rates:
            accepted = next((n for n in range(length) if chance.random() >= right), length)
            rate.update(length, accepted)
            tokens += 1 + accepted
        took = costs[length] * chance.uniform(0.97, 1.03)
        seconds += took + (0.5 if length and plain > 2 else 0.0)
        plain = 0 if length else plain + 1
        if length == before:
            made.note(length, took)
        before = length
    given = [sequences * sum(right**n for n in range(length + 1)) / cost for length, cost in enumerate(costs)]
    assert tokens / seconds > 0.99 * given[0] and tokens / seconds > 0.93 * max(given)


def test_another_text_is_tried_sooner() -> None:
    seconds = [1.0, 1.4]
    made = timed(*seconds)
    run(made, 1500, 0.1, seconds)
    while made.due:
        made.next([0.1], 1)
    made.retry(1)
    assert 1 in run(made, NEW_PLAIN + 1, 0.1, seconds)


def test_steps_that_become_slower_alike_change_nothing() -> None:
    """As with a longer context: what was timed at a shorter one is compared with what is timed now."""
    made = timed(1.0, 1.1, 1.2, 1.3)
    for scale in (3.0, 0.5):
        found = run(made, 300, 0.8, [scale * each for each in (1.0, 1.1, 1.2, 1.3)])
        assert found.count(0) <= 6 and found.count(3) > 250, "a few to compare with"


def test_what_drafts_cost_is_measured_again() -> None:
    """Where it becomes more, they end; after a pause that they do not pay any longer is known, and that they do."""
    cheap, dear = [1.0, 1.1, 1.2, 1.3], [1.0, 1.9, 2.8, 3.7]
    made = timed(*cheap)
    assert run(made, 50, 0.7, cheap)[-1] == 3
    assert sum(run(made, 8000, 0.7, dear)[-1000:]) < 30
    assert sum(run(made, 3000, 0.7, cheap)[-600:]) > 1500


def test_first_steps_that_capture_graphs_say_nothing_of_later_ones() -> None:
    """Alone, as the first plain step is, and among steps of other lengths."""
    seconds = [1.0, 1.4, 1.8, 2.2]
    made = TimedLength(3)
    for length, first in ((0, 60.0), (3, 90.0)):
        made.note(length, first)
        made.note(length, seconds[length])
    found = run(made, 400, 0.0, seconds)
    assert found.count(0) > 390 and made.due is False


def test_a_length_whose_first_step_captured_a_graph_is_chosen_where_it_pays() -> None:
    seconds, made, seen, found = [1.0, 1.25, 1.55, 1.8], TimedLength(3), set[int](), list[int]()
    for _ in range(200):
        found.append(made.next([0.8], 3))
        made.note(found[-1], seconds[found[-1]] if found[-1] in seen else 50.0)
        seen.add(found[-1])
    assert found.count(3) > 180


def test_a_step_that_took_long_once_changes_little() -> None:
    for length in range(4):
        made = timed(1.0, 1.1, 1.2, 1.3)
        made.note(length, 100.0)
        assert made.next([0.9], 3) == 3
