"""Writes GGUF files (version 3) whose metadata and tensor types are known before the tensors' bytes are."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import BinaryIO, cast

import numpy as np

from quengine.models.gguf.cursor import ARRAY, SCALAR_TYPES, STRING, StringArray
from quengine.models.gguf.header import Value
from quengine.models.gguf.tensor_types import TYPE_BY_NAME

_NUMBERS = {kind.name: number for number, kind in SCALAR_TYPES.items()} | {"string": STRING}
_ARRAY_OF = "array of "


@dataclass(frozen=True)
class Field:
    """One metadata entry: `type_name` as `header.Entry` has it, e.g. "uint32" or "array of string"."""

    type_name: str
    value: Value | Sequence[str | bytes]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor to be written: `shape` in torch order, `type_name` a tensor type."""

    name: str
    shape: tuple[int, ...]
    type_name: str

    @property
    def nbytes(self) -> int:
        return TYPE_BY_NAME[self.type_name].row_bytes(self.shape[-1]) * prod(self.shape[:-1])


def padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def header_bytes(fields: Mapping[str, Field], tensors: Sequence[TensorInfo], alignment: int) -> bytes:
    """Everything before the first tensor's data, padding included. The tensors' data follow in order, each padded."""
    parts = [b"GGUF", struct.pack("<Iqq", 3, len(tensors), len(fields))]
    parts += [_string(key) + _field(field) for key, field in fields.items()]
    offset = 0
    for tensor in tensors:
        ne = tensor.shape[::-1]
        number = TYPE_BY_NAME[tensor.type_name].number
        parts.append(_string(tensor.name) + struct.pack(f"<I{len(ne)}qIQ", len(ne), *ne, number, offset))
        offset += padded(tensor.nbytes, alignment)
    header = b"".join(parts)
    return header + bytes(padded(len(header), alignment) - len(header))


def file_bytes(fields: Mapping[str, Field], tensors: Sequence[TensorInfo], alignment: int) -> int:
    """The size of the whole file."""
    data = sum(padded(tensor.nbytes, alignment) for tensor in tensors)
    return len(header_bytes(fields, tensors, alignment)) + data


def write_padding(file: BinaryIO, nbytes: int, alignment: int) -> None:
    """Zeros after a tensor of `nbytes` bytes."""
    file.write(bytes(padded(nbytes, alignment) - nbytes))


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _field(field: Field) -> bytes:
    kind, value = field.type_name, field.value
    if not kind.startswith(_ARRAY_OF):
        return struct.pack("<I", _NUMBERS[kind]) + _scalar(kind, value)
    element = kind.removeprefix(_ARRAY_OF)
    assert isinstance(value, Sequence | np.ndarray)
    begin = struct.pack("<IIQ", ARRAY, _NUMBERS[element], len(value))
    if isinstance(value, StringArray):
        return begin + b"".join(_string(value.raw(i)) for i in range(len(value)))
    if element == "string":
        return begin + b"".join(_string(each) for each in cast(Sequence[str | bytes], value))
    return begin + np.asarray(value).astype(SCALAR_TYPES[_NUMBERS[element]].dtype).tobytes()


def _scalar(kind: str, value: object) -> bytes:
    if kind == "string":
        assert isinstance(value, str | bytes)
        return _string(value)
    return SCALAR_TYPES[_NUMBERS[kind]].layout.pack(value)
