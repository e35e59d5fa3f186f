"""A GGUF model as one object, be it one file or a split: metadata with typed access, and tensors.

Values are checked for the type and range that a caller names; `config_gguf`, `vocab_checks` and `tensor_table` check
what they mean for a model.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quengine.models.gguf.cursor import StringArray
from quengine.models.gguf.errors import GGUFError, shown
from quengine.models.gguf.header import Entry, GGUFTensor, Shard, Value
from quengine.models.gguf.splits import read_shards

T = TypeVar("T")


class GGUFFile:
    """An open GGUF model.

    `metadata` maps keys to Python scalars, strings, numpy arrays (views) and lazy `StringArray`s; of a split,
    the first file's entries win. `tensors` maps names to `GGUFTensor`s in file order, their data being
    views on the mapped files; those views stay valid after `close`, which only releases this object's own.
    """

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self.path = shards[0].path
        self.shards = tuple(shard.path for shard in shards)
        self.version = shards[0].version
        self.nbytes = sum(shard.size for shard in shards)
        self._buffers = [shard.buffer for shard in shards]
        self.entries: dict[str, Entry] = {}
        for shard in shards:
            self.entries = shard.entries | self.entries
        self.metadata: Mapping[str, Value] = MappingProxyType({k: e.value for k, e in self.entries.items()})
        self.tensors: dict[str, GGUFTensor] = {n: t for shard in shards for n, t in shard.tensors.items()}

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drops the tensors and metadata; the file stays mapped as long as any view of it exists."""
        self._buffers = []
        self.tensors = {}
        self.entries = {}
        self.metadata = MappingProxyType({})

    def release_pages(self) -> None:
        """Drops the mapped files' pages from this process's memory; they are read again when they are used."""
        for buffer in self._buffers:
            buffer.madvise(mmap.MADV_DONTNEED)

    def error(self, key: str, problem: str, index: int | None = None) -> GGUFError:
        """A GGUFError about metadata `key`, or element `index` of its array, with file and byte offset."""
        entry = self.entries.get(key)
        field = shown(key) if index is None else f"{shown(key)}[{index}]"
        if entry is None:
            return GGUFError(self.path, field, problem)
        offset = entry.offset
        if index is not None and isinstance(entry.value, StringArray):
            offset = int(entry.value.bounds[index])
        elif index is not None and isinstance(entry.value, np.ndarray):
            # An array starts with its u32 element type and u64 length; a stored bool is one byte, as numpy's.
            offset += 12 + index * entry.value.itemsize
        return GGUFError(entry.path, field, problem, offset)

    def tensor_error(self, name: str, problem: str) -> GGUFError:
        """A GGUFError about tensor `name`, with file and the byte offset of its description."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return GGUFError(self.path, f"tensor {shown(name)}", problem)
        return GGUFError(tensor.path, f"tensor {shown(name)}", problem, tensor.info_offset)

    def _wrong_type(self, key: str, expected: str) -> GGUFError:
        return self.error(key, f"has type {self.entries[key].type_name}, must be {expected}")

    def _get(self, key: str, kind: type[T], expected: str) -> T | None:
        """The value at `key`, or None where absent. Raises GGUFError if it is not of this type; a bool is no int."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong_type(key, expected)
        return value

    def get_int(self, key: str, low: int = 0, high: int = (1 << 31) - 1) -> int | None:
        """The integer at `key`, or None where absent. Another type, or outside [low, high]: GGUFError."""
        value = self._get(key, int, "an integer")
        if value is not None and not low <= value <= high:
            raise self.error(key, f"{value} is not from {low} to {high}")
        return value

    def require_int(self, key: str, low: int = 0, high: int = (1 << 31) - 1) -> int:
        """As `get_int`, and absence raises GGUFError."""
        return self._required(key, self.get_int(key, low, high))

    def get_float(self, key: str) -> float | None:
        """The float32 or float64 at `key`, or None where absent; it may be infinite or NaN."""
        return self._get(key, float, "float32 or float64")

    def get_bool(self, key: str) -> bool | None:
        return self._get(key, bool, "bool")

    def get_str(self, key: str) -> str | None:
        if isinstance(self.metadata.get(key), bytes):
            entry = self.entries[key]
            raise GGUFError(entry.path, shown(key), "not valid UTF-8", entry.offset + 8)
        return self._get(key, str, "a string")

    def require_str(self, key: str) -> str:
        return self._required(key, self.get_str(key))

    def get_strings(self, key: str) -> StringArray | None:
        """The array of strings at `key`, still undecoded, or None where absent."""
        return self._get(key, StringArray, "an array of strings")

    def require_strings(self, key: str) -> StringArray:
        return self._required(key, self.get_strings(key))

    def get_bools(self, key: str) -> list[bool] | None:
        """The array of bools at `key`, or None where absent."""
        values = self._array(key, "b", "an array of bools")
        return None if values is None else [bool(each) for each in values]

    def get_floats(self, key: str) -> NDArray[np.generic] | None:
        """The array of float32 or float64 at `key` as a view, or None where absent."""
        return self._array(key, "f", "an array of floats")

    def get_ints(self, key: str) -> NDArray[np.generic] | None:
        """The array of integers at `key` as a view, or None where absent."""
        return self._array(key, "iu", "an array of integers")

    def _array(self, key: str, kinds: str, expected: str) -> NDArray[np.generic] | None:
        """The array at `key`, whose numpy kind is one of `kinds`, or None where absent."""
        values = self._get(key, np.ndarray, expected)
        if values is not None and values.dtype.kind not in kinds:
            raise self._wrong_type(key, expected)
        return values

    def _required(self, key: str, value: T | None) -> T:
        if value is None:
            raise self.error(key, "missing from the metadata")
        return value


def open_gguf(path: str | Path) -> GGUFFile:
    """Opens the GGUF model at `path`; of a split model, any of its files. Raises GGUFError."""
    return GGUFFile(read_shards(Path(path)))
