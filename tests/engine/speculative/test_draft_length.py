"""How long drafts are: after how they went, and what many sequences get of a step."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quengine.speculative.draft_length import (
    FIRST_PLAIN,
    LONGEST_PAUSE,
    LONGEST_PLAIN,
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
    for _ in range(40):
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
    assert made.due and made.next([0.9], 3) > 0
    untimed = TimedLength(3)
    never = [untimed.next([0.9], 3) for _ in range(9)]
    assert never[0] == 0 and never[-1] > 0, "as where prompts come between steps"


def test_drafts_that_do_not_pay_pause_longer_each_time_until_they_do() -> None:
    seconds = [1.0, 1.4, 1.8, 2.2]
    made = timed(*seconds)
    found = run(made, 2000, 0.2, seconds)
    assert set(found) == {0, 1} and not made.pays
    drafts = [number for number, length in enumerate(found) if length]
    pauses = [after - before for before, after in pairwise(drafts) if after > before + 1]
    assert drafts[0] == FIRST_PLAIN and pauses[0] > FIRST_PLAIN
    assert pauses == sorted(pauses) and pauses[-1] > LONGEST_PLAIN == 256
    assert sum(0.4 for _ in drafts) < 0.01 * sum(seconds[length] for length in found)
    again = run(made, 2 * LONGEST_PLAIN, 0.95, seconds)
    assert again[-1] > 1 and again.count(0) <= LONGEST_PLAIN
    assert run(made, 40, 0.0, seconds)[:2] == [0, 0], "what does not pay any longer ends at once"


def test_another_text_is_tried_sooner() -> None:
    seconds = [1.0, 1.4]
    made = timed(*seconds)
    run(made, 500, 0.1, seconds)
    while made.due:
        made.next([0.1], 1)
    made.retry()
    assert 1 in run(made, FIRST_PLAIN + 1, 0.1, seconds)


def test_steps_that_become_slower_alike_change_nothing() -> None:
    """As with a longer context: what was timed at a shorter one is compared with what is timed now."""
    made = timed(1.0, 1.1, 1.2, 1.3)
    assert run(made, 200, 0.6, [3.0, 3.3, 3.6, 3.9])[-1] == timed(1.0, 1.1, 1.2, 1.3).next([0.6], 3) > 0
    assert run(made, 200, 0.6, [0.5, 0.55, 0.6, 0.65])[-1] > 0


def test_a_step_that_took_long_once_changes_little() -> None:
    for length in range(4):
        made = timed(1.0, 1.1, 1.2, 1.3)
        made.note(length, 100.0)
        assert made.next([0.9], 3) == 3
