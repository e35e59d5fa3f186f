"""The base of programs that a `LimitedProcess` runs: limits, requests and answers.

It imports no other module of this package, so that such a program starts at once. Messages are those of a `Channel`
(kernels/channel.py), in the standard library's JSON, which has a form for half a surrogate pair and for any integer.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


class LimitedWorker:
    """The program's side. Its arguments: a descriptor, seconds of processor time, bytes of address space.

    seconds, memory: the limits; the kernel bounds the memory from now on. setup: the first message.
    """

    def __init__(self) -> None:
        self._channel = os.fdopen(int(sys.argv[1]), "rb")
        self.seconds, self.memory = float(sys.argv[2]), int(sys.argv[3])
        with suppress(ValueError, OSError):  # a system may have no such limit
            resource.setrlimit(resource.RLIMIT_AS, (self.memory, self.memory))
        self.setup: Any = json.loads(next(self.requests()))

    def requests(self) -> Iterator[bytes]:
        """The requests, until the other end is closed."""
        while length := self._channel.read(8):
            yield self._channel.read(int.from_bytes(length, "little"))

    def answer(self, answer: dict[str, Any]) -> None:
        """Send an answer."""
        data = json.dumps(answer).encode()
        rest = memoryview(len(data).to_bytes(8, "little") + data)
        while rest:
            rest = rest[os.write(self._channel.fileno(), rest) :]
