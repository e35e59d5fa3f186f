"""The allocator of slots, the rows of a device's decode steps, with and without drafts.

A sequence's row keeps its slot across steps, and the device advances it by itself, with the token that it sampled.
Only changes are sent: a new or finished sequence, an appended block, an input that is not the last sampled token.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import is_not
from typing import NamedTuple
from weakref import WeakKeyDictionary

from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_graphs import CudaGraphs, StepTokens
from quengine.runners.graph_keys import GREEDY, SamplingKind, decode_key, padded_rows
from quengine.sampler import Sampler


class DecodeRow(NamedTuple):
    """A row to compute: `token` at `position`, over these block tables, one per cache group.

    `owner` and `number` identify it across steps. Steps read up to `entries` of a block table. `kind` is None if the
    host samples the row's token; else the device does, by `params`, with the seed of `sampler`. Penalties count the
    tokens of `history`, `token` included.
    """

    owner: object
    number: int
    token: int
    position: int
    block_tables: tuple[list[int], ...]
    entries: int
    params: SamplingParams
    sampler: Sampler
    kind: SamplingKind | None
    history: list[int]


@dataclass(eq=False)
class Slot:
    """A row of the device's steps, by `index`, and the state that the device has for it.

    position: position of the next launch's input.
    token: the input after the results in `ready`; NO_TOKEN if the device's differs.
    ready: launched steps whose result has not been taken, each with the slot's index at its launch.
    kind: the sampling kind that its settings were sent for.
    written: number of entries sent of each block table.
    """

    index: int
    block_tables: tuple[list[int], ...]
    entries: int
    written: list[int]
    position: int = -1
    token: int = NO_TOKEN
    kind: SamplingKind | None = None
    ready: deque[tuple[StepTokens, int]] = field(default_factory=deque)

    def chosen(self) -> list[int]:
        """The tokens of `ready`; waits for them."""
        return [step.wait()[index] for step, index in self.ready]

    def take(self) -> tuple[StepTokens, int]:
        """The oldest result; the next input must be sent, unless `token` is set to it."""
        self.token = NO_TOKEN
        return self.ready.popleft()


class DecodeSlots:
    """See the module docstring.

    parks: a row that is left out of some steps goes on with the results that it has, as no step of it may be computed
    twice.
    """

    def __init__(self, graphs: CudaGraphs, parks: bool = False) -> None:
        self._parks = parks
        self._parked: WeakKeyDictionary[object, Slot] = WeakKeyDictionary()
        self._graphs = graphs
        self._inputs = graphs.inputs
        self._slots: dict[tuple[object, int], Slot] = {}
        self._rows = 1
        self._kind = GREEDY

    def place(self, rows: Seq[DecodeRow]) -> tuple[list[Slot], bool]:
        """Assigns slots to exactly these rows, in the smallest captured step; returns them, and whether one is new.

        Slots are in the order of the rows; other slots are released. Sends the device what has changed.
        """
        self._rows = padded_rows(len(rows))
        free = self._make_room(rows)
        slots, new = [], False
        for row in rows:
            slot = self._slots.get((row.owner, row.number))
            if slot is None:
                slot, new = self._assign(row, next(free)), True
            slots.append(slot)
        self._choose_kind(rows, slots)
        for row, slot in zip(rows, slots, strict=True):
            self._update(row, slot)
        return slots, new

    def launch(self, slots: Seq[Slot]) -> None:
        """Launches a step, which advances these slots."""
        step = self._graphs.launch(decode_key(self._rows, self._kind))
        for slot in slots:
            slot.ready.append((step, slot.index))
            slot.position += 1

    def catch_up(self, rows: Seq[DecodeRow], slots: Seq[Slot]) -> None:
        """Start a step that moves on just the slots without a result; the others are padding in it."""
        held = [(row, slot) for row, slot in zip(rows, slots, strict=True) if slot.ready]
        for _, slot in held:
            self._inputs.release(slot.index)
        self.launch([slot for slot in slots if not slot.ready])
        for row, slot in held:
            self._send_to(slot, slot.index)
            if row.kind is not None:
                self._configure(row, slot)

    def extend(self, slot: Slot) -> None:
        """Sends the blocks appended to a slot's tables."""
        for group, table in enumerate(slot.block_tables):
            first, end = slot.written[group], min(len(table), self._inputs.blocks)
            if end > first:
                self._inputs.extend(slot.index, group, first, table[first:end])
                slot.written[group] = end

    def keep(self, slots: Seq[Slot]) -> None:
        """Releases all other slots; the next steps are as small as these slots allow."""
        for place, slot in list(self._slots.items()):
            if slot not in slots:
                self.release(*place)
        self._rows = padded_rows(1 + max(slot.index for slot in slots))

    def recompute(self, row: DecodeRow, slot: Slot) -> None:
        """Makes the device compute the newest step of a slot again."""
        slot.ready.pop()
        slot.position -= 1
        self._inputs.set_input(slot.index, max(slot.chosen()[-1], 0), slot.position)
        if row.params.penalizes:
            self._configure(row, slot)

    def release(self, owner: object, number: int) -> None:
        self._inputs.release(self._slots.pop((owner, number)).index)

    def _make_room(self, rows: Seq[DecodeRow]) -> Iterator[int]:
        """Releases other rows' slots, and moves the rest within the step's rows; yields the free indices."""
        tables = {(row.owner, row.number): row.block_tables for row in rows}
        for place, slot in list(self._slots.items()):
            held = tables.get(place)
            if held is None or any(map(is_not, held, slot.block_tables)):
                if self._parks and held is None and slot.ready:
                    self._parked[place[0]] = slot
                self.release(*place)
        used = {slot.index for slot in self._slots.values()}
        free = iter([index for index in range(self._rows) if index not in used])
        for slot in self._slots.values():
            if slot.index >= self._rows:
                self._move(slot, next(free))
        return free

    def _assign(self, row: DecodeRow, index: int) -> Slot:
        slot = self._parked.pop(row.owner, None)
        if slot is None or any(map(is_not, row.block_tables, slot.block_tables)):
            slot = Slot(index, row.block_tables, min(row.entries, self._inputs.blocks), [])
            self._send_tables(slot)
        else:
            self._send_to(slot, index)
        self._slots[row.owner, row.number] = slot
        return slot

    def _move(self, slot: Slot, index: int) -> None:
        """To another row; the results that were launched stay its own."""
        self._inputs.release(slot.index)
        self._send_to(slot, index)

    def _send_to(self, slot: Slot, index: int) -> None:
        """Send all that a slot's next step reads, to a row that has nothing of it."""
        newest = slot.chosen()[-1] if slot.ready else slot.token
        slot.index, slot.kind = index, None
        self._send_tables(slot)
        self._inputs.set_input(index, max(newest, 0), slot.position)

    def _send_tables(self, slot: Slot) -> None:
        tables = [table[: self._inputs.blocks] for table in slot.block_tables]
        slot.written = [len(table) for table in tables]
        self._inputs.assign(slot.index, tables, slot.entries)

    def _choose_kind(self, rows: Seq[DecodeRow], slots: Seq[Slot]) -> None:
        """Selects the sampling kind that these rows need; a larger kind is kept while a row that needed it remains."""
        kept = any(slot.kind == self._kind for slot in slots)
        kind = self._kind if kept else GREEDY
        for wanted in {row.kind for row in rows}:
            kind = kind if wanted is None else kind.union(wanted)
        self._kind = kind

    def _update(self, row: DecodeRow, slot: Slot) -> None:
        """Sends what the device lacks of a row."""
        self.extend(slot)
        if slot.token != row.token or slot.position != row.position + len(slot.ready):
            slot.ready.clear()
            slot.token, slot.position = row.token, row.position
            self._inputs.set_input(slot.index, row.token, row.position)
            if row.params.penalizes:
                slot.kind = None
        if row.kind is not None and slot.kind != self._kind:
            self._configure(row, slot)

    def _configure(self, row: DecodeRow, slot: Slot) -> None:
        ids = row.history
        if slot.ready and row.params.penalizes:
            ids = ids + slot.chosen()
        self._graphs.configure(slot.index, self._kind, row.params, row.sampler, ids)
        slot.kind = self._kind
