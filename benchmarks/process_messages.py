"""What messages between the engine's processes cost: to encode, to decode, and from one process to another.

    python -m benchmarks.process_messages [--times 2000]

Those of each step: from rank 0 to another rank (a launch, decode rows, a prompt), and from the engine's process to the
server (the events of a step). Prints bytes, and microseconds as medians. A round trip is a message to a process that
decodes it and answers with a short one.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from quengine.kernels.channel import MessageDecoder, encode
from quengine.kernels.child_process import ChildProcess, end_with_parent, parent_channel
from quengine.parallel.wire import TO_RANK, LaunchDecode, PlannedStep
from quengine.runners.graph_keys import GraphKey, SamplingKind
from quengine.serve.processes.shared_engine import Piece
from quengine.serve.processes.shared_wire import FROM_ENGINE, Step
from quengine.step_plan import SequenceRows

DECODERS: dict[str, MessageDecoder[Any]] = {"rank": TO_RANK, "server": FROM_ENGINE}


def rows(sequences: int, tokens: int, blocks: int) -> list[SequenceRows]:
    """Rows of sequences whose one block table has `blocks` blocks."""
    numbers = random.Random(1)
    return [
        SequenceRows(
            [numbers.randrange(128000) for _ in range(tokens)],
            32 * blocks - tokens,
            [[numbers.randrange(20000) for _ in range(blocks)]],
        )
        for _ in range(sequences)
    ]


def messages() -> list[tuple[str, str, Any]]:
    """Name, receiver, message."""
    key = GraphKey("decode", 64, 64, SamplingKind(64, bias=False, penalties=False))
    return [
        ("launch, 4 changes", "rank", LaunchDecode(key, {64 * number: 7000 + number for number in range(4)})),
        (
            "launch, 256 changes",
            "rank",
            LaunchDecode(key, {3 * number: 7000 + number for number in range(256)}),
        ),
        ("decode, 1 row of 4096 positions", "rank", PlannedStep("decode", rows(1, 1, 128), "all logits")),
        ("decode, 64 rows of 1024", "rank", PlannedStep("decode", rows(64, 1, 32), "all logits")),
        ("prompt of 2048 tokens", "rank", PlannedStep("prefill", rows(1, 2048, 64), "last logits")),
        *(
            (f"events of {count} streams", "server", Step([Piece(n, (n,), " word") for n in range(count)]))
            for count in (1, 64, 256)
        ),
    ]


def median(call: Callable[[], object], times: int) -> float:
    """Microseconds."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return 1e6 * sorted(found)[times // 2]


def measure(name: str, receiver: str, message: Any, times: int) -> None:
    data, decoder = encode(message), DECODERS[receiver]
    answers: msgspec.msgpack.Decoder[bool] = msgspec.msgpack.Decoder(bool)
    process = ChildProcess(("-m", "benchmarks.process_messages"), answers, ["--answer", receiver])

    def exchange() -> None:
        process.channel.send(message)
        process.channel.receive()

    exchange()
    encoding, decoding = (
        median(call, times) for call in (lambda: encode(message), lambda: decoder.decode(data))
    )
    print(
        f"{name:33} {len(data):7} bytes: {encoding:6.1f} us to encode, {decoding:6.1f} to decode, "
        f"{median(exchange, times):6.1f} there and back"
    )
    process.close()


def answer(receiver: str) -> None:
    channel = parent_channel(DECODERS[receiver])
    end_with_parent()
    with suppress(EOFError):
        while True:
            channel.receive()
            channel.send(True)


def main() -> None:
    if sys.argv[2:3] == ["--answer"]:
        return answer(sys.argv[3])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=2000)
    given = parser.parse_args()
    for name, receiver, message in messages():
        measure(name, receiver, message, given.times)
    return None


if __name__ == "__main__":
    main()
