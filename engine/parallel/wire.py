"""What rank 0 tells the other ranks before each step: a few int32 numbers, the same for all of them.

A message is an operation and its numbers. Rows of sequences (`SequenceRows`) are their count, and of each the start,
the number of ids, the ids, the number of block tables, and each table behind its length.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from itertools import chain
from typing import NamedTuple, TypeAlias

from quengine.block_manager import StateCopy
from quengine.kernels.forward_batch import Phase
from quengine.runners.graph_keys import GraphKey, SamplingKind
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
    LAUNCH = 6
    CONFIGURE = 7
    CAPTURE = 8
    PROMPTS = 9
    COPY_STATES = 10


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
    """`cached_rows.write_cached`: the values follow by broadcast."""

    start: int
    end: int


class Choose(NamedTuple):
    """The experts [T][k] of the rows of the next step, by layer, in place of the routers' choice."""

    experts: Mapping[int, Sequence[Sequence[int]]]


class Launch(NamedTuple):
    """`CudaGraphs.launch`, on inputs with these changes, by index."""

    key: GraphKey
    changes: Mapping[int, int]


class Configure(NamedTuple):
    """`CudaGraphs.set_sampling`. `settings`: the fields of `Settings`. bias: by token."""

    slot: int
    kind: SamplingKind
    settings: Mapping[str, float]
    bias: Mapping[int, float]
    ids: Sequence[int]


class Capture(NamedTuple):
    """`CudaGraphs.capture`."""

    key: GraphKey


class Prompts(NamedTuple):
    """`CudaGraphs.run_prompts`."""

    lengths: Sequence[int]


class CopyStates(NamedTuple):
    """`ModelRunner.copy_states`."""

    copies: Sequence[StateCopy]


Step: TypeAlias = Forward | Hidden | Parts | ReadCache | WriteCache | CopyStates | Choose
Graphs: TypeAlias = Launch | Configure | Capture | Prompts
Message: TypeAlias = Step | Graphs

Together = Callable[[Message], AbstractContextManager[None]]


def alone(_message: Message) -> AbstractContextManager[None]:
    """`Together` where there are no other ranks."""
    return nullcontext()


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
        case WriteCache(start, end):
            numbers = [Operation.WRITE_CACHE, start, end]
        case CopyStates(copies):
            numbers = [Operation.COPY_STATES, len(copies), *chain.from_iterable(copies)]
        case Choose(experts):
            numbers = [Operation.CHOOSE, len(experts)]
            for layer, chosen in experts.items():
                numbers += [layer, len(chosen), *(number for row in chosen for number in (len(row), *row))]
        case Launch(key, changes):
            pairs = [number for pair in changes.items() for number in pair]
            numbers = [Operation.LAUNCH, *_key_numbers(key), len(pairs), *pairs]
        case Configure(slot, kind, settings, bias, ids):
            text = json.dumps([settings, list(bias.items())]).encode()
            numbers = [Operation.CONFIGURE, slot, *kind, len(text), *text, len(ids), *ids]
        case Capture(key):
            numbers = [Operation.CAPTURE, *_key_numbers(key)]
        case Prompts(lengths):
            numbers = [Operation.PROMPTS, len(lengths), *lengths]
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
    if operation is Operation.LAUNCH:
        key, pairs = _read_key(source), _read_list(source)
        return Launch(key, dict(zip(pairs[::2], pairs[1::2], strict=True)))
    if operation is Operation.CONFIGURE:
        slot, kind = next(source), _read_kind(source)
        settings, bias = json.loads(bytes(_read_list(source)))
        return Configure(
            slot, kind, settings, {int(token): value for token, value in bias}, _read_list(source)
        )
    if operation is Operation.CAPTURE:
        return Capture(_read_key(source))
    if operation is Operation.PROMPTS:
        return Prompts(_read_list(source))
    if operation is Operation.CHOOSE:
        layers = ((next(source), next(source)) for _ in range(next(source)))
        return Choose({layer: [_read_list(source) for _ in range(rows)] for layer, rows in layers})
    if operation is Operation.READ_CACHE:
        return ReadCache(next(source), next(source))
    if operation is Operation.COPY_STATES:
        fields = ((next(source), next(source), next(source)) for _ in range(next(source)))
        return CopyStates([StateCopy(*each) for each in fields])
    return WriteCache(next(source), next(source))


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


def _key_numbers(key: GraphKey) -> list[int]:
    kind = key.sampling
    return [_PHASES.index(key.phase), key.rows, key.sequences, kind is not None, *(kind or (0, 0, 0))]


def _read_key(source: Iterator[int]) -> GraphKey:
    phase, rows, sequences, samples = (next(source) for _ in range(4))
    kind = _read_kind(source)
    return GraphKey(_PHASES[phase], rows, sequences, kind if samples else None)


def _read_kind(source: Iterator[int]) -> SamplingKind:
    return SamplingKind(next(source), bool(next(source)), bool(next(source)))


def _read_list(source: Iterator[int]) -> list[int]:
    return [next(source) for _ in range(next(source))]
