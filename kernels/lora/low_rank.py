"""Changes of matrices by low-rank adapters (LoRA): the torch definition.

A matrix W [N, K] with adapters m computes y = W x + sum over m of s_m (alpha_m / r_m) B_m (A_m x), where each row of a
step has scales s_m of its own. W is not changed. Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language
Models".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from quengine.kernels.lora.change import LowRank

RANKS_AT_ONCE = 16
"""Ranks are padded with zeros to a multiple of this, so that kernels take whole tiles."""


@dataclass(frozen=True)
class Adapters:
    """The M adapters of a model. count: M.

    changes: name of a changed tensor -> the change of each adapter; None: that adapter does not change it. joined: name
    of a tensor that holds several of these matrices one below the other -> their names and rows. tied: the output
    matrix is the embedding, but the two have separate changes.
    """

    count: int
    changes: Mapping[str, Sequence[LowRank | None]]
    joined: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    tied: bool = False


@dataclass(frozen=True)
class Changes:
    """The changes of P matrices that read the same input, by M adapters, padded with zeros to one rank R.

    parts: rows of each matrix, N in all. a: [P, M, R, K]. b: [N, M, R], already times `LowRank.scale`. Both have one
    float dtype.
    """

    parts: tuple[int, ...]
    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[2]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> "Changes":
        return Changes(self.parts, self.a.to(device, dtype), self.b.to(device, dtype))


def exact_dtype(changes: Changes) -> torch.dtype:
    """The smallest float type that holds the values exactly: most files have 16-bit values."""
    if changes.a.is_meta:
        return changes.a.dtype
    for dtype in (torch.float16, torch.bfloat16):
        if all(torch.equal(values.to(dtype).to(values.dtype), values) for values in (changes.a, changes.b)):
            return dtype
    return torch.float32


@dataclass(frozen=True)
class AdapterShapes:
    """What kernels depend on of `Adapters`. matrices: by the name of each changed matrix, its rank, rows and columns,
    and the smallest type that holds its changes."""

    count: int
    matrices: Mapping[str, tuple[int, int, int, str]]
    joined: Mapping[str, Sequence[tuple[str, int]]]
    tied: bool

    @classmethod
    def of(cls, adapters: Adapters) -> "AdapterShapes":
        found = dict[str, tuple[int, int, int, str]]()
        for name, changes in adapters.changes.items():
            given = [each for each in changes if each is not None]
            rank, (rows, cols) = padded_rank(given), (len(given[0].b), given[0].a.shape[-1])
            whole = stacked([changes], [rows], cols)
            found[name] = rank, rows, cols, str(exact_dtype(whole)).removeprefix("torch.")
        return cls(adapters.count, found, adapters.joined, adapters.tied)

    def adapters(self) -> Adapters:
        """Adapters of these shapes without data."""
        changes = dict[str, Sequence[LowRank | None]]()
        for name, (rank, rows, cols, dtype) in self.matrices.items():
            kind = {"dtype": getattr(torch, dtype), "device": "meta"}
            change = LowRank(torch.empty(rank, cols, **kind), torch.empty(rows, rank, **kind), 1.0)
            changes[name] = [change] * self.count
        return Adapters(self.count, changes, self.joined, self.tied)


def padded_rank(changes: Iterable[LowRank | None]) -> int:
    """The rank R of `Changes` made of these: the largest, rounded up to a multiple of `RANKS_AT_ONCE`."""
    most = max(len(change.a) for change in changes if change is not None)
    return -(-most // RANKS_AT_ONCE) * RANKS_AT_ONCE


def stacked(changes: Sequence[Sequence[LowRank | None]], rows: Sequence[int], cols: int) -> Changes:
    """The changes [P][M] of matrices [rows_p, cols], in fp32; changes on the meta device keep their dtype. Raises
    ValueError if one does not fit its matrix."""
    rank = padded_rank(chain.from_iterable(changes))
    count, given = len(changes[0]), [each for each in chain.from_iterable(changes) if each is not None]
    device, types = given[0].a.device, {each.a.dtype for each in given}
    dtype = types.pop() if given[0].a.is_meta and len(types) == 1 else torch.float32
    a = torch.zeros(len(rows), count, rank, cols, dtype=dtype, device=device)
    b = torch.zeros(sum(rows), count, rank, dtype=dtype, device=device)
    first = 0
    for part, (of_part, n) in enumerate(zip(changes, rows, strict=True)):
        for number, change in enumerate(of_part):
            if change is None:
                continue
            r = len(change.a)
            if change.a.shape != (r, cols) or change.b.shape != (n, r):
                raise ValueError(
                    f"{list(change.a.shape)} and {list(change.b.shape)} change no matrix {[n, cols]}"
                )
            a[part, number, :r] = change.a.float()
            b[first : first + n, number, :r] = change.b.float() * change.scale
        first += n
    return Changes(tuple(rows), a, b)


def add_changes(y: Tensor, x: Tensor, changes: Changes, scales: Tensor) -> Tensor:
    """y [T, N], the product of x [T, K], plus the changes of the matrix. scales [M, T]: each adapter's for each row.

    Computed in the dtype of x.
    """
    a, b = changes.a.to(x.dtype), changes.b.to(x.dtype)
    shrunk = torch.einsum("tk,pmrk->ptmr", x, a) * scales.to(x.dtype).T[None, :, :, None]
    products = [
        torch.einsum("tmr,nmr->tn", rows, of_part)
        for rows, of_part in zip(shrunk, torch.split(b, list(changes.parts)), strict=True)
    ]
    return y + torch.cat(products, 1)


def add_row_changes(x: Tensor, ids: Tensor, changes: Changes, scales: Tensor, factor: float = 1.0) -> Tensor:
    """x [T, K] plus `factor` times the changes of rows `ids` [T] of a matrix [N, K]; scales as in `add_changes`."""
    a, b = changes.a[0].to(x.dtype), changes.b[ids].to(x.dtype)
    return x + factor * torch.einsum("mt,tmr,mrk->tk", scales.to(x.dtype), b, a)
