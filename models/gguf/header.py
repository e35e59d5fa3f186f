"""Parses the header of one GGUF file (versions 2 and 3, little-endian): metadata and tensor descriptions.

Layout, after the GGUF specification (ggml docs/gguf.md):
    "GGUF" | u32 version | i64 tensor count | i64 metadata count
    per metadata entry: string key | u32 value type | value    (array: u32 element type | u64 n | elements)
    per tensor: string name | u32 dimensions | i64 ne[...] (columns first) | u32 type | u64 offset in the data
    padding to the alignment | tensor data
`splits` joins the files of a split model, and `config_gguf` reads the keys of a model's shape.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quengine.models.gguf.cursor import ARRAY, CUT, SCALAR_TYPES, STRING, UINT32, Cursor, StringArray
from quengine.models.gguf.errors import GGUFError, shown
from quengine.models.gguf.tensor_types import TENSOR_TYPES, TensorType

TYPE_NAMES = {number: kind.name for number, kind in SCALAR_TYPES.items()} | {STRING: "string", ARRAY: "array"}

MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 64
MAX_ALIGNMENT = 1 << 20
_BEFORE_GGUF = "a file of ggml before GGUF, which must be converted anew"
_OTHER_MAGIC = {
    b"vers": "a pointer of Git LFS, if not damaged; fetch the file with: git lfs pull",
    **dict.fromkeys((b"lmgg", b"fmgg", b"tjgg"), _BEFORE_GGUF),
}
# The shortest possible entries: key "k" with an u8 value; tensor "t" of one dimension.
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

Value = int | float | bool | str | bytes | StringArray | NDArray[np.generic]
"""What a key holds; `bytes` is a string that is not UTF-8, an error only once the key is read."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One metadata entry. `offset` is the byte of `path` where the value lies."""

    path: Path
    key: str
    type_name: str
    value: Value
    offset: int


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """One stored tensor.

    `shape` is in torch order (rows first, columns last). `data` is a read-only uint8 view on the mapped file
    of shape [rows, row_bytes], with rows the product of all but the last dimension. `offset` is absolute in
    `path`; `info_offset` is where its description lies.
    """

    path: Path
    name: str
    type: TensorType
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    info_offset: int
    data: NDArray[np.uint8]

    @property
    def type_name(self) -> str:
        return self.type.name


@dataclass(frozen=True, eq=False)
class Shard:
    """One parsed file. `size` is its length in bytes."""

    path: Path
    buffer: mmap.mmap
    version: int
    size: int
    alignment: int
    entries: dict[str, Entry]
    tensors: dict[str, GGUFTensor]


def map_file(path: Path) -> mmap.mmap:
    """Maps `path` read-only. Raises GGUFError for what is not a readable, non-empty regular file."""
    try:
        if not path.is_file():
            other = "not a regular file" if path.exists() else "no such file"
            raise GGUFError(path, "file", "is a folder" if path.is_dir() else other)
        with path.open("rb") as handle:
            if handle.seek(0, 2) == 0:
                raise GGUFError(path, "file", "the file is empty; fetch or copy it again")
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as failure:
        raise GGUFError(path, "file", f"cannot be opened: {failure.strerror or failure}") from None
    except ValueError:
        raise GGUFError(path, "file", "not a usable file name") from None


def read_shard(path: Path) -> Shard:
    """Parses the header of the GGUF file at `path`. Raises GGUFError."""
    cursor = Cursor(path, map_file(path))
    version = _read_version(cursor)
    tensor_count = _read_count(cursor, "tensor count")
    entry_count = _read_count(cursor, "metadata count")
    if entry_count * _MIN_ENTRY_BYTES + tensor_count * _MIN_TENSOR_BYTES > cursor.remaining:
        problem = (
            f"{tensor_count} tensors and {entry_count} metadata entries cannot fit in the {cursor.remaining} "
            f"bytes that follow; {CUT}"
        )
        raise cursor.error("header", problem, 8)
    entries: dict[str, Entry] = {}
    for index in range(entry_count):
        entry = _read_entry(cursor, index, entries)
        entries[entry.key] = entry
    alignment = _alignment(path, entries)
    infos = _read_tensor_infos(cursor, tensor_count)
    data_offset = -(-cursor.pos // alignment) * alignment
    tensors = _place_tensors(cursor, infos, data_offset, alignment)
    return Shard(path, cursor.buffer, version, cursor.size, alignment, entries, tensors)


def _read_version(cursor: Cursor) -> int:
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        what = _OTHER_MAGIC.get(magic, "this is not a GGUF file")
        raise cursor.error("magic", f"{magic!r}, not b'GGUF': {what}", 0)
    cursor.pos = 4
    version = cursor.unsigned(4, "version")
    if version in (2, 3):
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, 2, 3):
        problem = (
            f"{swapped} in big-endian byte order, which is not supported; convert the model for little-endian"
        )
    else:
        problem = f"{version} is not supported, 2 and 3 are"
    raise cursor.error("version", problem, 4)


def _read_count(cursor: Cursor, field: str) -> int:
    offset = cursor.pos
    count = cursor.signed64(field)
    if count < 0:
        raise cursor.error(field, f"{count} is negative", offset)
    return count


def _read_identifier(cursor: Cursor, field: str, limit: int) -> str:
    start = cursor.pos
    raw = cursor.string(field, limit)
    if not raw:
        raise cursor.error(field, "empty", start)
    if b"\0" in raw:
        raise cursor.error(field, f"{shown(raw)} contains a NUL byte", start)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise cursor.error(field, f"{shown(raw)} is not valid UTF-8", start) from None


def _read_entry(cursor: Cursor, index: int, known: dict[str, Entry]) -> Entry:
    start = cursor.pos
    key = _read_identifier(cursor, f"metadata key {index}", MAX_KEY_BYTES)
    field = shown(key)
    if key in known:
        raise cursor.error(field, "this key appears twice", start)
    kind_offset = cursor.pos
    kind = cursor.unsigned(4, f"{field} type")
    if kind not in TYPE_NAMES:
        raise cursor.error(field, f"unknown value type {kind}", kind_offset)
    offset = cursor.pos
    value: Value
    if kind == STRING:
        raw = cursor.string(field)
        try:
            value = raw.decode("utf-8")
        except UnicodeDecodeError:
            value = raw
        return Entry(cursor.path, key, "string", value, offset)
    if kind == ARRAY:
        type_name, value = _read_array(cursor, field)
        return Entry(cursor.path, key, type_name, value, offset)
    return Entry(cursor.path, key, TYPE_NAMES[kind], cursor.scalar(SCALAR_TYPES[kind], field), offset)


def _read_array(cursor: Cursor, field: str) -> tuple[str, Value]:
    start = cursor.pos
    kind = cursor.unsigned(4, f"{field} element type")
    if kind == ARRAY:
        raise cursor.error(field, "an array of arrays, which is not supported", start)
    if kind not in TYPE_NAMES:
        raise cursor.error(field, f"unknown array element type {kind}", start)
    count = cursor.unsigned(8, f"{field} length")
    name = f"array of {TYPE_NAMES[kind]}"
    if kind == STRING:
        return name, cursor.strings(count, field)
    return name, cursor.numbers(SCALAR_TYPES[kind], count, field)


def _alignment(path: Path, entries: dict[str, Entry]) -> int:
    entry = entries.get("general.alignment")
    if entry is None:
        return 32
    value = entry.value
    if entry.type_name != TYPE_NAMES[UINT32] or not isinstance(value, int):
        raise GGUFError(path, entry.key, f"has type {entry.type_name}, must be uint32", entry.offset)
    if value <= 0 or value & (value - 1):
        raise GGUFError(path, entry.key, f"{value} is not a power of two", entry.offset)
    if value > MAX_ALIGNMENT:
        raise GGUFError(path, entry.key, f"{value} is over {MAX_ALIGNMENT}", entry.offset)
    return value


@dataclass(frozen=True)
class _TensorInfo:
    """A tensor's description as the file gives it; `offset` counts from the start of the tensor data."""

    name: str
    type: TensorType
    ne: tuple[int, ...]
    nbytes: int
    offset: int
    info_offset: int


def _read_tensor_infos(cursor: Cursor, count: int) -> list[_TensorInfo]:
    infos: list[_TensorInfo] = []
    names: set[str] = set()
    for index in range(count):
        start = cursor.pos
        info = _read_tensor_info(cursor, index)
        if info.name in names:
            raise cursor.error(f"tensor {shown(info.name)}", "this name appears twice", start)
        names.add(info.name)
        infos.append(info)
    return infos


def _read_tensor_info(cursor: Cursor, index: int) -> _TensorInfo:
    start = cursor.pos
    name = _read_identifier(cursor, f"tensor name {index}", MAX_NAME_BYTES)
    field = f"tensor {shown(name)}"
    at = cursor.pos
    dimensions = cursor.unsigned(4, f"{field} dimensions")
    if not 1 <= dimensions <= 4:
        raise cursor.error(field, f"has {dimensions} dimensions, must be 1 to 4", at)
    at = cursor.pos
    ne = tuple(cursor.signed64(f"{field} shape") for _ in range(dimensions))
    if min(ne) <= 0:
        raise cursor.error(field, f"shape {list(ne)} has a dimension that is not positive", at)
    at = cursor.pos
    number = cursor.unsigned(4, f"{field} type")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise cursor.error(field, f"unknown tensor type {number}", at)
    if ne[0] % kind.block:
        problem = f"first dimension {ne[0]} is not a multiple of {kind.block}, the block size of {kind.name}"
        raise cursor.error(field, problem, at)
    nbytes = kind.row_bytes(ne[0]) * prod(ne[1:])
    if nbytes > cursor.size:
        problem = (
            f"shape {list(ne)} of {kind.name} needs {nbytes} bytes, the whole file has {cursor.size}; {CUT}"
        )
        raise cursor.error(field, problem, at)
    offset = cursor.unsigned(8, f"{field} offset")
    return _TensorInfo(name, kind, ne, nbytes, offset, start)


def _place_tensors(
    cursor: Cursor, infos: Sequence[_TensorInfo], data_offset: int, alignment: int
) -> dict[str, GGUFTensor]:
    """Checks that the tensors are aligned, inside the file and apart, and makes their views."""
    whole = np.frombuffer(cursor.buffer, np.uint8)
    tensors: dict[str, GGUFTensor] = {}
    for info in infos:
        field = f"tensor {shown(info.name)}"
        start = data_offset + info.offset
        if info.offset % alignment:
            problem = f"offset {info.offset} is not a multiple of the alignment, {alignment}"
            raise cursor.error(field, problem, info.info_offset)
        if start + info.nbytes > cursor.size:
            ends = max(data_offset + each.offset + each.nbytes for each in infos)
            problem = (
                f"it ends at byte {start + info.nbytes}, past the end of the file of {cursor.size} bytes "
                f"(its tensors end at byte {ends}); {CUT}"
            )
            raise cursor.error(field, problem, info.info_offset)
        data = whole[start : start + info.nbytes].reshape(-1, info.type.row_bytes(info.ne[0]))
        shape = info.ne[::-1]
        tensors[info.name] = GGUFTensor(
            cursor.path, info.name, info.type, shape, info.nbytes, start, info.info_offset, data
        )
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            problem = f"overlaps tensor {shown(before.name)} at byte {after.offset}"
            raise cursor.error(f"tensor {shown(after.name)}", problem, after.info_offset)
    return tensors
