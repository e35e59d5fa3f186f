"""What editors end a completion of code with: too little indentation, and time."""

import pytest

from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.sampler import Sample, Sampler

PIECES = [b"x = 1", b"\n", b"    y", b" = 2\n", b"z", b"\n\n"]


def sequence_of(params: SamplingParams) -> Sequence:
    stream = TextStream(PIECES.__getitem__, params.stop, params.n_indent)
    return Sequence([0], params, Sampler(params, len(PIECES)), stream, frozenset(), 100)


def advanced(sequence: Sequence) -> int:
    """The tokens it takes until its end."""
    for token in range(len(PIECES)):
        sequence.advance(Sample(token))
        if sequence.finished:
            return token + 1
    return len(PIECES)


@pytest.mark.parametrize(
    ("allowed", "tokens"), [(0, 6), (-1, 6), (1, 2), (150, 4), (350, 6), (550, 6), (10_000, 6)]
)
def test_when_its_time_is_over_a_text_ends_with_its_line(
    monkeypatch: pytest.MonkeyPatch, allowed: int, tokens: int
) -> None:
    """A token each tenth of a second."""
    clock = iter(range(10, 110))
    monkeypatch.setattr("quengine.request.sequence.time.perf_counter", lambda: next(clock) / 10)
    sequence = sequence_of(SamplingParams(t_max_predict_ms=allowed, seed=1))
    assert advanced(sequence) == tokens
    over = 0 < allowed < 550
    assert sequence.finish_reason == ("length" if over else None)
    assert not over or sequence.stream.text.endswith("\n")


def test_indentation_ends_a_text_with_its_limit() -> None:
    sequence = sequence_of(SamplingParams(n_indent=4, stop=("zz",), seed=1))
    assert advanced(sequence) == 6 and sequence.finish_reason == "length"
    assert sequence.stream.text == "x = 1\n    y = 2\n" and sequence.stream.stopped is None
    plain = sequence_of(SamplingParams(n_indent=4, seed=1))
    assert advanced(plain) == 5 and plain.finish_reason == "length"
