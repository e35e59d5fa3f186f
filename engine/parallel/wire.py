"""The messages between rank 0 and the other ranks (kernels/channel.py): what a rank loads, and each step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Self, TypeAlias

import msgspec

from quengine.block_pool import BlockCopy, CachePool
from quengine.kernels.phase import Phase
from quengine.models.tensor_split import Rank
from quengine.platform.failure import Failure
from quengine.runners.graph_keys import GraphKey, SamplingKind
from quengine.step_plan import GivenRows, SequenceRows


class _ToRank(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A call that all ranks make together, with its arguments. RankPlan, the first message, is the exception."""


class RankPlan(_ToRank, frozen=True):
    """The first message to a rank: what it loads. `options`: fields of EngineConfig. `pools`: the cache's pools, by
    group of layers. `meeting`: the file through which the ranks meet. `bounds`: those of `Stage`; empty where each rank
    has a part of every layer."""

    model: str
    options: Mapping[str, Any]
    number: int
    count: int
    ctx_size: int
    pools: Sequence[CachePool]
    threads: int
    meeting: str
    bounds: tuple[int, ...] = ()

    @property
    def rank(self) -> Rank:
        return Rank(self.number, self.count, bool(self.options["expert_parallel"]))


class Starting(msgspec.Struct, tag=True, frozen=True):
    """A rank's first message: its process has started."""


class RankReady(msgspec.Struct, tag=True, frozen=True):
    """A rank's message that its part of the model is loaded."""


class PlannedStep(_ToRank, frozen=True):
    """The data of a `StepPlan`, of which every rank computes its part.

    phase, rows: as in the plan. embedded: numbers of the rows given as embeddings, whose values follow by broadcast;
    spans, places, later: as `GivenRows` has them. output: logits of each sequence's last row or of all rows
    (`ModelRunner.forward`, with `eager`), the hidden rows (`hidden`), logits of `parts` of the rows
    (`logits_of_parts`), or tokens for `slots`, sampled as `kind` (`CudaGraphs.prefill`).
    """

    phase: Phase
    rows: Sequence[SequenceRows]
    output: Literal["last logits", "all logits", "hidden rows", "logits of parts", "tokens"]
    embedded: Sequence[int] = []
    spans: Sequence[tuple[int, int, int]] = []
    eager: bool = False
    parts: Sequence[Sequence[int]] = []
    slots: Sequence[int] = []
    kind: SamplingKind | None = None
    places: Sequence[tuple[int, int, int]] = []
    later: int = 0

    @property
    def given(self) -> GivenRows:
        """The rows given as embeddings, without their values."""
        return GivenRows(self.embedded, None, self.spans, self.places, self.later)

    def giving(self, given: GivenRows, width: int) -> Self:
        """The step with these rows, of `width` values each, given as embeddings."""
        later = given.later if given.values is None else given.values.shape[1] // width - 1
        return msgspec.structs.replace(
            self, embedded=given.numbers, spans=given.spans, places=given.places, later=later
        )


class ReadCache(_ToRank, frozen=True):
    """`cached_rows.read_cached`."""

    start: int
    end: int


class WriteCache(_ToRank, frozen=True):
    """`cached_rows.write_cached`: the values follow by broadcast."""

    start: int
    end: int


class ChooseExperts(_ToRank, frozen=True):
    """The experts [T][k] of the rows of the next step, by layer, in place of the routers' choice."""

    experts: Mapping[int, Sequence[Sequence[int]]]


class ObserveInputs(_ToRank, frozen=True):
    """`ObservedInputs.observe`."""

    run: str
    on: bool


class WriteSums(_ToRank, frozen=True):
    """`ObservedInputs.write`: rank 0 reads the files of the folder when all have met."""

    folder: str


class LaunchDecode(_ToRank, frozen=True):
    """`CudaGraphs.launch`, on inputs with these changes, by index."""

    key: GraphKey
    changes: Mapping[int, int]


class Configure(_ToRank, frozen=True):
    """`CudaGraphs.set_sampling`. `settings`: the fields of `SamplingSettings`. bias: by token."""

    slot: int
    kind: SamplingKind
    settings: Mapping[str, int | float]
    bias: Mapping[int, float]
    ids: Sequence[int]
    total: int


class SetAdapters(_ToRank, frozen=True):
    """`DecodeInputs.set_adapters`."""

    slot: int
    scales: Sequence[float] | None


class Capture(_ToRank, frozen=True):
    """`CudaGraphs.capture`."""

    key: GraphKey


class Prompts(_ToRank, frozen=True):
    """`CudaGraphs.run_prompts`."""

    lengths: Sequence[int]


class CopyBlocks(_ToRank, frozen=True):
    """`ModelRunner.copy_blocks`."""

    copies: Sequence[BlockCopy]


Step: TypeAlias = (
    PlannedStep | ReadCache | WriteCache | CopyBlocks | ChooseExperts | ObserveInputs | WriteSums
)
Graphs: TypeAlias = LaunchDecode | Configure | SetAdapters | Capture | Prompts
Message: TypeAlias = Step | Graphs

Together = Callable[[Message], AbstractContextManager[None]]


def alone(_message: Message) -> AbstractContextManager[None]:
    """`Together` where there are no other ranks."""
    return nullcontext()


ToRank: TypeAlias = RankPlan | Message
FromRank: TypeAlias = Starting | RankReady | Failure

TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
