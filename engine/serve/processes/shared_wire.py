"""Server and engine process: the messages between them (kernels/channel.py).

The server's side is `server_engine`, the other `engine_main`. Both are of one installation: there are no versions.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from quengine.kernels.channel import encode
from quengine.platform.failure import Failure
from quengine.request.adapter_scales import LoadedAdapter
from quengine.serve.processes.shared_engine import (
    EngineStats,
    EngineWork,
    Event,
)


class Load(msgspec.Struct, tag=True, frozen=True):
    """To the engine, first: the model's name, and what else `LLM` is given.

    `regions`: descriptors of memory through which it is given blocks, or of the one through which it `sends` them.
    """

    model: str
    options: Mapping[str, Any]
    regions: tuple[int, ...] = ()
    sends: bool = False


class Add(msgspec.Struct, tag=True, frozen=True):
    """To the engine: take a sequence, or an action on a slot. The request is encoded within the message, so that one
    that cannot be read fails alone."""

    request_id: int
    encoded: msgspec.Raw

    @classmethod
    def of(cls, request: EngineWork) -> "Add":
        """Raises OverflowError, UnicodeError or TypeError for a value that has no form on the wire."""
        return cls(request.id, msgspec.Raw(encode(request)))

    @property
    def request(self) -> EngineWork:
        """The decoded request. Raises msgspec.MsgspecError if `encoded` is no request."""
        return _request.decode(self.encoded)


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """To the engine: release a sequence, which may have ended meanwhile."""

    request_id: int


class RoomMade(msgspec.Struct, tag=True, frozen=True):
    """To the engine, in answer to `Room`: whether another model has left the device."""

    again: bool


class Room(msgspec.Struct, tag=True, frozen=True):
    """From the engine, while it loads: the bytes that the model needs, and those that are free on the device."""

    needed: int
    free: int
    device: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """From the engine, while it loads: a line that says how far it is."""

    text: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """From the engine: it is loaded. `device` as torch writes it; `ctx_size` in positions of one sequence; `memory` in
    bytes, of weights and cache. `marker` stands for an image in a prompt ("": the model reads only text), and
    `projector` is the path of the image encoder. `adapters`: the LoRA adapters beside its weights."""

    capacity: int
    ctx_size: int
    device: str
    memory: int
    notes: tuple[str, ...]
    marker: str = ""
    projector: str = ""
    adapters: tuple[LoadedAdapter, ...] = ()


class Step(msgspec.Struct, tag=True, frozen=True):
    """From the engine: the events of a step. `stats` now and then."""

    events: list[Event] = []
    stats: EngineStats | None = None


ToEngine = Load | Add | Cancel | RoomMade
FromEngine = Room | Progress | Ready | Step | Failure

_request: msgspec.msgpack.Decoder[EngineWork] = msgspec.msgpack.Decoder(EngineWork)
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def can_be_sent(message: Event) -> bool:
    """Whether every value of a message has a form on the wire."""
    try:
        encode(message)
    except (OverflowError, UnicodeError, TypeError):
        return False
    return True
