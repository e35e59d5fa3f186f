"""What a layer declares: its tensors, how ranks cut them, and what it keeps of a sequence.

Declarations need no torch: a file's check, `engine show` and the memory plan read them before anything is loaded.
`models/decoder_layer.py` makes the layers of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, Protocol, TypeAlias

from quengine.kernels.kv.cache_types import CacheType, row_bytes

Shape: TypeAlias = tuple[int, ...]

Axis = Literal[
    "queries", "keys", "heads", "key_heads", "channels",
    "groups", "inner", "expert_inner", "experts", "shared_inner", "tokens",
]  # fmt: skip
"""What ranks divide: elements of all query heads, of all key (or value) heads, query heads by number, key heads of a
gated delta net by number, channels of a convolution, groups of a Mamba2 layer by number, the width of a feed-forward,
of an expert's, experts by number, the width of the shared expert's, the vocabulary."""


class Cut(NamedTuple):
    """What a rank has of a tensor: a range of its "rows" (of each matrix, where there are several), of its "columns",
    or all of it on the "first" rank and zeros on the others. `axes`: one for each of the parts that follow one another
    along the rows or columns. `experts`: it has a matrix, or a row, for each expert, of which a rank has a range where
    experts are shared whole, and zeros after them, for all experts of the others. `units`: rows or columns for each
    element of an axis, in each of the parts; (): one.
    """

    along: Literal["rows", "columns", "first", "experts"]
    axes: tuple[Axis, ...] = ()
    experts: bool = False
    units: tuple[int, ...] = ()


OUTPUT_CUT = Cut("rows", ("tokens",))
"""How ranks share the output matrix."""


class Draw(NamedTuple):
    """Normal values, for synthetic models. std: for one column, if `by_columns`: of n columns it is by n ** -0.5, and
    products have the size of their input."""

    std: float = 1.0
    mean: float = 0.0
    by_columns: bool = True


class Uniform(NamedTuple):
    """Values of a vector from `low` to `high`, for synthetic models."""

    low: float
    high: float


NORM, BIAS = Draw(0.1, 1.0, by_columns=False), Draw(0.1, by_columns=False)


class TensorSpec(NamedTuple):
    """A tensor of a layer.

    shape: rows first. cut: how ranks share it; None: every rank has all of it. hf: its usual name in a Hugging Face
    folder, below the layer; "": it has none. hf_each: that of the matrix of one expert, {expert} being its number.
    hf_shape: in a folder, where it differs; ().
    rotated: of rows of heads that are rotated, how many heads, and how many elements of each. draw: what synthetic
    models have.
    """

    shape: Shape
    cut: Cut | None = None
    hf: str = ""
    hf_each: str = ""
    hf_shape: Shape = ()
    rotated: tuple[int, int] | None = None
    draw: Draw | Uniform = Draw()


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of every position that a layer attends to, in blocks of positions.

    window: how many positions, the token's own among them, are kept; None: all. latent: values are the first elements
    of keys, and not stored again.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: bool = False

    def bytes_of(self, positions: int, cache_type: CacheType = "f16") -> int:
        """Bytes of `positions` positions. Raises EngineError where the rows cannot be stored in `cache_type`."""
        if not self.kv_heads:  # an encoder's, of any size
            return 0
        return (
            (1 if self.latent else 2)
            * self.kv_heads
            * positions
            * row_bytes(cache_type, self.head_dim, self.latent)
        )


@dataclass(frozen=True)
class SlotState:
    """A fixed amount for each sequence, whatever its length: parts of fp32 values of these shapes.

    Of a part [rows, channels] ranks divide the channels, of one of more dimensions the first: [heads, ...].

    rewinds: a state serves to go on from that many positions before its newest one.
    sections: of each part, how the divided dimension is parted, in relative lengths, into sections of each of which a
        rank has its share, (2, 1) for two thirds and one; empty where none of the parts is.
    """

    shapes: tuple[Shape, ...]
    rewinds: int = 0
    sections: tuple[Shape, ...] = ()

    @property
    def nbytes(self) -> int:
        return 4 * sum(map(prod, self.shapes))


State: TypeAlias = PagedKV | SlotState

STATELESS = SlotState(())
"""The state of a layer that keeps nothing."""


class Part(Protocol):
    """What mixers and feed-forwards have in common."""

    def tensors(self) -> Mapping[str, TensorSpec]:
        """By GGUF's name below the layer, with .weight or .bias."""
        ...

    def joined(self) -> Mapping[str, TensorSpec]:
        """Tensors that hold several of these, one after the other, in files that do not have those; most have none."""
        return {}

    @property
    def traits(self) -> Sequence[str]:
        """What it has beside what all of its kind have, for people; most have nothing."""
        return ()


class Mixer(Part, Protocol):
    """The part of a layer in which positions see each other. `kind`: for people."""

    kind: str

    @property
    def state(self) -> State:
        """What it keeps of a sequence from step to step."""
        ...


class ChannelMixer(Part, Protocol):
    """The part of a layer that computes each position by itself: a feed-forward, or a mixture of experts."""

    @property
    def every_row_length(self) -> int:
        """The width between up and down of what computes every row; 0: there is no such thing."""
        ...


@dataclass(frozen=True)
class Block:
    """One layer of a model: a mixer, a feed-forward, or both.

    parallel: the feed-forward reads the mixer's norm of the layer's input, not its result. input: what is added at the
    layer's end of what it gets of each token beside the residual stream. around: what it does with rows of a token
    that it does not compute.
    """

    mixer: Mixer | None
    feed_forward: ChannelMixer | None
    parallel: bool = False
    input: Part | None = None
    around: Part | None = None

    @property
    def parts(self) -> Sequence[Part]:
        """The mixer first."""
        return [part for part in (self.mixer, self.feed_forward, self.input, self.around) if part is not None]

    @property
    def state(self) -> State:
        """What it keeps of a sequence from step to step."""
        return STATELESS if self.mixer is None else self.mixer.state

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Those of all parts."""
        return {name: spec for part in self.parts for name, spec in part.tensors().items()}

    @property
    def traits(self) -> Sequence[str]:
        """See Part.traits."""
        return [trait for part in self.parts for trait in part.traits]

    def joined(self) -> Mapping[str, TensorSpec]:
        """See Part.joined."""
        return {name: spec for part in self.parts for name, spec in part.joined().items()}
