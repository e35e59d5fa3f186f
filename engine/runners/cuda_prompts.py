"""Prompts' steps on a CUDA device as captured graphs.

A step of a prompt is some 300 launches, 10 to 100 us of the host's time each, whatever the rows: with fewer than 500 to
1000 the GPU waits for them. So a step is recorded for a number of rows and one of sequences, when such a one comes for
the second time, or ahead. What differs from step to step, ids, positions, blocks and which rows belong together, is
sent in front of it. Rows that fill a step up write where nothing is kept, and nobody reads them.

Knows chunks of tokens and blocks; not requests, sampling, or kernels.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quengine.kernels.cuda.attention.attention_prefill import tile_rows
from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS, tile_entries
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.forward_batch import ForwardBatch, PrefillTiles, pad_block_tables
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kv_cache import KVCache, blocks_for
from quengine.models.decoder import Decoder
from quengine.runners.graph_capture import capture

ROWS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Numbers of rows of a step. Matmuls take 8, 16, 32, 64 or 128 rows, or a multiple of 128, at a time, so rows that fill
a step up cost nearly nothing."""

SEQUENCES = (1, 4, 16)
"""Numbers of sequences of a step."""

RECORDED_AT = 2
"""The time a step of some size is met at which it is recorded."""

_ALIGNED = 4
"""int32 entries: each vector begins where a kernel may read 16 bytes at once."""


class PromptChunk(NamedTuple):
    """Tokens `ids` at positions `start`, ... of a sequence with the block table `blocks`."""

    ids: Seq[int]
    start: int
    blocks: Seq[int]


class StepSize(NamedTuple):
    """Rows and sequences of a step that is recorded."""

    rows: int
    sequences: int


class Replayed(Protocol):
    """A CUDA graph."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Tensor], Callable[[], Tensor], Any], tuple[Replayed, Tensor]]


class Board:
    """The device's input of a step of some size: one int32 vector, and the block tables, one a sequence and behind them
    that of the rows that fill up.

    `longest`: most rows of a chunk; `tile_rows`: query rows of an attention tile. `padding_block`: of padding rows.
    """

    def __init__(
        self,
        size: StepSize,
        longest: int,
        tile_rows: int,
        ctx_size: int,
        padding_block: int,
        device: torch.device,
    ) -> None:
        self.size, self.padding_block = size, padding_block
        self.tile_rows, self._ctx_size, self._device = tile_rows, ctx_size, device
        rows, sequences = size
        self.tiles = (rows + (tile_rows - 1) * sequences) // tile_rows
        sizes = (2 * rows, 2 * sequences, rows, rows, TILE_FIELDS * self.tiles)
        ends = list(accumulate(-(-count // _ALIGNED) * _ALIGNED for count in sizes))
        self._places = list(zip([0, *ends], sizes, strict=False))
        self._all = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        parts = [self._all[first : first + count] for first, count in self._places]
        blocks = blocks_for(ctx_size)
        self.tables = torch.full((sequences + 1, blocks), padding_block, dtype=torch.int32, device=device)
        tiles = PrefillTiles(parts[3], parts[4].view(-1, TILE_FIELDS), tile_rows, longest, 0, 0)
        self.batch = ForwardBatch(
            "prefill",
            token_ids=parts[0].view(torch.int64),
            positions=parts[2],
            block_tables=self.tables,
            logits_rows=parts[1].view(torch.int64),
            tiles=tiles,
        )
        self.send([])

    def send(self, chunks: Seq[PromptChunk]) -> None:
        """Make these chunks the next step's, in stream order, without waiting for the device."""
        if chunks:
            tables = self._pinned(pad_block_tables([chunk.blocks for chunk in chunks], self.padding_block))
            self.tables[: len(chunks), : tables.shape[1]].copy_(tables, non_blocking=True)
        entries = [0] * self._all.shape[0]
        for (first, _), part in zip(self._places, self._entries(chunks), strict=True):
            entries[first : first + len(part)] = part
        self._all.copy_(self._pinned(entries), non_blocking=True)

    def _entries(self, chunks: Seq[PromptChunk]) -> tuple[list[int], ...]:
        """The vector's parts, each as far as it is not zeros."""
        lengths = [len(chunk.ids) for chunk in chunks]
        sequences, tiles = tile_entries([chunk.start for chunk in chunks], lengths, self.tile_rows)
        positions = [chunk.start + row for chunk in chunks for row in range(len(chunk.ids))]
        rest = self.size.rows - len(positions)
        positions += [min(row % BLOCK_SIZE, self._ctx_size - 1) for row in range(rest)]
        sequences += [self.size.sequences] * rest
        last = [end - 1 for end in accumulate(lengths)]
        ids = [token for chunk in chunks for token in chunk.ids]
        return _halves(ids), _halves(last), positions, sequences, tiles

    def _pinned(self, values: list[Any]) -> Tensor:
        made = torch.tensor(values, dtype=torch.int32)
        return made.pin_memory() if self._device.type == "cuda" else made


@dataclass(frozen=True)
class _Step:
    board: Board
    graph: Replayed
    logits: Tensor


class PromptGraphs:
    """The recorded steps of a model's prompts; see the module docstring."""

    def __init__(self, decoder: Decoder, cache: KVCache, capture: Capture = capture) -> None:
        self.decoder = decoder
        self.cache = cache
        self._capture = capture
        self._met: Counter[StepSize] = Counter()
        self._steps: dict[StepSize, _Step] = {}
        self._rooms_left = -1
        self._pool: Any = None

    @property
    def recorded(self) -> list[StepSize]:
        return list(self._steps)

    def compute(self, chunks: Seq[PromptChunk]) -> Tensor | None:
        """Logits fp32 [len(chunks), vocab] after the last token of each; None where they are to be computed eagerly."""
        size = self.size_of(chunks)
        if size is None:
            return None
        self._met[size] += 1
        if size not in self._steps and self._met[size] < RECORDED_AT:
            return None
        self.record(size)
        step = self._steps[size]
        step.board.send(chunks)
        step.graph.replay()
        return step.logits[: len(chunks)].clone()

    def size_of(self, chunks: Seq[PromptChunk]) -> StepSize | None:
        """The step that takes these chunks, if one does."""
        count = sum(len(chunk.ids) for chunk in chunks)
        rows = next((rows for rows in ROWS if rows >= count), None)
        sequences = next((sequences for sequences in SEQUENCES if sequences >= len(chunks)), None)
        if rows is None or sequences is None or count < 2:
            return None
        return StepSize(rows, sequences)

    def sizes(self, mixed_rows: int) -> list[StepSize]:
        """Those that are met first: of one prompt, and of several in steps of `mixed_rows`."""
        sizes = [StepSize(rows, 1) for rows in ROWS if rows <= self.decoder.chunk_size]
        if mixed_rows in ROWS:
            sizes += [StepSize(mixed_rows, sequences) for sequences in SEQUENCES[1:]]
        return sizes

    def record(self, size: StepSize) -> None:
        """Record such a step, unless it is."""
        self._forget_stale()
        if size in self._steps:
            return
        if self._pool is None and self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        board = self._board(size)
        graph, logits = self._capture(lambda: self._run(board), lambda: self._run(board), self._pool)
        self._forget_stale()
        self._steps[size] = _Step(board, graph, logits)

    def rehearse(self, size: StepSize) -> None:
        """Such a step of nobody's rows, eagerly."""
        self._run(self._board(size))

    @torch.no_grad()
    def _run(self, board: Board) -> Tensor:
        return self.decoder.forward(board.batch, self.cache.layers)

    def _board(self, size: StepSize) -> Board:
        longest = min(size.rows, self.decoder.chunk_size)
        tile = tile_rows(self.decoder.config.head_dim, longest, self._device, self._backend.batch_invariant)
        return Board(size, longest, tile, self.cache.ctx_size, self.cache.padding_block, self._device)

    def _forget_stale(self) -> None:
        """Steps that were recorded with memory which has since been let go of."""
        if self._rooms_left != self._backend.rooms_left:
            self._rooms_left = self._backend.rooms_left
            self._steps.clear()

    @property
    def _backend(self) -> CudaBackend:
        backend = self.decoder.backend
        assert isinstance(backend, CudaBackend)
        return backend

    @property
    def _device(self) -> torch.device:
        return self.decoder.backend.device


def _halves(values: Seq[int]) -> list[int]:
    """The int32 halves of numbers that an int64 vector holds."""
    return [half for value in values for half in (value, 0)]
