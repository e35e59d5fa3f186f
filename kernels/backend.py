"""What a decoder asks of the machine it runs on: one protocol, one implementation per kind of device.

A backend knows how weights are held and which kernel does an operation. It does not know what a model is: it
sees matrices, vectors and one layer's key/value cache at a time. The operations are as coarse as the launches
that a fast device wants (norm with the matmul behind it, the whole attention, SwiGLU with its norm and matmul),
so the decoder reads the same on every backend.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from quengine.kernels.cache_types import BLOCK_SIZE as BLOCK_SIZE  # known by its old place too
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rope import RopeLayout

Hidden: TypeAlias = Any
"""What a backend hands from one of its operations to the next, [T, width] in meaning: a plain tensor on the
reference and CPU backends; a device backend may carry rounded planes or partial sums along. The decoder only
passes it on."""


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + T - 1 of one sequence whose cache lies in blocks.

    `block_table`: int32 on the device, one entry a block of the sequence, in order: position p is row
    `block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE` of the cache.
    """

    start: int
    block_table: Tensor


@dataclass(frozen=True)
class DecodeBatch:
    """The newest token of each of B sequences whose caches lie in blocks.

    `positions`: int32 [B]; `block_tables`: int32 [B, most blocks of a sequence], each row as in `Chunk`, any block
    behind its end; both on the device. Rows that only fill a batch up share a spare block. A result row depends on
    its own sequence only.

    `consecutive`: a sequence may have several rows, tokens at positions that follow each other. Each sees those before
    it, so all keys and values of the batch must be written before any are read.
    """

    positions: Tensor
    block_tables: Tensor
    consecutive: bool = False


def rectangle(tables: Sequence[Sequence[int]], filler: int = 0) -> list[list[int]]:
    """Block tables of sequences, each filled up to the longest with a block that nobody reads."""
    most = max(map(len, tables))
    return [[*table, *([filler] * (most - len(table)))] for table in tables]


@dataclass(frozen=True)
class PromptBatch:
    """Chunks of several sequences' prompts, one behind the other: `lengths[i]` tokens from position `starts[i]` on.

    `block_tables`: int32 [sequences, most blocks], each row as in `Chunk`; `last_rows`: int64 [sequences], the row of
    each chunk's last token; both on the device. Sequences do not see each other.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    block_tables: Tensor
    last_rows: Tensor

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        device: torch.device,
    ) -> "PromptBatch":
        """From each chunk's first position, its number of tokens and its sequence's blocks."""
        last = [end - 1 for end in accumulate(lengths)]
        return cls(
            tuple(starts),
            tuple(lengths),
            torch.tensor(rectangle(tables), dtype=torch.int32, device=device),
            torch.tensor(last, device=device),
        )

    def chunks(self) -> Iterator[tuple[slice, Chunk]]:
        """Each chunk's rows, and the chunk by itself."""
        end = 0
        for start, length, table in zip(self.starts, self.lengths, self.block_tables, strict=True):
            yield slice(end, end + length), Chunk(start, table)
            end += length


Position: TypeAlias = "int | Tensor | Chunk | DecodeBatch | PromptBatch"
"""Which tokens an operation's rows are. An int: a chunk that begins there, of the one sequence that has the whole
cache, position p in row p. A captured decode step of such a sequence takes an int32 tensor [1] on the device instead,
so that one graph serves every position."""


@dataclass(frozen=True)
class KVLayer:
    """One layer's cache, written in place.

    `k`, `v`: [rows, kv_heads, head_dim], one row a position (of one sequence, or of blocks of many), fp16, or int8
    codes with `k_scale`, `v_scale` [rows, kv_heads, head_dim / 32] fp16 (q8_0, see kernels/kv_q8_0.py). Strides are
    any; in memory each head's positions lie together.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All that is stored, each with the positions first."""
        return [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None]


@dataclass(frozen=True)
class AttentionSpec:
    """What stays the same from step to step in one layer's attention.

    `cos`, `sin` are [ctx, rope_dim / 2] fp32, one row a position. `rope_layout` says which elements rotate
    together: "pairs" (0,1), (2,3), ... or "halves" (0, d/2), (1, d/2 + 1), ... `mask_band` is the causal mask
    made once at load (see kernels/attention.py). `query_scale` [ctx] fp32 multiplies the rotated query of each
    position. `q_norm`, `k_norm` are per-head norm weights [head_dim], applied before the rotation.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    rope_layout: RopeLayout
    cos: Tensor
    sin: Tensor
    mask_band: Tensor
    query_scale: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


class Weight(Protocol):
    """A matrix as the backend holds it: `rows` outputs by `cols` inputs, `nbytes` read by one pass over it."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


WeightT = TypeVar("WeightT", bound=Weight)


ALL_ROWS, LAST_ROW = slice(None), slice(-1, None)


class PromptScope:
    """Of a backend whose kernels for a single token give other bits than those for many."""

    in_prompt = False

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Inside, a single token is computed as it would be among others of a prompt, to the last bit."""
        before, self.in_prompt = self.in_prompt, True
        try:
            yield
        finally:
            self.in_prompt = before


def prompt_scope(backend: "Backend[Any]") -> AbstractContextManager[None]:
    """Inside, a chunk, be it of one token, is computed as a prompt's, where a backend tells them apart."""
    return backend.prompt() if isinstance(backend, PromptScope) else nullcontext()


class RowPicker(PromptScope):
    """Of a backend to which fewer rows of a prompt are less work.

    In the last layer, behind the attention, only rows whose logits are wanted go on. Where a backend gives a row the
    same bits whatever is computed beside it, it does so here, inside `prompt`, too.
    """

    def pick(self, x: Hidden, rows: "slice | Tensor") -> Hidden:
        """Those rows of x alone."""
        return x[rows]


class Backend(Protocol[WeightT]):
    """The operations of a decoder over T tokens, on weights of the backend's own kind.

    The tokens are a chunk of one sequence, or of several, or the newest ones of several: `attention` alone tells them
    apart.
    """

    name: str
    device: torch.device
    dtype: torch.dtype

    def weight(self, parts: Sequence[QuantTensor]) -> WeightT:
        """Take matrices [N_i, K] that are applied to the same input; the outputs lie side by side, in order."""
        ...

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> WeightT:
        """Take the two matrices [F, K] of a gated feed-forward, for `norm_swiglu`."""
        ...

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        """Take one-dimensional tensors (norm weights, biases), concatenated, as [n] on the device."""
        ...

    def embed(self, weight: WeightT, ids: Tensor) -> Hidden:
        """Rows `ids` [T] int64 of a one-part weight: [T, K]."""
        ...

    def norm_linear(
        self, x: Hidden, norm: Tensor, eps: float, weight: WeightT, bias: Tensor | None = None
    ) -> Hidden:
        """RMSNorm of x [T, K], then the matmul with weight [N, K], plus bias [N]: [T, N]."""
        ...

    def norm_swiglu(self, x: Hidden, norm: Tensor, eps: float, gate_up: WeightT) -> Hidden:
        """RMSNorm of x [T, K], gate_up [2F, K] (gate rows first), silu(gate) * up: [T, F]."""
        ...

    def linear_add(
        self, x: Hidden, weight: WeightT, residual: Hidden, norm: Tensor | None = None, eps: float = 0.0
    ) -> Hidden:
        """x [T, K] times weight [N, K], plus residual [T, N].

        `norm`, `eps`: the RMSNorm through which the result is read next, for a backend that begins it here. The next
        operation is given the same norm all the same. The result may be written over the residual.
        """
        ...

    def attention(self, qkv: Hidden, spec: AttentionSpec, layer: KVLayer, start: Position) -> Hidden:
        """Rotary embedding, cache write and causal attention of the tokens that `start` names.

        `qkv` is [T, (heads + 2 * kv_heads) * head_dim], queries first. The keys and values are written to `layer`
        before they are read. T == 1 reads no mask. Returns [T, heads * head_dim].
        """
        ...

    def normed(self, x: Hidden, norm: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [T, K] as plain rows, for who reads them instead of logits: [T, K] in the backend's dtype."""
        ...

    def logits(
        self, x: Hidden, norm: Tensor, eps: float, weight: WeightT, rows: "slice | Tensor" = ALL_ROWS
    ) -> Tensor:
        """Final norm and output matmul for those `rows` (int64 on the device, or a slice) of x [T, K]: [rows, V]."""
        ...
