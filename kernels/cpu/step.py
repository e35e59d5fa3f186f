"""A compiled decode step: recorded once (step_recorder.py), run with any tokens, positions and block tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quengine.kernels.cpu.attention.attention import Visible
from quengine.kernels.cpu.runtime.threads import Launch, Program
from quengine.kernels.cpu.step_inputs import RunInputs
from quengine.kernels.cpu.step_recorder import Buffers, RecordedAttention, StepBatch, StepRecorder
from quengine.kernels.forward_batch import BlockTables, ForwardBatch
from quengine.kernels.hidden_rows import keep_rows, rows_before
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK


class CompiledStep:
    """A decode step of `rows` tokens, of sequences with at most `blocks` blocks in each of `groups` cache groups.
    adapters: the number of LoRA adapters; 0: rows have none. used: the numbers of those that rows may have.

    forward(batch) calls the backend's operations, `logits` last, and returns its result; nothing is computed during
    the call. Steps that never run at once may share `buffers`.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        rows: int,
        blocks: int,
        buffers: Buffers,
        groups: int = 1,
        adapters: int = 0,
        used: Sequence[int] = (),
    ) -> None:
        inputs = RunInputs(rows, blocks, groups)
        self._adapters = torch.zeros(adapters, rows) if adapters else None
        recorder = StepRecorder(rows, inputs, buffers)
        positions = torch.zeros(rows, dtype=torch.int64)
        batch = StepBatch(
            *("decode", inputs.ids, positions, inputs.tables),
            adapters=self._adapters,
            recorder=recorder,
            used_adapters=used,
        )
        self._logits = forward(batch)
        self.rows, self._inputs = rows, inputs
        self._ids, self._positions = inputs.ids.numpy(), inputs.positions.numpy()
        self._angles = inputs.angles.numpy()
        self._slots, self._tables = inputs.slots.numpy(), inputs.tables.numpy()
        self._kept, self._before, self._batch = recorder.kept, recorder.before, batch
        self._spread, self._one_earlier, self._of_rows = (
            recorder.spread,
            recorder.one_earlier,
            positions.numpy(),
        )
        numbers: dict[int, int] = {}
        launches: list[Launch] = []
        for stage in recorder.stages:
            numbers[id(stage)] = len(launches)
            launches += stage.launches()
        self._program = Program(launches)
        # Attentions with the same visible positions, each with the number of its launch.
        self._alike: dict[Visible, list[tuple[RecordedAttention, int]]] = {}
        for attention in recorder.attentions:
            self._alike.setdefault(attention.visible, []).append((attention, numbers[id(attention.stage)]))

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        tables: Sequence[BlockTables],
        angle_rows: Sequence[int] | None = None,
        adapters: Sequence[Sequence[float]] | None = None,
    ) -> Tensor:
        """Logits fp32 [rows, V] after each token; keys and values are written to the blocks of the tokens' tables.

        The logits are valid until the next run. Each table must have at least the blocks up to its token's position,
        within the cache. angle_rows: as in ForwardBatch, each no larger than its position. adapters: the scales of each
        LoRA adapter for the first rows; the others have none. Raises ValueError for a token outside the embedding or a
        position outside the context.
        """
        assert len(tokens) == len(positions) == len(tables) == self.rows
        vocabulary, context = self._inputs.vocabulary, self._inputs.context
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise ValueError(f"the embedding has rows 0 to {vocabulary - 1}, not {list(tokens)}")
        if not 0 <= min(positions) <= max(positions) < context:
            raise ValueError(f"positions {list(positions)} are not in a cache of {context}")
        self._of_rows[:] = positions
        if self._adapters is not None:
            self._adapters.zero_()
            for scales, given in zip(self._adapters, adapters or (), strict=False):
                scales[: len(given)] = torch.tensor(given)
        if self._one_earlier:
            positions = [max(0, position - 1) for position in positions]
        self._ids[:], self._positions[:] = tokens, positions
        for held, within in self._inputs.within.items():
            torch.mul(self._inputs.ids, self._inputs.ids < held, out=within)
        self._angles[:] = positions if angle_rows is None else angle_rows
        for i, (position, of_token) in enumerate(zip(positions, tables, strict=True)):
            used = position // BLOCK_SIZE + 1
            self._tables[0, i, used : used + 1] = of_token[0][used : used + 1] or PADDING_BLOCK
            for group, table in enumerate(of_token):
                filled = min(used, len(table))  # in a group with a state only the first entry counts
                self._tables[group, i, :filled] = table[:filled]
                self._slots[group, i] = table[filled - 1] * BLOCK_SIZE + position % BLOCK_SIZE
        lengths = [position + 1 for position in positions]
        for visible, attentions in self._alike.items():
            splits = visible.splits
            visible.set(lengths, attentions[0][0].seen)
            if visible.splits != splits:
                self._set_splits(visible.splits, attentions)
        for rows, kept in self._before:
            rows.copy_(rows_before(self._batch, kept))
        self._program.run()
        for rows, kept, newest in self._kept:
            keep_rows(self._batch, rows, kept, newest)
        if self._spread is not None:
            logits, drafted, every = self._spread
            every.index_copy_(1, drafted, logits)
        return self._logits

    def _set_splits(self, splits: int, attentions: list[tuple[RecordedAttention, int]]) -> None:
        """Sets the number of tasks of each attention kernel for `splits` KV splits."""
        for attention, number in attentions:
            tasks = attention.kv_heads * splits
            attention.stage.set_tasks(tasks)
            self._program.set_tasks(number, tasks)
