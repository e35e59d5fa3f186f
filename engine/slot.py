"""A running sequence's place in the tables of a device."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quengine.runners.graph_keys import SamplingKind


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """The place of a sequence in the tables of a device, from its admission to its release; a new one after preemption.

    Attributes:
        index: its row in the tables, which a later sequence may reuse; -1: the sequence waits.
        end: most positions that the sequence can need.
        row: slot, target, token and position of a row whose input the device has, as in `batch_rows.StepRows`.
        launched: number of launched decode steps with the sequence that are not committed yet.
        reach: while the sequence has fewer positions than this, the host plans a step ahead without a check; 0: it
            checks each one.
        waits: whether the host has to see the result of a launched step before it knows the input of the next one.
        has_token: whether the device has the input of the next step, as it samples the newest token.
        drafted: most tokens, beyond one per step, that the launched steps may add by drafting on the device.
        undrafted: most rows, up to the next step's first one, that the layer which drafts on the device has not
            computed; 0: the host has to name them.
        written: number of entries of each block table that the device has; empty before the first step.
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
