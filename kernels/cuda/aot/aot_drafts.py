"""The cases of steps that draft, verify and accept on the device."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from quengine.kernels.cuda.aot.meta_backend import META, MetaBackend, empty
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.sampling.draft_rows import accept, enter, place
from quengine.kernels.draft_rows import Drafting, Newest, PlacedRows
from quengine.kernels.forward_batch import ForwardBatch, PendingStates
from quengine.kernels.kv.cache_types import BLOCK_SIZE

_SEQUENCES, _MOST, _WINDOW = 8, 3, 6


def draft_cases(
    context: int,
    archs: tuple[int, ...],
    rows_of_one_sequence: ForwardBatch,
    gated_delta: Callable[[ForwardBatch, MetaBackend], None],
) -> Iterator[tuple[str, bool, tuple[int, ...], Callable[[CudaBackend], object]]]:
    """The fields of each case. gated_delta: a step of a layer with a state, given its rows."""
    yield "rows that draft, and what they accept", True, archs, partial(_rows, context)
    yield "states after accepted rows", True, archs, partial(_states, rows_of_one_sequence, gated_delta)


def _rows(context: int, backend: CudaBackend) -> None:
    numbers = partial(empty, dtype=torch.int32)
    of_sequences, slots = numbers(_SEQUENCES), _SEQUENCES + 1
    recent = numbers(_SEQUENCES, _WINDOW)
    drafting = Drafting(of_sequences, of_sequences, of_sequences, of_sequences, recent)
    history, turn = numbers(slots, context), numbers(1)
    newest = Newest(empty(slots, dtype=torch.int64), numbers(slots), history)
    tables = numbers(2, slots, context // BLOCK_SIZE)
    enter(drafting, newest, turn, 4, backend.pdl)
    for first, count in ((1 - _WINDOW, _WINDOW), (1, 1), (0, _MOST + 1)):
        rows = _SEQUENCES * count
        held = numbers(2, rows, context // BLOCK_SIZE)
        placed = PlacedRows(empty(rows, dtype=torch.int64), numbers(rows), held, numbers(rows), of_sequences)
        place(drafting, newest, history, tables, first, count, placed, backend.pdl)
    sampled = empty(_SEQUENCES * (_MOST + 1), dtype=torch.int64)
    results = torch.empty(4, _SEQUENCES * (2 * _MOST + 1), dtype=torch.int64, device=META)
    accept(drafting, newest, history, sampled, of_sequences, results, turn, backend.pdl)


def _states(
    batch: ForwardBatch, gated_delta: Callable[[ForwardBatch, MetaBackend], None], backend: CudaBackend
) -> None:
    assert isinstance(backend, MetaBackend)
    pending = list[PendingStates]()
    gated_delta(replace(batch, pending=pending), backend)
    for states in pending:
        states.advance(empty(len(batch) // (_MOST + 1), dtype=torch.int32))
