"""How long the rest of a comparison takes, by the speed of what is done."""

import pytest

from quengine.diagnostics.parity.parity import _left


@pytest.mark.parametrize(
    ("done", "total", "elapsed", "text"),
    [
        (100, 400, 10.0, ", 30 s left of this phase"),
        (1, 50, 14.0, ", 11 min left of this phase"),
        (5, 5, 9.0, ", 0 s left"),
    ],
)
def test_the_rest_is_told_by_the_measured_speed(done: int, total: int, elapsed: float, text: str) -> None:
    assert _left(done, total, elapsed).startswith(text)
