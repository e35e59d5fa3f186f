"""Drafts by look-up, against their definition on the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quengine.speculative.draft_ngram import NgramIndex


def defined(tokens: list[int], longest: int, most: int) -> list[int]:
    """The longest run at the end that also ends earlier, at the latest such place; then token by token."""
    for length in range(longest, 0, -1):
        if 2 * length < longest or length >= len(tokens):
            continue
        run = tokens[-length:]
        places = [place for place in range(length, len(tokens)) if tokens[place - length : place] == run]
        if places:
            text = list(tokens)
            for index in range(places[-1], places[-1] + most):
                text.append(text[index])
            return text[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=6),
    longest=st.integers(1, 6),
    most=st.integers(1, 9),
)
def test_a_growing_text_is_looked_up_as_if_read_anew(
    pieces: list[list[int]], longest: int, most: int
) -> None:
    index, tokens = NgramIndex(longest), [0]
    for piece in pieces:
        tokens += piece
        assert index.draft(tokens, most) == defined(tokens, longest, most)


def test_the_longest_run_counts_and_of_equal_ones_the_latest() -> None:
    tokens = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]
    assert NgramIndex(3).draft(tokens, 2) == [7, 9]
    assert NgramIndex(2).draft(tokens, 2) == [7, 9]
    assert NgramIndex(1).draft(tokens, 2) == [8, 1]


def test_runs_shorter_than_half_of_the_longest_are_not_looked_up() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3]
    assert NgramIndex(6).draft(tokens, 1) == [9]
    assert NgramIndex(7).draft(tokens, 1) == []


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert NgramIndex(2).draft([5, 6, 7, 6, 7], 5) == [6, 7, 6, 7, 6]


def test_where_the_last_token_is_new_there_is_no_draft() -> None:
    index = NgramIndex(2)
    assert index.draft([4], 3) == [] and index.draft([4, 5], 3) == []
    assert index.draft([4, 5, 4], 3) == [5, 4, 5]
