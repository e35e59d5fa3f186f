"""Decode steps on a device that samples the tokens itself, launched one step ahead of the host.

If possible, a step is launched before the previous step's tokens are read, so that the host's work on them (text, stop
strings, output) overlaps with the device. A result belongs to a slot and stays valid when other sequences join or
leave. When a sequence joins, the others are one result ahead of it; if that lasts for a few steps, their newest step
is computed again, and from then on all sequences are one step ahead.

Rows with settings that the device cannot sample (log-probabilities, a constraint, penalties after a draft) are sampled
on the host from their logits. While there are such rows, or drafts, no step is launched ahead.

Most steps have the sequences of the previous one, with the tokens that the device has sampled: then the host only
checks for blocks appended to a table, since every row costs it Python time.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.request.sequence import Sequence
from quengine.runners.cuda_graphs import CudaGraphs, StepTokens
from quengine.runners.decode_slots import DecodeRow, DecodeSlots, Slot
from quengine.runners.graph_keys import SamplingKind
from quengine.runners.step_rows import decode_ids
from quengine.sampler import NO_CHOICE, Result, Sample, Verified

_PATIENCE = 4
"""Steps with slots unequally far ahead, in which the device waits for the host, before a step is spent on
levelling them.
"""


@dataclass(frozen=True)
class DecodeStep:
    """A launched step: the rows of `sequences` in order, with their slots."""

    sequences: list[Sequence]
    rows: list[DecodeRow]
    slots: list[Slot]

    @property
    def on_device(self) -> bool:
        """Whether the device samples all tokens, so that the next step can be launched before any logits are read."""
        return all(row.kind is not None for row in self.rows)


class DeviceDecoder:
    """See the module docstring. With `graphs.shares_sequences` sequences may have drafts.

    repeats: a step may be computed once more; states that change with it do not allow that.
    before_launch: called before each launch with the sequences and the positions of their first rows.
    """

    def __init__(self, graphs: CudaGraphs, repeats: bool = True) -> None:
        self.before_launch: Callable[[Seq[tuple[Sequence, int]]], None] | None = None
        self._repeats = repeats
        self._most_rows = graphs.slots
        self._drafts = graphs.shares_sequences
        self._slots = DecodeSlots(graphs, parks=not repeats)
        self._uneven = 0
        # the step that the device can continue from, if all its results were taken
        self._last: DecodeStep | None = None
        self._kinds: WeakKeyDictionary[Sequence, SamplingKind | None] = WeakKeyDictionary()

    def step(self, sequences: Seq[Sequence]) -> list[Result] | None:
        """`ModelRunner.decode`; NO_CHOICE where the device found no token to sample. None: too many rows."""
        step = self.launch(sequences)
        return None if step is None else self.results(step, ahead=True)

    def launch(self, sequences: Seq[Sequence]) -> DecodeStep | None:
        """Launches a step without waiting, unless it was launched ahead; returns None if it has too many rows."""
        last, self._last = self._last, None
        if last is not None and self._goes_on_from(last, sequences):
            if not last.slots[0].ready:
                self._start(last.rows, last.slots)
            return last
        rows = [row for sequence in sequences for row in self._rows_of(sequence)]
        if len(rows) > self._most_rows:
            self._slots.place([])  # releases all
            return None
        slots, new = self._slots.place(rows)
        if new:
            self._uneven = 0
        if not all(slot.ready for slot in slots):
            self._start(rows, slots)
        return DecodeStep(list(sequences), rows, slots)

    def _start(self, rows: list[DecodeRow], slots: list[Slot]) -> None:
        """Launch a step of all slots; where no step may be computed twice, of those that are behind the others."""
        if not self._repeats:
            late = [(row, slot) for row, slot in zip(rows, slots, strict=True) if not slot.ready]
            if late and len(late) < len(slots):
                self._keep(*zip(*late, strict=True))
                self._slots.catch_up(rows, slots)
                return
        self._keep(rows, slots)
        self._slots.launch(slots)

    def _keep(self, rows: Seq[DecodeRow], slots: Seq[Slot]) -> None:
        if self.before_launch is not None:
            pairs = zip(rows, slots, strict=True)
            first = [(row.owner, slot.position) for row, slot in pairs if row.number == 0]
            self.before_launch(first)  # type: ignore[arg-type]  # owners of an engine's rows are sequences

    def results(self, step: DecodeStep, ahead: bool) -> list[Result]:
        """The tokens of a step, in order. ahead: the next step will have the same sequences, so it may be
        launched now.
        """
        if ahead and not self._drafts and step.on_device and any(map(_goes_on, step.sequences)):
            self._launch_ahead(step.rows, step.slots)
        if step.on_device and not self._drafts:
            return self._tokens(step)
        placed = iter(zip(step.rows, step.slots, strict=True))
        return [
            self._result(s, [next(placed) for _ in range(s.replay + 1 + len(s.draft))])
            for s in step.sequences
        ]

    def _goes_on_from(self, last: DecodeStep, sequences: Seq[Sequence]) -> bool:
        """Whether a step has the rows of the last one, each after the token sampled there; sends appended blocks."""
        if sequences != last.sequences or len(sequences) > self._most_rows:
            return False
        if len({len(slot.ready) for slot in last.slots}) > 1:
            return False
        for sequence, slot in zip(sequences, last.slots, strict=True):
            tables = sequence.block_tables
            if tables[0] is not slot.block_tables[0] or sequence.token_ids[-1] != slot.token:
                return False
            if len(tables[0]) != slot.written[0] or len(tables) > 1:
                self._slots.extend(slot)
        return True

    def _tokens(self, step: DecodeStep) -> list[Result]:
        """The results of rows whose tokens the device samples, one per sequence."""
        found, waited, tokens = list[Result](), None, list[int]()
        for sequence, slot in zip(step.sequences, step.slots, strict=True):
            launched, index = slot.ready.popleft()
            if launched is not waited:
                waited, tokens = launched, launched.wait()
            slot.token = tokens[index]
            found.append(Sample(slot.token) if slot.token != NO_TOKEN else NO_CHOICE)
            if slot.token == NO_TOKEN:
                self._slots.release(sequence, 0)
        self._last = None if NO_CHOICE in found else step
        return found

    def _rows_of(self, sequence: Sequence) -> list[DecodeRow]:
        start, params = sequence.num_cached_tokens - sequence.replay, sequence.params
        kind = None
        # Penalties count the tokens before a row, which after a drafted token may differ from the device's.
        if sequence.next_is_newest and not (self._drafts and params.penalizes):
            kind = self._kind_of(sequence)
        entries = sequence.max_positions // BLOCK_SIZE + 1  # includes a step launched ahead
        tables, history = sequence.block_tables, sequence.token_ids
        return [
            DecodeRow(sequence, n, token, start + n, tables, entries, params, sequence.sampler, kind, history)
            for n, token in enumerate(decode_ids(sequence))
        ]

    def _kind_of(self, sequence: Sequence) -> SamplingKind | None:
        """The sampling kind of a sequence, cached: in steps of many rows the host has little time."""
        if sequence not in self._kinds:
            self._kinds[sequence] = SamplingKind.of(sequence.params)
        return self._kinds[sequence]

    def _launch_ahead(self, rows: list[DecodeRow], slots: list[Slot]) -> None:
        """Launches one more step, unless a slot would then be more than two results ahead of the host."""
        ahead = [(row, slot) for row, slot in zip(rows, slots, strict=True) if len(slot.ready) > 1]
        if ahead and not self._repeats:
            return  # the next launch evens them out
        if ahead:
            self._uneven += 1
            if self._uneven < _PATIENCE:
                return
            for row, slot in ahead:
                self._slots.recompute(row, slot)
        self._uneven = 0
        self._keep(rows, slots)
        self._slots.launch(slots)

    def _result(self, sequence: Sequence, placed: list[tuple[DecodeRow, Slot]]) -> Result:
        taken = [slot.take() for _, slot in placed][sequence.replay :]
        row, slot = placed[sequence.replay]
        if not sequence.next_is_newest:
            return None
        first = _token(sequence, row.kind, *taken[0])
        if first is NO_CHOICE:
            for other, _ in placed:
                self._slots.release(other.owner, other.number)
        if not isinstance(first, Sample):
            return first
        if sequence.draft:
            return Verified(first, lambda number: _token(sequence, row.kind, *taken[number]))
        if row.kind is not None:
            slot.token = first.token  # the device continues from it
        return first


def _token(sequence: Sequence, kind: SamplingKind | None, step: StepTokens, index: int) -> Result:
    """The token after a row."""
    if kind is None:
        return sequence.sample_next(step.logits(index))
    token = step.wait()[index]
    return NO_CHOICE if token == NO_TOKEN else Sample(token)


def _goes_on(sequence: Sequence) -> bool:
    """Whether the token now being computed may be followed by another."""
    return len(sequence.token_ids) + 1 < sequence.max_positions
