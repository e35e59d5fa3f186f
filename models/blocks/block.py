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
"""What ranks divide, in the order above: the elements of all query heads, the elements of all key (or value) heads, the
query heads, the key heads of a gated delta net, the channels of a convolution, the groups of a Mamba2 layer, the width
of a feed-forward, the width of each expert, the experts, the width of the shared expert, the vocabulary."""


class Cut(NamedTuple):
    """The part of a tensor that a rank has.

    along: a range of its "rows" (of each matrix, if there are several), of its "columns", or of its "experts"; with
        "first", all of it on the first rank and zeros on the others.
    axes: the axis of each of the tensor's parts, which follow one another along the rows or columns.
    experts: the tensor has a matrix, or a row, for each expert. With expert parallelism a rank has a range of them.
    units: rows or columns for each element of the axis, by part; (): one.
    """

    along: Literal["rows", "columns", "first", "experts"]
    axes: tuple[Axis, ...] = ()
    experts: bool = False
    units: tuple[int, ...] = ()


OUTPUT_CUT = Cut("rows", ("tokens",))
"""How ranks share the output matrix."""


class Draw(NamedTuple):
    """Normally distributed values, for synthetic models. With `by_columns`, std is multiplied by n ** -0.5 for n
    columns, so that products are about as large as their input."""

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
    folder, below the layer; "": it has none. hf_each: the name of one expert's matrix, with {expert} for its number.
    hf_shape: its shape in a folder; (): the same. rotated: (heads, rotated elements of each head) if its rows are
    heads to rotate, else None. draw: its values in synthetic models.
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

    window: how many of the last positions are kept, the token's own included; None: all. latent: values are the first
    elements of keys, and are not stored again.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: bool = False

    def bytes_of(self, positions: int, cache_type: CacheType = "f16") -> int:
        """Bytes of `positions` positions. Raises EngineError where the rows cannot be stored in `cache_type`."""
        if not self.kv_heads:  # an encoder's: any head size
            return 0
        return (
            (1 if self.latent else 2)
            * self.kv_heads
            * positions
            * row_bytes(cache_type, self.head_dim, self.latent)
        )


@dataclass(frozen=True)
class SlotState:
    """A state of fixed size for each sequence, whatever its length: fp32 parts of these shapes.

    Ranks divide the channels of a part [rows, channels], and the first dimension of a part [heads, ...].

    rewinds: how many positions a sequence can go back from its newest one and still continue with the same state.
    sections: for each part, the relative lengths of the sections of the divided dimension: (2, 1) are two thirds and
        one third. A rank has its share of each section. (): no part has sections.
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
        """Its tensors by their GGUF names below the layer, with .weight or .bias."""
        ...

    def joined(self) -> Mapping[str, TensorSpec]:
        """Tensors that some files have in place of several of `tensors`, concatenated; most parts have none."""
        return {}

    @property
    def traits(self) -> Sequence[str]:
        """What sets it apart from others of its kind, for people; most have nothing."""
        return ()


class Mixer(Part, Protocol):
    """The part of a layer in which positions see each other. `kind`: its name, for people."""

    kind: str

    @property
    def state(self) -> State:
        """What it keeps of a sequence from step to step."""
        ...


class ChannelMixer(Part, Protocol):
    """The part of a layer that computes each position by itself: a feed-forward, or a mixture of experts."""

    @property
    def every_row_length(self) -> int:
        """The inner width of the dense feed-forward or shared expert, which computes every row; 0: there is none."""
        ...


@dataclass(frozen=True)
class Block:
    """One layer of a model: a mixer, a feed-forward, or both.

    parallel: the feed-forward reads the mixer's norm of the layer's input, not the mixer's result. input: per-layer
    embeddings (layer_input.py), added at the layer's end. around: alternating updates (altup.py) of the rows of a token
    that the layer does not compute.
    """

    mixer: Mixer | None
    feed_forward: ChannelMixer | None
    parallel: bool = False
    input: Part | None = None
    around: Part | None = None

    @property
    def parts(self) -> Sequence[Part]:
        """The parts that the layer has, the mixer first."""
        return [part for part in (self.mixer, self.feed_forward, self.input, self.around) if part is not None]

    @property
    def state(self) -> State:
        """What it keeps of a sequence from step to step."""
        return STATELESS if self.mixer is None else self.mixer.state

    def tensors(self) -> Mapping[str, TensorSpec]:
        """The tensors of all parts."""
        return {name: spec for part in self.parts for name, spec in part.tensors().items()}

    @property
    def traits(self) -> Sequence[str]:
        """See Part.traits."""
        return [trait for part in self.parts for trait in part.traits]

    def joined(self) -> Mapping[str, TensorSpec]:
        """See Part.joined."""
        return {name: spec for part in self.parts for name, spec in part.joined().items()}
