"""Server and engine process: a heartbeat in shared memory. The engine's process writes the time, the server reads it.

A thread of its own writes the stamp. So it stays fresh through a long step or while kernels are compiled, and grows old
when the process is stopped, swapped out, or its interpreter hangs.
"""

import mmap
import struct
import threading
import time

BEAT_SECONDS = 0.5
"""Between two beats."""

_STAMP = struct.Struct("d")
SIZE = _STAMP.size


class Heartbeat:
    """One time stamp, of the clock that all processes of a machine share.

    Args:
        descriptor: of a file of `SIZE` bytes that both processes have open; it is closed here.
    """

    def __init__(self, descriptor: int) -> None:
        with open(descriptor, "r+b", buffering=0) as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)

    def beat(self) -> None:
        _STAMP.pack_into(self._memory, 0, time.monotonic())

    def keep_beating(self) -> None:
        """Beat from a thread until the process ends."""

        def beats() -> None:
            while True:
                self.beat()
                time.sleep(BEAT_SECONDS)

        threading.Thread(target=beats, name="heartbeat", daemon=True).start()

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        stamp: float = _STAMP.unpack_from(self._memory)[0]
        return max(0.0, time.monotonic() - stamp)
