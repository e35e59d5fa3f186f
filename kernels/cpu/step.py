"""Runs a compiled decode step (step_recorder.py) for given tokens, positions and block tables."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quengine.kernels.cpu.attention.attention import Visible
from quengine.kernels.cpu.runtime.threads import Launch, Program
from quengine.kernels.cpu.step_recorder import RecordedAttention, StepRecorder
from quengine.kernels.forward_batch import BlockTables
from quengine.kernels.hidden_rows import keep_rows, rows_before
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK


class Step:
    """A compiled decode step of `rows` tokens; `logits` is the result of the recorder's `logits`."""

    def __init__(self, recorder: StepRecorder, logits: Tensor) -> None:
        self.rows = recorder.rows
        self._vocabulary, self._context = recorder.vocabulary, recorder.context
        self._tokens, self._positions = recorder.tokens.numpy(), recorder.positions.numpy()
        self._slots, self._tables = recorder.slots.numpy(), recorder.tables.numpy()
        self._logits = logits
        self._kept, self._before, self._batch = recorder.kept, recorder.before, recorder.batch
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

    def run(self, tokens: Sequence[int], positions: Sequence[int], tables: Sequence[BlockTables]) -> Tensor:
        """Logits fp32 [rows, V] after each token; keys and values are written to the blocks of the tokens' tables.

        They are valid until the next run. Each table must have at least the blocks up to its token's position, within
        the cache. Raises ValueError for a token outside the embedding or a position outside the context.
        """
        assert len(tokens) == len(positions) == len(tables) == self.rows
        self._check(tokens, positions)
        self._tokens[:], self._positions[:] = tokens, positions
        for i, (position, of_token) in enumerate(zip(positions, tables, strict=True)):
            used = position // BLOCK_SIZE + 1
            self._tables[0, i, used : used + 1] = of_token[0][used : used + 1] or PADDING_BLOCK
            for group, table in enumerate(of_token):
                filled = min(used, len(table))  # of a group with a state the first entry counts alone
                self._tables[group, i, :filled] = table[:filled]
                newest = table[filled - 1]
                self._slots[group, i] = newest * BLOCK_SIZE + position % BLOCK_SIZE
        return self._run([position + 1 for position in positions])

    def _check(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        for token, position in zip(tokens, positions, strict=True):
            if not 0 <= token < self._vocabulary:
                raise ValueError(f"the embedding has rows 0 to {self._vocabulary - 1}; asked for {token}")
            if not 0 <= position < self._context:
                raise ValueError(f"position {position} is not in a cache of {self._context}")

    def _run(self, lengths: list[int]) -> Tensor:
        for visible, attentions in self._alike.items():
            window, splits = attentions[0][0].window, visible.splits
            visible.set(lengths, window)
            if visible.splits == splits:
                continue
            for attention, number in attentions:
                tasks = attention.kv_heads * visible.splits
                attention.stage.set_tasks(tasks)
                self._program.set_tasks(number, tasks)
        for rows, kept in self._before:
            rows.copy_(rows_before(self._batch, kept))
        self._program.run()
        for rows, kept, newest in self._kept:
            keep_rows(self._batch, rows, kept, newest)
        return self._logits
