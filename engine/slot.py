"""A running sequence's place in the tables of a device."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quengine.runners.graph_keys import SamplingKind


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """The place of a sequence in the tables of a device, from its admission to its release; a new one after preemption.

    Attributes:
        index: its number in the tables, which another sequence may have next; -1: that of a sequence that waits.
        end: number of positions that the sequence may come to need.
        row: slot, target, token and position of a row whose input the device has, as in `batch_rows.StepRows`.
        launched: decode steps with a row of it that have not been committed.
        reach: number of positions up to which steps launched ahead of their results need nothing of the host for it; 0:
            not known, or they do.
        waits: whether the host has to see the result of such a step before it knows the input of the next one.
        has_token: whether the device has the input of the next step, as it samples the newest token.
        drafted: most tokens beyond one each that those steps may add, as they draft on the device.
        undrafted: rows, of the next step's first one and those before it, that the layer which drafts on the device
            lacks at most; 0: the host has to say what it lacks.
        written: entries of each block table that the device has; empty before the first step.
        kind: the kind of sampling that the device has the settings for; None after the sequence's release.
        wanted: the smallest kind that takes its settings; None: the host samples.
        adapted: whether its rows have LoRA adapters.
    """

    index: int = -1
    end: int = 0
    launched: int = 0
    reach: int = 0
    waits: bool = False
    has_token: bool = False
    drafted: int = 0
    undrafted: int = 0
    written: list[int] = field(default_factory=list)
    kind: "SamplingKind | None" = None
    wanted: "SamplingKind | None" = None
    adapted: bool = False
    row: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.row = (self.index, self.index, -1, 0)
