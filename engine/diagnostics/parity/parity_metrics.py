"""The differences of two streams of logits, and whether they are within a budget (docs/parity.md)."""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor

from quengine.diagnostics.harness import excesses, nmse_rows, percentile, spread
from quengine.kernels.kv.cache_types import CODE_GROUP
from quengine.kernels.kv.kv_codes import SCALE_STEP, dequantize_rows

TILE_ELEMENTS = 2**21
"""Logits compared at once, in fp64: 16 MiB a temporary, whatever the vocabulary."""

TOP_K = 5

DIFFERENCES = 6
"""The number of values kept for a position: see `position_differences`."""


@dataclass(frozen=True)
class Budget:
    """Upper limits of the logits' NMSE over positions. The limits of the p99 and of the maximum also hold for cached
    keys and values.
    """

    nmse_median: float
    nmse_p99: float
    nmse_max: float

    @property
    def clear_margin(self) -> float:
        """The margin of two logits that noise does not reverse, relative to the root mean square of all logits: the
        largest root-mean-square error that a position's logits may have.
        """
        return math.sqrt(self.nmse_max)


@dataclass(frozen=True)
class PhaseMetrics:
    """The differences of one phase, over all its positions.

    nmse_*: normalised mean squared error of one position's logits as they are, ||a - b||^2 / ||a||^2.
    kl_*: Kullback-Leibler divergence KL(softmax a || softmax b) of one position, in nats.
    top1: the share of positions with the same largest logit. top5: the mean share of a's five largest that are among
        b's five.
    widest_flip: the widest margin of a's two largest logits at a position where b has another largest logit; relative
        to the root mean square of a's logits; 0 where the largest are the same everywhere.
    max_difference: the largest |a - b| of any logit.
    cached_*: NMSE of the keys and of the values that one layer caches for one position; NaN where none were
        compared.
    not_finite: positions with a NaN or infinite logit on either side; they are in no other number but
        `positions`.

    Every field but the counts is NaN when no position was finite.
    """

    positions: int
    not_finite: int
    nmse_median: float
    nmse_p99: float
    nmse_max: float
    kl_mean: float
    kl_p99: float
    top1: float
    top5: float
    widest_flip: float
    max_difference: float
    cached_median: float
    cached_p99: float
    cached_max: float

    def excesses(self, budget: Budget) -> list[str]:
        """What is outside the budget, one phrase each, with value and limit; empty when within."""
        if self.positions == 0:
            return ["no position was compared"]
        found = []
        if self.not_finite:
            found.append(f"{self.not_finite} of {self.positions} positions have logits that are not finite")
        limits = (
            ("NMSE median", self.nmse_median, budget.nmse_median),
            ("NMSE p99", self.nmse_p99, budget.nmse_p99),
            ("NMSE max", self.nmse_max, budget.nmse_max),
        )
        found += excesses(limits)
        if self.widest_flip > budget.clear_margin:
            found.append(
                f"top-1 differs where a's two largest logits are {self.widest_flip:.2g} apart (in units of the logits' "
                f"root mean square); a margin over {budget.clear_margin:.2g} is clear"
            )
        if math.isnan(self.cached_max):  # none were compared
            return found
        cached = (("p99", self.cached_p99, budget.nmse_p99), ("max", self.cached_max, budget.nmse_max))
        return found + [f"cached keys and values: NMSE {phrase}" for phrase in excesses(cached)]


def nmse_cached(a: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[Tensor]:
    """`nmse_rows` of the tensors that two sides cached; codes are compared with the scales after them. Tensors of one
    shape are compared at once, since each has few rows after a decode step."""
    alike, codes = dict[Hashable, list[tuple[Tensor, ...]]](), list[tuple[Tensor, Tensor]]()
    for mine, other in zip(a, b, strict=True):
        if mine.dtype in (torch.int8, torch.uint8):
            codes.append((mine, other))
            continue
        compared = (*codes.pop(0), mine, other) if codes else (mine, other)
        alike.setdefault(tuple((one.shape, one.dtype) for one in compared), []).append(compared)
    for tensors in alike.values():
        most = max(1, TILE_ELEMENTS // max(1, tensors[0][0].numel()))
        for start in range(0, len(tensors), most):
            first, second, *scales = map(torch.cat, zip(*tensors[start : start + most], strict=True))
            yield from _nmse_codes(first, second, *scales) if scales else [nmse_rows(first, second, first)]


def _nmse_codes(mine: Tensor, other: Tensor, scale: Tensor, other_scale: Tensor) -> Iterator[Tensor]:
    """NMSE of codes and of their scales. Both sides round, and a value near the middle between two codes may go to
    either, so a difference of codes counts only as far as it exceeds one.

    In q4_0 a difference of values counts as far as it exceeds one code: where a group's largest and smallest values are
    of nearly one size, its scale may have either sign. A scale is rounded too, and may be either of two values.
    """
    if mine.dtype == torch.int8:
        yield nmse_rows(mine, other, mine, 1.0)
        yield nmse_rows(scale, other_scale, scale)
        return
    values, others = dequantize_rows(mine, scale), dequantize_rows(other, other_scale)
    sizes, other_sizes = scale.float().abs(), other_scale.float().abs()
    code = torch.maximum(sizes, other_sizes).repeat_interleave(CODE_GROUP, dim=-1)
    yield nmse_rows(values, others, values, code * (1 + 8 * SCALE_STEP))
    yield nmse_rows(sizes, other_sizes, sizes, sizes * SCALE_STEP)


@dataclass
class Comparison:
    """Collects the differences of one phase block by block; keeps a few numbers a position, no logits."""

    rows: list[Tensor] = field(default_factory=list)
    cached: list[Tensor] = field(default_factory=list)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Take logits [T, vocab] of the same positions, of any float dtype and device."""
        if a.shape != b.shape or a.ndim != 2:
            raise ValueError(f"logits to compare have shapes {list(a.shape)} and {list(b.shape)}")
        step = max(1, TILE_ELEMENTS // a.shape[1])
        for row in range(0, a.shape[0], step):
            tile = a[row : row + step].to("cpu", torch.float64), b[row : row + step].to("cpu", torch.float64)
            self.rows.append(position_differences(*tile))

    def add_cached(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        """Take what the two sides cached for the same positions, of some layers: KVLayer.tensors, or states."""
        self.cached += nmse_cached(a, b)

    def include(self, other: "Comparison") -> None:
        """Take the positions of another comparison."""
        self.rows += other.rows
        self.cached += other.cached

    def worst(self) -> int:
        """The number of the position that is furthest off; one that is not finite comes before all.

        A top-1 that differs counts as the square of its margin: that, as the NMSE, is held against `Budget.nmse_max`.
        """
        nmse, _, top1, _, margin, _ = torch.cat(self.rows).T
        return int(torch.maximum(nmse, ((1 - top1) * margin).square()).nan_to_num(nan=float("inf")).argmax())

    def metrics(self) -> PhaseMetrics:
        """The summary so far."""
        cached = torch.cat(self.cached) if self.cached else torch.empty(0, dtype=torch.float64)
        rows = torch.cat(self.rows) if self.rows else torch.empty(0, DIFFERENCES, dtype=torch.float64)
        finite = rows[~rows.isnan().any(dim=1)]
        nmse, kl, top1, top5, margin, difference = finite.T
        (median, p99, most), of_cached = spread(nmse), spread(cached)
        return PhaseMetrics(
            positions=len(rows),
            not_finite=len(rows) - len(finite),
            nmse_median=median,
            nmse_p99=p99,
            nmse_max=most,
            kl_mean=float(kl.mean()),
            kl_p99=percentile(kl, 99),
            top1=float(top1.mean()),
            top5=float(top5.mean()),
            widest_flip=percentile((1 - top1) * margin, 100),
            max_difference=percentile(difference, 100),
            cached_median=of_cached[0],
            cached_p99=of_cached[1],
            cached_max=of_cached[2],
        )


def position_differences(a: Tensor, b: Tensor) -> Tensor:
    """Per position [T, DIFFERENCES]: NMSE, KL in nats, same top-1, shared top-5, the margin of a's two largest logits
    relative to the root mean square of a's, largest difference; NaN where not finite.

    `a` and `b` are fp64 [T, vocab]. The NMSE is that of raw logits, for which the budgets were set; the KL divergence,
    which a constant shift does not change, shows what such a shift hides or adds.
    """
    difference = a - b
    error, energy = difference.square().sum(dim=1), a.square().sum(dim=1)
    nmse = torch.where(error == 0, 0.0, error / energy)
    log_p, log_q = a.log_softmax(dim=1), b.log_softmax(dim=1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=1).clamp(min=0.0)
    k = min(TOP_K, a.shape[1])
    largest = a.topk(k, dim=1)
    top_a, top_b = largest.indices, b.topk(k, dim=1).indices
    margin = (largest.values[:, 0] - largest.values[:, min(1, k - 1)]) / a.square().mean(dim=1).sqrt()
    top1 = (a.argmax(dim=1) == b.argmax(dim=1)).double()
    top5 = (top_a[:, :, None] == top_b[:, None, :]).any(dim=2).double().mean(dim=1)
    # Logits that are all zero have no margin.
    margin = torch.where(energy == 0, 0.0, margin)
    result = torch.stack([nmse, kl, top1, top5, margin, difference.abs().amax(dim=1)], dim=1)
    # A NaN or an infinity on either side is one in these sums.
    broken = ~(error.isfinite() & energy.isfinite())
    return result.masked_fill(broken[:, None], float("nan"))


def paired_blocks(a: Iterable[Tensor], b: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks [t, vocab] of two streams, cut so that both of a pair hold the same positions, about a tile of them.

    The streams may be cut differently, one in chunks, the other token by token. Raises ValueError when one stream ends
    before the other.
    """
    for first, second in zip_longest(_tiles(a), _tiles(b), fillvalue=torch.empty(0)):
        if len(first) != len(second):
            shorter = "a" if len(first) < len(second) else "b"
            raise ValueError(f"side {shorter} gave fewer positions than the other")
        yield first, second


def _tiles(stream: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same positions in blocks of TILE_ELEMENTS logits each, the last one shorter."""
    held: list[Tensor] = []
    for block in stream:
        held.append(block)
        rows = max(1, TILE_ELEMENTS // block.shape[1])
        if sum(map(len, held)) >= rows:
            joined = torch.cat(held)
            full = len(joined) // rows * rows
            yield from (joined[start : start + rows] for start in range(0, full, rows))
            held = [joined[full:]]
    if sum(map(len, held)):
        yield torch.cat(held)


@dataclass(frozen=True)
class Divergence:
    """A greedy choice that differs: `token_a` where `token_b` was generated, `index` tokens after the prompt.

    `margin` is the distance of a's two largest logits there, `max_difference` the largest |a - b| of any logit there.
    When b's token has b's largest logit, margin <= 2 * max_difference follows; a wider margin means that the token was
    not chosen from these logits. `first` marks where the two free-running texts part.
    """

    prompt: int
    index: int
    token_a: int
    token_b: int
    margin: float
    max_difference: float
    first: bool

    @property
    def near_tie(self) -> bool:
        """Whether the difference of the logits explains the choice; a margin of 0 leaves it open."""
        return self.margin == 0 or self.margin < 2 * self.max_difference


@dataclass(frozen=True)
class GreedyComparison:
    """The greedy choices that differ along one generated text, and how far the logits are apart on the way.

    rows: side a's logits fp64 [vocab] at each divergence.
    """

    tokens: list[int]
    comparison: Comparison
    divergences: list[Divergence]
    rows: list[Tensor]


def compare_greedy(
    prompt: int, tokens: list[int], a: Iterable[Tensor], b: Iterable[Tensor]
) -> "GreedyComparison":
    """Compares the logits, [n, vocab] in blocks, from which each of a generated text's `tokens` followed.

    Side b generated `tokens` and side a was fed them, so up to the first difference these are the logits of
    two free-running texts; after it, those of two engines that continue the same text.
    """
    comparison, index = Comparison(), 0
    found: list[Divergence] = []
    rows: list[Tensor] = []
    for block_a, block_b in paired_blocks(a, b):
        comparison.add(block_a, block_b)
        for row_a, row_b in zip(
            block_a.to("cpu", torch.float64), block_b.to("cpu", torch.float64), strict=True
        ):
            top = row_a.topk(2)
            choice, token = int(row_a.argmax()), tokens[index]
            if choice != token:
                margin = float(top.values[0] - top.values[1])
                largest = float((row_a - row_b).abs().max())
                found.append(Divergence(prompt, index, choice, token, margin, largest, first=not found))
                rows.append(row_a.clone())
            index += 1
    if index != len(tokens):
        raise ValueError(f"{len(tokens)} tokens were generated and {index} positions compared")
    return GreedyComparison(tokens, comparison, found, rows)


def explained_by(result: GreedyComparison, logits: Iterable[Tensor]) -> GreedyComparison:
    """The comparison, with `max_difference` of its divergences taken from `logits`, [n, vocab] in blocks. Side b
    generated the tokens from these; the comparison itself is of other logits.
    """
    by_index = {divergence.index: number for number, divergence in enumerate(result.divergences)}
    found, index = list(result.divergences), 0
    for block in logits:
        for row in block:
            number = by_index.get(index)
            if number is not None:
                largest = float((result.rows[number] - row.to("cpu", torch.float64)).abs().max())
                found[number] = replace(found[number], max_difference=largest)
            index += 1
    return replace(result, divergences=found)
