"""Reads tokenizer.model, SentencePiece's file: a protocol buffer (sentencepiece_model.proto, ModelProto).

Of it: the pieces (field 1: text 1, score 2, type 3), the kind of model (field 2, the trainer's, in it field 3), and
what becomes of spaces (field 3, the normalizer's, in it 3 and 4).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quengine.errors import EngineError

_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True)
class VocabularyPiece:
    """`type`, as in GGUF: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""

    text: bytes
    score: float
    type: int


def read_pieces(path: Path) -> list[VocabularyPiece]:
    """The pieces in the order of their ids. Raises EngineError for another kind of file, or a model that is not BPE."""
    pieces, kind = list[VocabularyPiece](), _UNIGRAM
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes):
                kind = dict(_fields(value)).get(3, _UNIGRAM)  # type: ignore[assignment]
    except (IndexError, struct.error):
        raise EngineError(f"{path}: not SentencePiece's file, or cut short") from None
    if kind != _BPE or not pieces:
        what = "has no pieces" if not pieces else f"is of model type {kind}, and BPE (2) alone is converted"
        raise EngineError(f"{path}: {what}")
    return pieces


def read_spaces(path: Path) -> tuple[bool, bool]:
    """Whether a text gets a space in front, and whether spaces beside spaces are left out. Raises EngineError."""
    found: dict[int, int | float | bytes] = {}
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 3 and isinstance(value, bytes):
                found = dict(_fields(value))
    except (IndexError, struct.error):
        raise EngineError(f"{path}: not SentencePiece's file, or cut short") from None
    return bool(found.get(3, 1)), bool(found.get(4, 1))


def _piece(data: bytes) -> VocabularyPiece:
    found = dict(_fields(data))
    score, kind, text = found.get(2, 0.0), found.get(3, 1), found.get(1, b"")
    assert isinstance(text, bytes) and isinstance(kind, int)
    return VocabularyPiece(text, float(score), kind)  # type: ignore[arg-type]


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(number, value) of each field. Raises IndexError or struct.error if the data end early."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 5:
            yield number, struct.unpack_from("<f", data, at)[0]
            at += 4
        elif wire == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise IndexError
            yield number, data[at : at + size]
            at += size
        elif wire == 1:
            yield number, struct.unpack_from("<d", data, at)[0]
            at += 8
        else:
            raise IndexError


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError
