"""What a process and the one that compiles kernels for it tell each other (compile_ahead.py, compile_processes.py)."""

from typing import TypeAlias

import msgspec

from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.cuda.launch.launcher import LauncherSpec


class Order(msgspec.Struct, frozen=True):
    """What is to be compiled; see `CompilePool`. task: the pool's `task`, pickled, for the receiving process to call.
    cache: Triton's folder."""

    task: bytes
    gpu: Gpu
    processes: int
    every: bool
    marker: str | None
    cache: str


class Built(msgspec.Struct, frozen=True):
    """A kernel that was compiled or found in the cache. key: its folder there. launcher: how to launch it, given where
    `Order.every` is set. error: why it was not compiled; "" if it was."""

    key: str
    name: str
    launcher: LauncherSpec | None
    error: str = ""


CRASHED = "the process that compiled it has ended"
"""The error of a kernel whose process was killed, as for lack of memory."""

ToLeader: TypeAlias = Order | str
FromLeader: TypeAlias = list[str] | Built | None
TO_LEADER: msgspec.msgpack.Decoder[ToLeader] = msgspec.msgpack.Decoder(ToLeader)
FROM_LEADER: msgspec.msgpack.Decoder[FromLeader] = msgspec.msgpack.Decoder(FromLeader)
