"""What the kernels of latent attention are compiled for, and the places of heads' rows."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, float16

from quengine.errors import CannotRunError
from quengine.kernels.backend import KVLayer
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.latent_spec import LatentSpec

_RANKS = (128, 256, 512)
_ROTATED = (16, 32, 64, 128)


class LatentShape(NamedTuple):
    """Query heads; elements of the latent and of the rotated part of a cached row, and of a query's part that is not
    rotated; whether a rotated pair has one element of each half, else neighbours."""

    heads: int
    rank: int
    rotated: int
    plain: int
    halves: bool

    @classmethod
    def of(cls, spec: LatentSpec) -> "LatentShape":
        return cls(spec.heads, spec.rank, spec.rotated, spec.plain, spec.rope_layout == "halves")


@dataclass(frozen=True)
class HeadPlaces:
    """The places of T rows of each head, in blocks of `block` rows, so that a grouped matmul multiplies each block by
    its head's matrix: row t of head h is at h * `of_head` + t."""

    tokens: int
    heads: int
    block: int

    @property
    def of_head(self) -> int:
        return -(-self.tokens // self.block) * self.block

    @property
    def places(self) -> int:
        return self.heads * self.of_head

    @property
    def blocks(self) -> int:
        return self.places // self.block


class LatentPointers(NamedTuple):
    """A layer's cached rows and their scales; an fp16 cache repeats the rows as scales."""

    rows: Tensor
    scale: Tensor


def latent_pointers(layer: KVLayer) -> LatentPointers:
    """The tensors of a layer, contiguous rows of one head."""
    rows, heads, width = layer.k.shape
    assert heads == 1 and layer.k.stride(0) == width and layer.k.stride(2) == 1 and rows % BLOCK_SIZE == 0
    assert rows * width < 2**31, "a kernel counts a layer's elements in 32 bits"
    if layer.k_scale is None:
        assert layer.k.dtype == float16
        return LatentPointers(layer.k, layer.k)
    return LatentPointers(layer.k, layer.k_scale)


def check_latent(spec: LatentSpec) -> None:
    """Raises CannotRunError for sizes that the kernels do not take."""
    if spec.rank not in _RANKS or spec.rotated not in _ROTATED:
        sizes = f"a latent of {spec.rank} and {spec.rotated} rotated elements"
        known = f"{', '.join(map(str, _RANKS))} and {', '.join(map(str, _ROTATED))} are"
        raise CannotRunError(f"{sizes} are not supported on CUDA, only {known}")
    for name, size in (("queries", spec.plain), ("values", spec.values)):
        if size % 32:
            raise CannotRunError(f"{name} of {size} elements are not supported on CUDA, only multiples of 32")
