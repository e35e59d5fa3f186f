"""Sends a device what it lacks of the sequences in its slots.

The device advances a slot by itself, with the token that it sampled. Only changes are sent: a new sequence, an appended
block, rows that are not those of the step before, an input that is not the last sampled token.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import overload

from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.graph_keys import GREEDY, SamplingKind
from quengine.sampler import Sampler
from quengine.slot import Slot


class Drafted(Seq[int]):
    """A draft that lies on the device: the tokens of a slot of the model that drafts.

    Args:
        slot: that slot's number.
        count: tokens of the draft.
        read: waits for them, and returns them.
    """

    def __init__(self, slot: int, count: int, read: Callable[[], list[int]]) -> None:
        self._count, self._read = count, read
        self.inputs = [-2 - slot] * count
        """The tokens of rows of a step, as in `batch_rows.StepRows`."""

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._read()[index]


class DeviceRows:
    """See the module docstring. `kind`: how the next step samples."""

    def __init__(self, graphs: CudaGraphs) -> None:
        self._graphs, self._inputs = graphs, graphs.inputs
        self.kind = GREEDY

    def choose_kind(self, slots: Iterable[Slot], wanted: Iterable[SamplingKind | None]) -> None:
        """Selects the kind of sampling for a step of these slots, of which some want these kinds (None: the host
        samples); a larger kind is kept while a slot is left that has its settings for it."""
        kind = self.kind if any(slot.kind == self.kind for slot in slots) else GREEDY
        for each in wanted:
            kind = kind if each is None else kind.union(each)
        if kind != self.kind:  # else it stays the object that slots have
            self.kind = kind

    def leave_penalties(self) -> None:
        """Has the next step take a kind without penalties, since none of its slots wants any."""
        if self.kind.penalties:
            self.kind = GREEDY

    def send_tables(self, slot: Slot, tables: Seq[Seq[int]]) -> None:
        """Sends the blocks that were appended to a slot's tables; all of them if it is new."""
        written = slot.written or [0] * len(tables)
        for group, table in enumerate(tables):
            first, end = written[group], min(len(table), self._inputs.blocks)
            if end > first:
                self._inputs.extend(slot.index, group, first, table[first:end])
                written[group] = end
        slot.written = written

    def configure(
        self, slot: Slot, params: SamplingParams, sampler: Sampler, history: list[int], in_flight: int = 0
    ) -> None:
        """Sends a slot's sampling settings for steps of the current kind; see `CudaGraphs.configure`."""
        self._graphs.configure(slot.index, self.kind, params, sampler, history, in_flight)
        slot.kind = self.kind
