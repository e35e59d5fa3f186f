"""Server and engine processes: memory through which blocks go from a prefill engine to the others.

A region is an unnamed file: HEADER bytes, of which byte N is 1 while part N is in use, then PARTS parts of equal size.
Its prefill engine takes a part and fills it. The server frees the part when the engine that reads it has read it or has
ended.
"""

import mmap
import os
import tempfile

PARTS = 8
HEADER = 4096


class BlockRegion:
    """One region, mapped. descriptor: of its file, which stays open."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.part_bytes = (len(self._memory) - HEADER) // PARTS

    @staticmethod
    def make(part_bytes: int) -> int:
        """The descriptor of a new file. Its memory is allocated as it is used, and freed when nobody has it open."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("quengine-blocks")
        else:  # elsewhere than on Linux
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, HEADER + PARTS * part_bytes)
        return descriptor

    @property
    def memory(self) -> mmap.mmap:
        """The whole mapping."""
        return self._memory

    def start(self, part: int) -> int:
        """Where a part begins, in bytes."""
        return HEADER + part * self.part_bytes

    def take(self) -> int | None:
        """A part that was free; None where there is none."""
        part = self._memory.find(b"\0", 0, PARTS)
        if part < 0:
            return None
        self._memory[part] = 1
        return part

    def free(self, part: int) -> None:
        self._memory[part] = 0
