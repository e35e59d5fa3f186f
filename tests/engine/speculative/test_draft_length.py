"""How long drafts are: after how they went, and what many sequences get of a step."""

from hypothesis import given
from hypothesis import strategies as st

from quengine.speculative.draft_length import LONGEST_PAUSE, DraftLength, divide


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
