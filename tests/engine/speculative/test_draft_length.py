"""How long drafts are: after how they went, and what many sequences get of a step."""

from hypothesis import given
from hypothesis import strategies as st

from quengine.speculative.draft_length import LONGEST_PAUSE, AcceptRate, DraftLength, TimedLength, divide


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


def test_drafts_are_as_long_as_they_pay() -> None:
    timed = TimedLength(6)
    assert timed.next([0.95], 6) == 6 and timed.next([0.95], 2) == 2
    assert 0 < timed.next([0.5], 6) < 6
    for length, seconds in ((0, 5.0), (1, 5.5), (3, 6.5), (6, 8.0)):
        timed.note(length, seconds)
    cheap = timed.next([0.8], 6)
    for _ in range(60):
        for length, seconds in ((0, 5.0), (1, 8.0), (3, 14.0), (6, 23.0)):
            timed.note(length, seconds)
    assert timed.next([0.8], 6) < cheap


def test_drafts_that_do_not_pay_pause_longer_each_time_until_they_do() -> None:
    timed = TimedLength(3)
    timed.note(0, 1.0)
    timed.note(1, 1.6)
    lengths = [timed.next([0.2], 3) for _ in range(40)]
    assert lengths[:16] == [1, 0, 1, 0, 0, 1, *[0] * 4, 1, *[0] * 5] and sum(lengths) == 6
    assert max(timed.next([0.99], 3) for _ in range(LONGEST_PAUSE + 1)) == 3 and timed.due


def test_a_step_that_took_long_once_changes_little() -> None:
    timed = TimedLength(3)
    for length in range(4):
        timed.note(length, 1.0 + 0.1 * length)
    timed.note(3, 100.0)
    assert timed.next([0.9], 3) == 3
