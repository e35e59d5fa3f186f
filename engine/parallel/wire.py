"""What rank 0 tells the other ranks before each step: a few int32 numbers, the same for all of them.

A message is an operation and its numbers. Rows of sequences (`SequenceRows`) are their count, and of each the start,
the number of ids, the ids, the number of block tables, and each table behind its length.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from quengine.kernels.forward_batch import Phase
from quengine.runners.step_rows import SequenceRows

_PHASES: tuple[Phase, ...] = ("prefill", "decode")


class Operation(IntEnum):
    """The calls of a `ModelRunner` that all ranks make together."""

    FORWARD = 0
    HIDDEN = 1
    PARTS = 2
    READ_CACHE = 3
    WRITE_CACHE = 4
    CHOOSE = 5


class Forward(NamedTuple):
    """`ModelRunner.forward`."""

    phase: Phase
    rows: Sequence[SequenceRows]
    all_logits: bool
    eager: bool


class Hidden(NamedTuple):
    """`ModelRunner.hidden`."""

    rows: Sequence[SequenceRows]


class Parts(NamedTuple):
    """`ModelRunner.logits_of_parts`."""

    rows: Sequence[SequenceRows]
    parts: Sequence[Sequence[int]]


class ReadCache(NamedTuple):
    """`cached_rows.read_cached`."""

    start: int
    end: int


class WriteCache(NamedTuple):
    """`cached_rows.write_cached`, of so many heads: the values follow by broadcast."""

    start: int
    end: int
    kv_heads: int


class Choose(NamedTuple):
    """The experts [T][k] of the rows of the next step, by layer, in place of the routers' choice."""

    experts: Mapping[int, Sequence[Sequence[int]]]


Message = Forward | Hidden | Parts | ReadCache | WriteCache | Choose


def encode(message: Message) -> bytes:
    """The message as int32 numbers."""
    numbers: list[int]
    match message:
        case Forward(phase, rows, all_logits, eager):
            numbers = [Operation.FORWARD, _PHASES.index(phase), all_logits, eager, *_rows_numbers(rows)]
        case Hidden(rows):
            numbers = [Operation.HIDDEN, *_rows_numbers(rows)]
        case Parts(rows, parts):
            lists = [number for part in parts for number in (len(part), *part)]
            numbers = [Operation.PARTS, len(parts), *lists, *_rows_numbers(rows)]
        case ReadCache(start, end):
            numbers = [Operation.READ_CACHE, start, end]
        case WriteCache(start, end, kv_heads):
            numbers = [Operation.WRITE_CACHE, start, end, kv_heads]
        case Choose(experts):
            numbers = [Operation.CHOOSE, len(experts)]
            for layer, rows in experts.items():
                numbers += [layer, len(rows), *(number for row in rows for number in (len(row), *row))]
    return array("i", numbers).tobytes()


def decode(data: bytes) -> Message:
    """What `encode` was given. Raises ValueError for an operation that there is not."""
    numbers = array("i", data)
    source = iter(numbers)
    operation = Operation(next(source))
    if operation is Operation.FORWARD:
        phase, all_logits, eager = (next(source) for _ in range(3))
        return Forward(_PHASES[phase], _read_rows(source), bool(all_logits), bool(eager))
    if operation is Operation.HIDDEN:
        return Hidden(_read_rows(source))
    if operation is Operation.PARTS:
        parts = [_read_list(source) for _ in range(next(source))]
        return Parts(_read_rows(source), parts)
    if operation is Operation.CHOOSE:
        layers = ((next(source), next(source)) for _ in range(next(source)))
        return Choose({layer: [_read_list(source) for _ in range(rows)] for layer, rows in layers})
    if operation is Operation.READ_CACHE:
        return ReadCache(next(source), next(source))
    return WriteCache(next(source), next(source), next(source))


def _rows_numbers(rows: Sequence[SequenceRows]) -> Iterator[int]:
    yield len(rows)
    for ids, start, tables in rows:
        yield start
        yield len(ids)
        yield from ids
        yield len(tables)
        for table in tables:
            yield len(table)
            yield from table


def _read_rows(source: Iterator[int]) -> list[SequenceRows]:
    rows = []
    for _ in range(next(source)):
        start = next(source)
        ids = _read_list(source)
        rows.append(SequenceRows(ids, start, [_read_list(source) for _ in range(next(source))]))
    return rows


def _read_list(source: Iterator[int]) -> list[int]:
    return [next(source) for _ in range(next(source))]
