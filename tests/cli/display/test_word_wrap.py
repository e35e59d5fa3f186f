"""Words that come in pieces are wrapped whole."""

import random
import textwrap

import pytest

from quengine.cli.display.word_wrap import WordWrap
from tests.cli.display.screen import Screen

TEXT = "the quick brown fox, jumping over unbelievably lazy dogs, went to sleep. " * 3


def shown(text: str, sizes: list[int], width: int) -> list[str]:
    screen, wrap, at, turn = Screen(width, 100), WordWrap(width), 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        screen.feed(wrap.write(text[at : at + size]))
        at, turn = at + size, turn + 1
    return screen.lines


@pytest.mark.parametrize("width", [20, 40, 79])
def test_lines_are_broken_at_words_whatever_the_pieces(width: int) -> None:
    expected = textwrap.wrap(TEXT, width - 1)
    chance = random.Random(width)
    for sizes in ([1], [2], [5], [chance.randint(1, 12) for _ in range(40)]):
        assert [line for line in shown(TEXT, sizes, width) if line] == expected


def test_line_ends_are_kept_and_long_words_are_broken_at_the_end_of_a_line() -> None:
    assert shown("a\n\nb c", [1], 20) == ["a", "", "b c"]
    assert shown("x" * 25, [25], 11) == ["x" * 10, "x" * 10, "x" * 5]
    assert "".join(shown("see " + "y" * 50, [3], 11)) == "see" + "y" * 50


def test_wide_characters_take_two_columns_and_break_anywhere() -> None:
    assert WordWrap(7).write("語語語語") == "語語語\n語"
