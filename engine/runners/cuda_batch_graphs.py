"""The rows of a batched decode step on a CUDA device: inputs, block tables and settings, and the captured steps.

One set of rows serves all graphs: a graph of B rows reads the first B. What the host changes is gathered and sent
before the next launch as pairs of place and value, in one copy. Knows rows; not which sequence sits where, nor when.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.cuda.backend import has_dependent_launch
from quengine.kernels.cuda.sampling.batch_rows import settle_rows
from quengine.kernels.cuda.sampling.sampling import DecodeState, SamplingBuffers, sample_step
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.runners.graph_capture import capture
from quengine.runners.graph_nodes import GraphNodes, count_nodes
from quengine.runners.graph_sampling import GraphKey, Sampled, settings_of

_ALIGNED = 8
"""Rows are a multiple of this, so that each vector begins where a kernel may read 16 bytes at once."""

_PENDING = 4
"""Steps whose tokens are not read yet, at most, where it is not said otherwise."""


class _Board:
    """The device's input of R rows, one int32 vector: live [R], positions [R], tokens int64 [R], tables [R, blocks]."""

    def __init__(self, rows: int, blocks: int, spare: int, device: torch.device) -> None:
        self.rows = -(-rows // _ALIGNED) * _ALIGNED
        self.blocks = blocks
        self.all = torch.zeros(self.rows * (4 + blocks), dtype=torch.int32, device=device)
        self.live = self.all[: self.rows]
        self.positions = self.all[self.rows : 2 * self.rows]
        self.tokens = self.all[2 * self.rows : 4 * self.rows].view(torch.int64)
        self.tables = self.all[4 * self.rows :].view(self.rows, blocks)
        self.tables.fill_(spare)
        self._changes: dict[int, int] = {}

    def set_live(self, row: int, live: bool) -> None:
        self._changes[row] = int(live)

    def set_input(self, row: int, token: int, position: int) -> None:
        self._changes[self.rows + row] = position
        self._changes[2 * self.rows + 2 * row] = token  # the low half; the high one stays 0

    def set_blocks(self, row: int, first: int, blocks: Seq[int]) -> None:
        start = 4 * self.rows + row * self.blocks + first
        self._changes.update(zip(range(start, start + len(blocks)), blocks, strict=True))

    def send(self) -> None:
        """The changes since the last call, in stream order, without waiting for the device."""
        if not self._changes:
            return
        pairs = torch.tensor([list(self._changes), list(self._changes.values())])
        if self.all.is_cuda:
            pairs = pairs.pin_memory().to(self.all.device, non_blocking=True)
        self.all.index_copy_(0, pairs[0], pairs[1].to(torch.int32))
        self._changes.clear()


class _HostTokens:
    """The tokens of a step on their way to pinned memory."""

    def __init__(self, memory: Tensor, arrived: torch.cuda.Event, logits: Tensor) -> None:
        self._memory = memory
        self._arrived = arrived
        self._logits = logits
        self._tokens: list[int] | None = None

    def wait(self) -> list[int]:
        if self._tokens is None:
            self._arrived.synchronize()
            self._tokens = self._memory.tolist()
        return self._tokens

    def logits(self, row: int) -> Tensor:
        return self._logits[row].cpu()


class BatchGraphs:
    """`cuda_batch.BatchDevice` for up to `rows` sequences of a paged cache. Graphs are captured as they are needed.

    `consecutive`: a sequence may have several rows of a step. `pending`: steps whose tokens are not read yet, at most.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: int,
        consecutive: bool = False,
        pending: int = _PENDING,
    ) -> None:
        device = decoder.backend.device
        self.decoder, self.cache = decoder, cache
        self.board = _Board(rows, -(-cache.ctx_size // BLOCK_SIZE), PADDING_BLOCK, device)
        self.rows = self.board.rows
        self.history = torch.zeros(self.rows, cache.ctx_size, dtype=torch.int32, device=device)
        self.chosen = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self.nodes: GraphNodes | None = None
        self.consecutive = consecutive
        self._host = torch.empty(pending, self.rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._events = [torch.cuda.Event() for _ in range(pending)]  # type: ignore[no-untyped-call]
        self._buffers: dict[GraphKey, SamplingBuffers] = {}
        self._graphs: dict[tuple[int, GraphKey], tuple[torch.cuda.CUDAGraph, Tensor, GraphNodes]] = {}
        self._pool: Any = None
        self._launched = 0

    @property
    def recorded(self) -> list[tuple[int, GraphKey]]:
        """Steps that are captured."""
        return list(self._graphs)

    def clear(self, row: int) -> None:
        self.board.set_live(row, False)
        self.board.set_input(row, 0, 0)
        self.board.set_blocks(row, 0, [PADDING_BLOCK])

    def seat(self, row: int, blocks: Seq[int], entries: int) -> None:
        rest = min(entries, self.board.blocks) - len(blocks)
        self.board.set_live(row, True)
        self.board.set_blocks(row, 0, [*blocks, *[PADDING_BLOCK] * rest])

    def extend(self, row: int, first: int, blocks: Seq[int]) -> None:
        self.board.set_blocks(row, first, blocks)

    def place(self, row: int, token: int, position: int) -> None:
        self.board.set_input(row, token, position)

    def configure(self, row: int, key: GraphKey, sequence: Sampled, ids: list[int]) -> None:
        if sequence.params.penalizes:
            self.history[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self._room(key).set(row, settings_of(sequence), ids, dict(sequence.params.logit_bias))

    @torch.no_grad()
    def record(self, rows: int, key: GraphKey) -> None:
        """Capture such a step, unless it is."""
        if (rows, key) not in self._graphs:
            self._graphs[rows, key] = self._capture(rows, key)

    @torch.no_grad()
    def launch(self, rows: int, key: GraphKey) -> _HostTokens:
        self.record(rows, key)
        graph, logits, self.nodes = self._graphs[rows, key]
        self.board.send()
        graph.replay()
        slot = self._launched % len(self._events)
        self._launched += 1
        self._host[slot].copy_(self.chosen, non_blocking=True)
        self._events[slot].record()
        return _HostTokens(self._host[slot], self._events[slot], logits)

    def compute(self, board: _Board, rows: int, history: Tensor, buffers: SamplingBuffers) -> Tensor:
        """A step of the first `rows` rows of a board: logits fp32 [rows, vocab]; `chosen` has the tokens."""
        tokens, positions = board.tokens[:rows], board.positions[:rows]
        shares = self.consecutive and rows > 1
        batch = ForwardBatch("decode", tokens, positions, board.tables[None, :rows], shares_sequences=shares)
        logits = self.decoder.forward(batch, self.cache.layers)
        state = DecodeState(tokens, positions, history[:rows])
        sample_step(logits, state, buffers, has_dependent_launch(self.decoder.backend.device))
        settle_rows(tokens, positions, board.live[:rows], self.chosen[:rows])
        return logits

    def rehearse(self, rows: int, key: GraphKey) -> None:
        """A step on rows that are nobody's: compiles what a step takes, and changes nothing but the spare block."""
        device = self.decoder.backend.device
        board = _Board(rows, self.board.blocks, PADDING_BLOCK, device)
        history = torch.zeros(board.rows, self.cache.ctx_size, dtype=torch.int32, device=device)
        self.compute(board, rows, history, self._new_room(key, board.rows))

    def _room(self, key: GraphKey) -> SamplingBuffers:
        if key not in self._buffers:
            self._buffers[key] = self._new_room(key, self.rows)
        return self._buffers[key]

    def _new_room(self, key: GraphKey, rows: int) -> SamplingBuffers:
        vocab, device = self.decoder.config.vocab_size, self.decoder.backend.device
        return SamplingBuffers.allocate(rows, vocab, key.top_k, device, key.bias, key.penalties)

    def _capture(self, rows: int, key: GraphKey) -> tuple[torch.cuda.CUDAGraph, Tensor, GraphNodes]:
        buffers = self._room(key)  # before the capture, so that graphs of other sizes share them
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, logits = capture(
            lambda: self.rehearse(rows, key),
            lambda: self.compute(self.board, rows, self.history, buffers),
            self._pool,
        )
        return graph, logits, count_nodes(graph.raw_cuda_graph())
