"""What rank 0 sends is what the others read."""

import pytest

from quengine.block_pool import BlockCopy, CachePool
from quengine.kernels.channel import encode
from quengine.parallel.wire import (
    TO_RANK,
    Capture,
    ChooseExperts,
    Configure,
    CopyBlocks,
    LaunchDecode,
    ObserveInputs,
    PlannedStep,
    Prompts,
    RankPlan,
    ReadCache,
    ToRank,
    WriteCache,
    WriteSums,
)
from quengine.runners.graph_keys import GraphKey, SamplingKind
from quengine.step_plan import SequenceRows

ROWS = [
    SequenceRows([5, 6, 7], 32, [[1, 2], [0, 9]]),
    SequenceRows([], 0, [[3], []]),
    SequenceRows([8], 4, [[1], [2]]),
]


@pytest.mark.parametrize(
    "message",
    [
        PlannedStep("prefill", ROWS, "all logits", [1], [(1, 2, 0)]),
        PlannedStep("decode", ROWS[:1], "last logits", eager=True),
        PlannedStep("prefill", ROWS, "hidden rows"),
        PlannedStep("prefill", ROWS, "logits of parts", parts=[[0, 1], [], [2]]),
        PlannedStep("prefill", ROWS, "tokens", slots=[0, 3, 1], kind=SamplingKind(1, False, True)),
        ReadCache(3, 70000),
        WriteCache(0, 4),
        ObserveInputs("run", on=True),
        WriteSums("/tmp/sums"),
        ChooseExperts({3: [[0, 2], [1, 5]], 0: []}),
        LaunchDecode(
            GraphKey("decode", 4, 4, SamplingKind(64, bias=True, penalties=False)), {7: 1, 100000: 0}
        ),
        Configure(
            3,
            SamplingKind(0, bias=True, penalties=True),
            {"temperature": 0.1, "seed": 2**64 - 1},
            {5: -1.5},
            [9, 2],
            3,
        ),
        Capture(GraphKey("prefill", 1024, 4)),
        Prompts([2048, 7]),
        CopyBlocks([BlockCopy(1, 5, 2), BlockCopy(1, 0, 9)]),
        RankPlan(
            "m.gguf", {"device": "cpu", "threads": None}, 1, 2, 64, [CachePool(9, 32, 4)], 3, "/m", (0, 4, 8)
        ),
    ],
)
def test_a_message_is_read_as_it_was_sent(message: ToRank) -> None:
    assert TO_RANK.decode(encode(message)) == message
