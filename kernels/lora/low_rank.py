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
    """The adapters of a model. count: their number, M. changes: of each matrix that any of them changes, by the
    tensor's name, one entry an adapter; None: it leaves the matrix as it is. joined: of tensors that hold several of
    these matrices, one below the other, their names and rows. tied: the output matrix is the embedding, which has
    changes of its own as each."""

    count: int
    changes: Mapping[str, Sequence[LowRank | None]]
    joined: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    tied: bool = False


@dataclass(frozen=True)
class Changes:
    """The changes of P matrices that read the same input, by M adapters, as rank R, the largest, padded with zeros.

    parts: rows of each matrix, N in all. a: [P, M, R, K]. b: [N, M, R], times the scales. Both have one float dtype.
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


def padded_rank(changes: Iterable[LowRank | None]) -> int:
    """The rank R of `Changes` of these."""
    most = max(len(change.a) for change in changes if change is not None)
    return -(-most // RANKS_AT_ONCE) * RANKS_AT_ONCE


def stacked(changes: Sequence[Sequence[LowRank | None]], rows: Sequence[int], cols: int) -> Changes:
    """The changes [P][M] of matrices [rows_p, cols], fp32. Raises ValueError where one does not fit its matrix."""
    rank = padded_rank(chain.from_iterable(changes))
    count = len(changes[0])
    a = torch.zeros(len(rows), count, rank, cols)
    b = torch.zeros(sum(rows), count, rank)
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
    """y [T, N] plus the changes of what x [T, K] is multiplied by; scales [M, T]: of each adapter for each row.

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
