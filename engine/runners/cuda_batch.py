"""Who sits in which row of a batched decode step on a device, and how far ahead of the host each row is.

A row keeps its sequence from call to call, and the device moves it on by itself: it knows the token that it chose. Only
what changes is sent: a sequence that came or went, a block more. Where it can, a step is launched before the tokens of
the one before it are read, so that the host's work on them costs no time; a result belongs to a row and is still good
when others came or went meanwhile. Newcomers find the others one result ahead; after a few calls those are held back
for a step, and all are a step ahead again.

A row whose settings the device cannot sample (log-probabilities, a constraint) is sampled on the host from its logits,
and while there is one no step is launched ahead. Knows nothing of graphs, kernels or text.
"""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.request.sequence import Sequence
from quengine.runner import Result
from quengine.runners.graph_sampling import GREEDY, GraphKey, Sampled
from quengine.sampler import Sample

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows for which a step is captured: matmuls take 8 rows at a time, above 128 blocks of 128 or 256, and
from 16 on a row more or less costs little beside the weights."""

_PATIENCE = 4
"""Calls in which rows are not equally far ahead, and the device waits for the host, before a step is spent on it."""


def bucket_of(rows: int) -> int:
    """The smallest number of rows captured that holds so many."""
    return next(bucket for bucket in BUCKETS if bucket >= rows)


class StepTokens(Protocol):
    """What a step chooses, row by row."""

    def wait(self) -> Seq[int]:
        """The chosen tokens, NO_TOKEN where there was none to choose."""
        ...

    def logits(self, row: int) -> Tensor:
        """fp32 [vocab] on the host; only until the next step is launched."""
        ...


class BatchDevice(Protocol):
    """A device's rows. All calls take effect, in order, before the next launch."""

    def clear(self, row: int) -> None:
        """Nobody's row: it touches the spare block only."""
        ...

    def seat(self, row: int, blocks: Seq[int], entries: int) -> None:
        """Give a row a block table: `blocks`, and the spare block in the rest of its first `entries`."""
        ...

    def extend(self, row: int, first: int, blocks: Seq[int]) -> None:
        """Entries `first`, ... of a row's block table."""
        ...

    def place(self, row: int, token: int, position: int) -> None:
        """The row's next input."""
        ...

    def configure(self, row: int, key: GraphKey, sequence: Sampled, ids: list[int]) -> None:
        """How steps of `key` sample the row; `ids` are its tokens with the next input."""
        ...

    def launch(self, rows: int, key: GraphKey) -> StepTokens:
        """Start a step of the first `rows` rows, a bucket; returns at once."""
        ...


@dataclass(eq=False)
class _Row:
    """A sequence at its place. `position` is that of the next launch's input; `ready` are launched steps whose result
    it was not given yet, with the row's number then; `token` the newest that it was given by the device, which is the
    input behind it; `key` what its settings were sent for."""

    sequence: Sequence
    number: int
    wanted: GraphKey | None
    blocks: list[int]
    written: int
    position: int = -1
    token: int = NO_TOKEN
    key: GraphKey | None = None
    ready: deque[tuple[StepTokens, int]] = field(default_factory=deque)

    @property
    def free(self) -> bool:
        """Whether the device can go on with it by itself."""
        return self.wanted is not None and self.sequence.next_is_newest

    def chosen(self) -> list[int]:
        """The tokens of `ready`, waiting for them."""
        return [step.wait()[number] for step, number in self.ready]


class BatchDecoder:
    """See the module docstring.

    `alone` computes one sequence's token eagerly, and says what is wrong with its logits; `sample_row` samples a row on
    the host.
    """

    def __init__(
        self,
        device: BatchDevice,
        alone: Callable[[Sequence], Result],
        sample_row: Callable[[Sequence, Tensor], Result],
    ) -> None:
        self._device = device
        self._alone = alone
        self._sample_row = sample_row
        self._rows: dict[Sequence, _Row] = {}
        self._bucket = 1
        self._key = GREEDY
        self._uneven = 0

    def step(self, sequences: Seq[Sequence]) -> list[Result]:
        """`Runner.decode`."""
        rows = self._seated(sequences)
        self._choose_key(rows)
        for row in rows:
            self._bring_up(row)
        if not all(row.ready for row in rows):
            self._launch(rows)
        if all(row.free for row in rows) and any(_goes_on(row.sequence) for row in rows):
            self._launch_ahead(rows)
        return [self._result(row) for row in rows]

    def _seated(self, sequences: Seq[Sequence]) -> list[_Row]:
        """The sequences' rows, in their order, all within the smallest bucket."""
        present = set(sequences)
        for sequence, row in list(self._rows.items()):
            if sequence not in present or row.blocks is not sequence.block_tables[0]:
                self._leave(row)
        self._bucket = bucket_of(len(sequences))
        taken = {row.number for row in self._rows.values()}
        places = iter([number for number in range(self._bucket) if number not in taken])
        for row in [row for row in self._rows.values() if row.number >= self._bucket]:
            self._move(row, next(places))
        for sequence in sequences:
            if sequence not in self._rows:
                wanted = GraphKey.of(sequence.params)
                row = _Row(
                    sequence, next(places), wanted, sequence.block_tables[0], len(sequence.block_tables[0])
                )
                self._rows[sequence] = row
                self._device.seat(row.number, row.blocks, entries_of(sequence))
                self._uneven = 0
        return [self._rows[sequence] for sequence in sequences]

    def _leave(self, row: _Row) -> None:
        del self._rows[row.sequence]
        self._device.clear(row.number)

    def _move(self, row: _Row, number: int) -> None:
        """To another place; a result under way stays its own."""
        newest = row.chosen()[-1] if row.ready else row.token
        self._device.clear(row.number)
        row.number, row.key = number, None
        self._device.seat(number, row.blocks, entries_of(row.sequence))
        self._device.place(number, max(newest, 0), row.position)

    def _choose_key(self, rows: list[_Row]) -> None:
        """The room that these sequences' settings need; more than that as long as somebody stays who needed it."""
        wanted = GREEDY
        for row in rows:
            wanted = wanted if row.wanted is None else wanted.union(row.wanted)
        if not any(row.key == self._key for row in rows):
            self._key = wanted
        elif not self._key.covers(wanted):
            self._key = self._key.union(wanted)

    def _bring_up(self, row: _Row) -> None:
        """Send what the device does not know of a row."""
        sequence = row.sequence
        if len(row.blocks) > row.written:
            self._device.extend(row.number, row.written, row.blocks[row.written :])
            row.written = len(row.blocks)
        start = sequence.num_cached_tokens
        token = sequence.token_ids[start]
        if row.token != token or row.position != start + len(row.ready):
            row.ready.clear()
            row.key = None
            row.token, row.position = token, start
            self._device.place(row.number, token, start)
        if row.free and row.key != self._key:
            self._configure(row)

    def _configure(self, row: _Row) -> None:
        ids = row.sequence.token_ids
        if row.ready and row.sequence.params.penalizes:
            ids = ids + row.chosen()
        self._device.configure(row.number, self._key, row.sequence, ids)
        row.key = self._key

    def _launch(self, rows: Iterable[_Row]) -> None:
        step = self._device.launch(self._bucket, self._key)
        for row in rows:
            row.ready.append((step, row.number))
            row.position += 1

    def _launch_ahead(self, rows: list[_Row]) -> None:
        """One more step, if after it no row is more than two results ahead of the host."""
        ahead = [row for row in rows if len(row.ready) > 1]
        if ahead:
            self._uneven += 1
            if self._uneven < _PATIENCE:
                return
            for row in ahead:
                self._hold(row)
        self._uneven = 0
        self._launch(rows)

    def _hold(self, row: _Row) -> None:
        """Have the newest step of a row computed once more."""
        row.ready.pop()
        row.position -= 1
        self._device.place(row.number, max(row.chosen()[-1], 0), row.position)
        if row.sequence.params.penalizes:
            self._configure(row)

    def _result(self, row: _Row) -> Result:
        sequence = row.sequence
        step, number = row.ready.popleft()
        row.token = NO_TOKEN
        if not sequence.next_is_newest:
            return None
        if row.wanted is None:
            return self._sample_row(sequence, step.logits(number))
        token = step.wait()[number]
        if token == NO_TOKEN:
            self._leave(row)
            return self._alone(sequence)
        row.token = token
        return Sample(token)


def _goes_on(sequence: Sequence) -> bool:
    """Whether the token now computed may be followed by another."""
    return len(sequence.token_ids) + 1 < sequence.max_positions


def entries_of(sequence: Sequence) -> int:
    """Entries of its block table that a step may come to read, one launched ahead included."""
    return sequence.max_positions // BLOCK_SIZE + 1
