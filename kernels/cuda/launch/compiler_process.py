"""The process that compiles kernels for this one (compile_processes.py), as it is started.

It imports torch and Triton before it can do anything, and may be started before this process has: then it waits for
its order.
"""

import msgspec

from quengine.kernels.child_process import ChildProcess

_RAW: msgspec.msgpack.Decoder[msgspec.Raw] = msgspec.msgpack.Decoder(msgspec.Raw)
_MAIN = "from quengine.kernels.cuda.launch.compile_processes import main; main()"

_waiting: list[ChildProcess[msgspec.Raw]] = []


def start(prelude: str) -> ChildProcess[msgspec.Raw]:
    """A new one. prelude: Python statements that it runs first. Raises OSError where no process can be started."""
    # It knows of no GPU.
    return ChildProcess(
        ("-c", f"{prelude}\n{_MAIN}"), _RAW, environment={"CUDA_VISIBLE_DEVICES": ""}, quiet=True
    )


def start_ahead(prelude: str) -> None:
    """Start one that `taken` gives. Raises OSError."""
    _waiting.append(start(prelude))


def taken(prelude: str) -> ChildProcess[msgspec.Raw]:
    """The one that waits, or a new one. Raises OSError."""
    return _waiting.pop() if _waiting else start(prelude)


def drop() -> None:
    """End the one that waits."""
    while _waiting:
        _waiting.pop().close()
