"""A bounded little-endian cursor over a mapped file: every read is checked against the bytes that are there.

It reads GGUF's strings (u64 length, then bytes), scalar types and arrays; `header` reads keys and tensors.
"""

import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import overload

import numpy as np
from numpy.typing import NDArray

from quengine.models.gguf.errors import GGUFError

_U64 = struct.Struct("<Q")
_STRINGS_AT_ONCE = 1 << 14
CUT = "it is cut short or damaged: fetch or copy it again"
"""Ends the errors of a file that has fewer bytes than its header says."""


@dataclass(frozen=True)
class ScalarType:
    """A fixed-size GGUF value type."""

    name: str
    layout: struct.Struct
    dtype: np.dtype[np.generic]


def _scalar(name: str, code: str, dtype: str) -> ScalarType:
    return ScalarType(name, struct.Struct("<" + code), np.dtype(dtype))


SCALAR_TYPES: Mapping[int, ScalarType] = MappingProxyType(
    {
        0: _scalar("uint8", "B", "<u1"),
        1: _scalar("int8", "b", "<i1"),
        2: _scalar("uint16", "H", "<u2"),
        3: _scalar("int16", "h", "<i2"),
        4: _scalar("uint32", "I", "<u4"),
        5: _scalar("int32", "i", "<i4"),
        6: _scalar("float32", "f", "<f4"),
        7: _scalar("bool", "B", "<u1"),
        10: _scalar("uint64", "Q", "<u8"),
        11: _scalar("int64", "q", "<i8"),
        12: _scalar("float64", "d", "<f8"),
    }
)
UINT32, STRING, ARRAY = 4, 8, 9
BOOL = SCALAR_TYPES[7]


class StringArray(Sequence[str]):
    """The strings of a GGUF array, left in the file and decoded when read.

    Strings lie one after another, each an u64 length and its bytes; `bounds` holds the n+1 byte offsets
    where they start and the last one ends. Reading one that is not UTF-8 raises GGUFError; `raw` gives any.
    """

    def __init__(self, path: Path, field: str, buffer: mmap.mmap, bounds: NDArray[np.uint64]) -> None:
        self._path = path
        self._field = field
        self._buffer = buffer
        self.bounds = bounds

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def raw(self, index: int) -> bytes:
        """The bytes of string `index`, 0 <= index < len."""
        return self._buffer[int(self.bounds[index]) + 8 : int(self.bounds[index + 1])]

    def _decode(self, index: int) -> str:
        try:
            return self.raw(index).decode("utf-8")
        except UnicodeDecodeError:
            offset = int(self.bounds[index]) + 8
            raise GGUFError(self._path, f"{self._field}[{index}]", "not valid UTF-8", offset) from None

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._decode(i) for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{self._field} has {len(self)} strings, no number {index}")
        return self._decode(position)

    def __iter__(self) -> Iterator[str]:
        bounds = self.bounds.tolist()
        buffer = self._buffer
        for index in range(len(bounds) - 1):
            try:
                yield buffer[bounds[index] + 8 : bounds[index + 1]].decode("utf-8")
            except UnicodeDecodeError:
                self._decode(index)

    def __repr__(self) -> str:
        return f"StringArray({self._field}, {len(self)} strings)"


class Cursor:
    """Reads forward through a mapped file. Every method raises GGUFError where the file ends too early."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.pos = 0

    def error(self, field: str, problem: str, offset: int | None = None) -> GGUFError:
        return GGUFError(self.path, field, problem, self.pos if offset is None else offset)

    @property
    def remaining(self) -> int:
        return self.size - self.pos

    def need(self, nbytes: int, field: str) -> None:
        """Raise unless `nbytes` more bytes are in the file."""
        if nbytes > self.remaining:
            problem = f"needs {nbytes} bytes, the file has {self.remaining} left; {CUT}"
            raise self.error(field, problem)

    def unsigned(self, nbytes: int, field: str) -> int:
        self.need(nbytes, field)
        value = int.from_bytes(self.buffer[self.pos : self.pos + nbytes], "little")
        self.pos += nbytes
        return value

    def signed64(self, field: str) -> int:
        value = self.unsigned(8, field)
        return value - (1 << 64) if value >> 63 else value

    def scalar(self, kind: ScalarType, field: str) -> int | float | bool:
        self.need(kind.layout.size, field)
        (value,) = kind.layout.unpack_from(self.buffer, self.pos)
        if kind is BOOL and value > 1:
            raise self.error(field, f"a bool of value {value}, must be 0 or 1")
        self.pos += kind.layout.size
        return bool(value) if kind is BOOL else value  # type: ignore[no-any-return]

    def string(self, field: str, limit: int | None = None) -> bytes:
        """A length-prefixed string; longer than `limit` bytes, where given, is an error."""
        start = self.pos
        length = self.unsigned(8, f"{field} length")
        if limit is not None and length > limit:
            raise self.error(field, f"{length} bytes long, at most {limit} are allowed", start)
        self.need(length, field)
        value = self.buffer[self.pos : self.pos + length]
        self.pos += length
        return value

    def strings(self, count: int, field: str) -> StringArray:
        """Steps over `count` strings, keeping only where each lies."""
        self.need(8 * count, field)
        bounds = array("Q", [self.pos])
        while len(bounds) <= count:
            step = min(_STRINGS_AT_ONCE, count + 1 - len(bounds))
            bounds.extend(self._short_strings(step) or self._any_strings(step, len(bounds) - 1, field))
            self.pos = bounds[-1]
        return StringArray(self.path, field, self.buffer, np.frombuffer(bounds, np.uint64))

    def _short_strings(self, count: int) -> list[int] | None:
        """Where `count` strings end, or None unless all are shorter than 256 bytes and in the file.

        Reading one byte of each length is three times faster than reading eight; that the other seven are
        zero is checked for all at once.
        """
        position, buffer, ends = self.pos, self.buffer, []
        try:
            for _ in range(count):
                position += 8 + buffer[position]
                ends.append(position)
        except IndexError:
            return None
        if position > self.size:
            return None
        starts = np.array([self.pos, *ends[:-1]], np.int64)
        high = np.frombuffer(buffer, np.uint8)[starts[:, None] + np.arange(1, 8)]
        return None if high.any() else ends

    def _any_strings(self, count: int, first: int, field: str) -> list[int]:
        """Where `count` strings, of which the first is number `first`, end."""
        position, ends = self.pos, []
        for index in range(first, first + count):
            if position + 8 > self.size:
                raise self.error(f"{field}[{index}]", "the file ends inside this array", self.size)
            end = position + 8 + int(_U64.unpack_from(self.buffer, position)[0])
            if end > self.size:
                raise self.error(f"{field}[{index}]", f"longer than the rest of the file; {CUT}", position)
            ends.append(end)
            position = end
        return ends

    def numbers(self, kind: ScalarType, count: int, field: str) -> NDArray[np.generic]:
        """An array of `count` scalars as a read-only view on the file."""
        self.need(kind.layout.size * count, field)
        values = np.frombuffer(self.buffer, kind.dtype, count, self.pos) if count else np.empty(0, kind.dtype)
        if kind is BOOL:
            if values.size and int(values.max()) > 1:  # type: ignore[call-overload]
                raise self.error(field, "a bool array with values other than 0 and 1")
            values = values.astype(np.bool_)
        self.pos += kind.layout.size * count
        return values
