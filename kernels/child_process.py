"""A program of the engine in a process of its own, with a channel to it, and the set-up of such a program.

The process has its own session: the terminal's Ctrl-C goes to the process that started it, which decides when it ends.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from quengine.kernels.channel import Channel, MessageDecoder
from quengine.kernels.process_end import end_at_once

T = TypeVar("T")


class ChildProcess(Generic[T]):
    """A running program. It is killed when this process exits, if it has not ended.

    Args:
        program: the interpreter's arguments that name the program: ("-m", MODULE), ("-c", TEXT) or (FILE,). It finds
            modules where this process does.
        decoder: decodes the messages that the program sends.
        arguments: the program's own arguments, after the descriptor of its end of the channel.
        descriptors: further file descriptors that the program inherits, under the same numbers.
        environment: variables that the program has beside those of this process.
        quiet: drop the program's standard error. Its standard output is always dropped.

    Attributes:
        channel: this process's end of the channel to the program. When it is closed, the program ends by itself, unless
            it waits for something else.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        program: Sequence[str],
        decoder: MessageDecoder[T],
        arguments: Sequence[str] = (),
        *,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, decoder)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *program, str(theirs.fileno()), *arguments],
                stdin=subprocess.PIPE,  # `end_with_parent`
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
                env={**import_path(), **(environment or {})},
                pass_fds=[theirs.fileno(), *descriptors],
                start_new_session=True,
            )
        atexit.register(self.kill)  # a process that hangs does not see that this one is gone

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The process's exit code, -N where signal N has ended it; None while it runs."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """How the process ended, as the end of a sentence."""
        code = self.wait()
        return f"was ended by signal {-code}" if code is not None and code < 0 else f"has ended ({code})"

    def wait(self, seconds: float | None = None) -> int | None:
        """Waits for the process to end: its exit code, or None if it does not end within `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Asks the process to end, whatever it waits for. Returns at once."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.channel.close()

    def close(self, seconds: float = 0.0) -> int:
        """Asks the process to end, and kills it if it does not within `seconds`. Returns its exit code."""
        self.end()
        if self.wait(seconds) is None:
            self.kill()
        atexit.unregister(self.kill)
        return self._process.wait()


def import_path() -> dict[str, str]:
    """The environment in which another Python finds this process's modules, except those in the working folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def parent_channel(decoder: MessageDecoder[T]) -> Channel[T]:
    """In a `ChildProcess`: its end of the channel, whose descriptor is its first argument."""
    return Channel(socket.socket(fileno=int(sys.argv[1])), decoder)


def end_with_parent() -> None:
    """In a `ChildProcess`: ends this process when its parent ends, whatever it waits for, and ignores Ctrl-C.

    Only the parent holds the other end of standard input open. Some kernels (gVisor) do not report a socket's hang-up.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        os.read(0, 1)
        end_at_once(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()
