"""Starts the process that compiles kernels for this one (compile_processes.py).

That process imports torch and Triton before it can do anything. So it may be started before this process has imported
them: then it waits for its order.
"""

from importlib import import_module
from threading import Thread

import msgspec

from quengine.kernels.child_process import ChildProcess

_RAW: msgspec.msgpack.Decoder[msgspec.Raw] = msgspec.msgpack.Decoder(msgspec.Raw)
_MAIN = "from quengine.kernels.cuda.launch.compiler_process import main; main({!r})"

_waiting: list[ChildProcess[msgspec.Raw]] = []


def start(prelude: str, needed: str = "") -> ChildProcess[msgspec.Raw]:
    """Starts a new process. prelude: Python statements that it runs first. needed: a module that it imports before its
    order comes. Raises OSError if no process can be started."""
    # It knows of no GPU.
    return ChildProcess(
        ("-c", f"{prelude}\n{_MAIN.format(needed)}"),
        _RAW,
        environment={"CUDA_VISIBLE_DEVICES": ""},
        quiet=True,
    )


def start_ahead(prelude: str, needed: str = "") -> None:
    """Starts a process for `taken` to return, with the arguments of `start`. Raises OSError."""
    _waiting.append(start(prelude, needed))


def taken(prelude: str) -> ChildProcess[msgspec.Raw]:
    """The process that waits, or a new one. Raises OSError."""
    return _waiting.pop() if _waiting else start(prelude)


def drop() -> None:
    """Ends the process that waits."""
    while _waiting:
        _waiting.pop().close()


def main(needed: str) -> None:
    """What the process does. It imports modules, and meanwhile hashes Triton's compiler library of some 400 MB, with
    whose digest the keys of all kernels begin."""
    from triton.runtime.cache import triton_key

    hashing = Thread(target=triton_key)
    hashing.start()
    if needed:
        import_module(needed)
    from quengine.kernels.cuda.launch.compile_processes import main as lead

    hashing.join()
    lead()
