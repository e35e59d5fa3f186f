"""What rank 0 sends is what the others read."""

import pytest

from quengine.parallel.wire import (
    Choose,
    Forward,
    Hidden,
    Message,
    Parts,
    ReadCache,
    WriteCache,
    decode,
    encode,
)
from quengine.runners.step_rows import SequenceRows

ROWS = [
    SequenceRows([5, 6, 7], 32, [[1, 2], [0, 9]]),
    SequenceRows([], 0, [[3], []]),
    SequenceRows([8], 4, [[1], [2]]),
]


@pytest.mark.parametrize(
    "message",
    [
        Forward("prefill", ROWS, all_logits=True, eager=False),
        Forward("decode", ROWS[:1], all_logits=False, eager=True),
        Hidden(ROWS),
        Parts(ROWS, [[0, 1], [], [2]]),
        ReadCache(3, 70000),
        WriteCache(0, 4, 8),
        Choose({3: [[0, 2], [1, 5]], 0: []}),
    ],
)
def test_a_message_is_read_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message
