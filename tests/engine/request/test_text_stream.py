import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine.errors import EngineError
from quengine.request.text_stream import TextStream


def feed(pieces: list[bytes], stop: list[str]) -> tuple[TextStream, list[str]]:
    """A finished stream over tokens 0, 1, ... with those bytes, and what each step showed."""
    stream = TextStream(pieces.__getitem__, stop)
    shown = [stream.push(i) for i in range(len(pieces))]
    return stream, [*shown, stream.finish()]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted(min(place, len(data)) for place in places)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """What is shown, found by looking at every beginning of the text in turn."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_character_appears_with_the_token_that_completes_it() -> None:
    _, shown = feed([b"a", b"\xf0\x9f", b"\xa4", b"\x96b"], [])
    assert shown == ["a", "", "", "🤖b", ""]


def test_a_stream_that_ends_inside_a_character_ends_with_one_replacement() -> None:
    stream, shown = feed([b"ok", b"\xf0\x9f\xa4"], [])
    assert shown == ["ok", "", "\ufffd"]
    assert stream.text == "ok\ufffd"


def test_bytes_that_are_no_text_become_replacements_in_the_middle() -> None:
    stream, _ = feed([b"a\xff", b"\xc3", b"(", b"\xe2\x82", b"\xacz"], [])
    assert stream.text == b"a\xff\xc3(\xe2\x82\xacz".decode(errors="replace")


def test_a_stop_string_across_tokens_is_not_shown_and_ends_the_text() -> None:
    stream = TextStream([b"Answer\nUs", b"er", b": more"].__getitem__, ["\nUser:"])
    assert [stream.push(0), stream.push(1), stream.push(2)] == ["Answer", "", ""]
    assert (stream.stopped, stream.text) == ("\nUser:", "Answer")
    assert (stream.push(0), stream.finish(), stream.text) == ("", "", "Answer")


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"if x:\n", b"    ", b"a()\n  b()\n"], "if x:\n    a()\n  "),
        ([b"a\n\t\t\t\tb\n", b"\nc"], "a\n\t\t\t\tb\n"),
        ([b"a\n", b"  ", b"  b\n   ", b"\n"], "a\n    b\n   "),
        ([b"one line"], "one line"),
        ([b"\n    ", b"x"], "\n    x"),
    ],
)
def test_a_line_that_is_indented_too_little_ends_the_text(pieces: list[bytes], shown: str) -> None:
    stream = TextStream(pieces.__getitem__, ["STOP"], indent=4)
    text = "".join(map(stream.push, range(len(pieces)))) + stream.finish()
    assert text == stream.text == shown
    assert stream.dedented == (shown != b"".join(pieces).decode()) and stream.stopped is None
    assert not stream.dedented or stream.push(0) == ""


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    _, shown = feed([b"hello <", b"b", b"> and <|", b"en", b"d of it"], ["<|end|>"])
    assert shown == ["hello ", "<b", "> and ", "", "<|end of it", ""]


def test_what_was_held_back_is_shown_when_the_stream_ends() -> None:
    _, shown = feed([b"x <|end"], ["<|end|>"])
    assert shown == ["x ", "<|end"]


@pytest.mark.parametrize("places", [[], [1], [2], [3], [1, 2, 3]])
def test_the_stop_string_that_is_complete_first_counts_however_the_text_is_cut(places: list[int]) -> None:
    stream, _ = feed(cut(b"abcd", places), ["abcd", "bc"])
    assert (stream.text, stream.stopped) == ("a", "bc")


def test_of_two_stop_strings_with_one_end_the_longer_is_hidden() -> None:
    stream, _ = feed([b"say STOP", b"!"], ["STOP", "say STOP"])
    assert (stream.text, stream.stopped) == ("", "say STOP")


def test_tokens_without_bytes_show_nothing() -> None:
    _, shown = feed([b"", b"a", b""], ["b"])
    assert shown == ["", "a", "", ""]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(EngineError, match="at least one character"):
        TextStream(lambda _: b"", ["a", ""])


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    data=st.one_of(
        st.binary(max_size=40),
        st.text(max_size=20).map(str.encode),
        st.text("ab<|é🤖", max_size=40).map(str.encode),
    ),
    places=st.lists(st.integers(0, 60), max_size=12),
    stop=st.lists(st.text("ab<|é🤖\ufffd", min_size=1, max_size=4), max_size=3),
)
def test_streamed_text_is_the_whole_text_up_to_the_stop_string(
    data: bytes, places: list[int], stop: list[str]
) -> None:
    stream, shown = feed(cut(data, places), stop)
    expected, stopped = first_stop(data.decode(errors="replace"), stop)
    assert "".join(shown) == stream.text == expected
    assert stream.stopped == stopped
