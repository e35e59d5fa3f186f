"""Whether two ways of running one model give the same logits and the same greedy text.

Takes two sides (`parity_sides`) through a workload (`parity_workload`). Each comparison streams: at no time are the
logits of more than one chunk held.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quengine.diagnostics.harness import in_parts
from quengine.diagnostics.parity.parity_images import ImageDifferences, compare_images, shown
from quengine.diagnostics.parity.parity_metrics import (
    Budget,
    Comparison,
    Divergence,
    GreedyComparison,
    PhaseMetrics,
    compare_greedy,
    explained_by,
    paired_blocks,
)
from quengine.diagnostics.parity.parity_rounding import RoundedSide, widened
from quengine.diagnostics.parity.parity_routing import Pair, RoutingMetrics
from quengine.diagnostics.parity.parity_sides import REFERENCE, LLMSide
from quengine.diagnostics.parity.parity_workload import Workload
from quengine.kernels.kv.cache_types import CacheType
from quengine.kernels.phase import Phase
from quengine.platform.weight_loader import Progress
from quengine.request.prompt_images import ImagePrompt

DECODE_SPAN = 64
"""Positions of the decode phase whose logits are held at once; prefill holds a chunk."""

MAX_FACTOR = 100.0
"""Factor by which the worst of all positions may exceed the limit of the 99th percentile (docs/parity.md)."""


def _budget(median: float, p99: float) -> Budget:
    return Budget(median, p99, MAX_FACTOR * p99)


REFERENCE_BUDGETS: Mapping[str, Budget] = {
    "prefill": _budget(2e-6, 5e-5),
    "decode": _budget(5e-8, 1e-6),
    "greedy": _budget(2e-6, 5e-5),
    "images": _budget(2e-6, 5e-5),
}
"""Budgets against the float64 definition. In "greedy" the prompt comes through prefill, and in "images" everything, so
the budget of prefill holds for both."""

DEVICE_BUDGETS: Mapping[str, Budget] = {**REFERENCE_BUDGETS, "decode": _budget(1e-8, 1e-6)}
"""Budgets between two devices: in decode their integer sums are equal, and only the order of float sums may differ."""


CODE_FACTORS: Mapping[CacheType, tuple[float, float, float]] = {
    "q8_0": (100.0, 100.0, 10.0),
    "q4_0": (2_000.0, 10_000.0, 500.0),
}
"""Factors, for the median, the p99 and the maximum, by which budgets are wider over a cache of codes. A last bit that
changes a code moves a value by 1/127 of its group's largest, in q4_0 by 1/8, and that difference is carried through the
layers (docs/parity.md). Operation by operation, only the budget of attention over q4_0 is wider.
"""

WIDEST = 0.5
"""The largest budget over codes: logits that have nothing to do with each other are 1 to 2 apart."""


def budgets_for(a: str, b: str, cache_type: CacheType = "f16") -> Mapping[str, Budget]:
    """The limits that hold between two sides, by the devices they run on."""
    budgets = REFERENCE_BUDGETS if REFERENCE in (a, b) else DEVICE_BUDGETS
    if cache_type not in CODE_FACTORS:
        return budgets

    def wider(budget: Budget) -> Budget:
        limits = (budget.nmse_median, budget.nmse_p99, budget.nmse_max)
        factors = zip(limits, CODE_FACTORS[cache_type], strict=True)
        return Budget(*(min(limit * factor, WIDEST) for limit, factor in factors))

    return {name: wider(budget) for name, budget in budgets.items()}


class TextPosition(NamedTuple):
    """A position in a text: `ids` up to and with it are `ids[: position + 1]`."""

    ids: list[int]
    position: int


@dataclass(frozen=True)
class ParityReport:
    """What was measured between sides `a` and `b`, and whether it is within the budgets.

    phases: "prefill", "decode", "greedy" (the logits along the greedy texts) and "images" (those of prompts with
        images), as far as they were run.
    worst: the place that is furthest off in each of the first three phases.
    routing: of a mixture of experts, how often the free choice of experts differs in each phase.
    rounding: for each phase that was over its budget, what rounding its operations' inputs once did to side a; the
        phase's budget in `budgets` is widened by it.
    images: of a model with a projector, the differences of the encoders.
    failures: one phrase for each thing outside its budget; empty means parity holds.
    """

    a: str
    b: str
    phases: dict[str, PhaseMetrics]
    budgets: Mapping[str, Budget]
    worst: dict[str, TextPosition]
    divergences: list[Divergence]
    identical_prompts: int
    prompts: int
    generated: int
    routing: dict[str, RoutingMetrics] = field(default_factory=dict)
    rounding: dict[str, PhaseMetrics] = field(default_factory=dict)
    images: ImageDifferences | None = None

    @property
    def failures(self) -> list[str]:
        found = [
            f"{name}: {excess}"
            for name, metrics in self.phases.items()
            for excess in metrics.excesses(self.budgets[name])
        ]
        found += [] if self.images is None else self.images.failures
        found += [f"{name}: {wide}" for name, metrics in self.routing.items() for wide in metrics.failures]
        wide = sum(not divergence.near_tie for divergence in self.divergences)
        if wide:
            found.append(
                f"greedy: {wide} of {len(self.divergences)} divergences are wider than twice the largest "
                f"logit difference there"
            )
        return found

    @property
    def within(self) -> bool:
        return not self.failures


def compare_sides(
    a: LLMSide, b: LLMSide, workload: Workload, progress: Progress, cache_type: CacheType = "f16"
) -> ParityReport:
    """Run the whole comparison; `progress` is called with what is being computed, in a few words."""
    phases: dict[str, PhaseMetrics] = {}
    worst: dict[str, TextPosition] = {}
    pairs: dict[str, Pair] = {}
    names: tuple[Phase, ...] = ("prefill", "decode")
    for phase in names if workload.windows else ():
        pairs[phase] = Pair(a, b)
        forced = _teacher_forced(pairs[phase], workload.windows, phase, progress)
        phases[phase] = forced.metrics()
        worst[phase] = _place(forced.worst(), [(ids, 0) for ids in workload.windows])
    free = Pair(a, b)
    greedy = list(_free_running(free, workload, progress))
    rows = Comparison([row for result in greedy for row in result.comparison.rows])
    if greedy:
        pairs["greedy"], phases["greedy"] = free, rows.metrics()
        # The first of a generated text's rows are the logits after its prompt's last token.
        texts = zip(workload.prompts, greedy, strict=True)
        worst["greedy"] = _place(rows.worst(), [([*ids, *text.tokens], len(ids)) for ids, text in texts], -1)
    images = compare_images(a, b, progress)
    prompts = [] if images is None else images.prompts
    if prompts:
        pairs["images"] = Pair(a, b)
        phases["images"] = _with_images(pairs["images"], prompts, progress)
    found = [divergence for result in greedy for divergence in result.divergences]
    budgets = {name: budgets_for(a.device, b.device, cache_type)[name] for name in phases}
    rounding = {
        name: _rounding(a, name, workload, greedy, prompts, progress)
        for name, metrics in phases.items()
        if a.watchable and metrics.excesses(budgets[name])
    }
    budgets |= {name: widened(budgets[name], metrics) for name, metrics in rounding.items()}
    return ParityReport(
        a=a.name,
        b=b.name,
        phases=phases,
        budgets=budgets,
        worst=worst,
        divergences=found,
        identical_prompts=sum(not result.divergences for result in greedy),
        prompts=len(greedy),
        generated=sum(len(row) for row in rows.rows),
        routing={
            name: pair.counts.metrics(budgets[name].clear_margin)
            for name, pair in pairs.items()
            if a.has_experts
        },
        rounding=rounding,
        images=None if images is None else images.metrics,
    )


def _with_images(pair: Pair, prompts: list[ImagePrompt], progress: Progress) -> PhaseMetrics:
    """Compares the logits of prompts with images; both sides get the image features of side a."""
    comparison = Comparison()
    for prompt in prompts:
        with shown((pair.a, pair.b), prompt):
            comparison.include(_teacher_forced(pair, [prompt.ids], "prefill", progress))
    return comparison.metrics()


def _rounding(
    a: LLMSide,
    name: str,
    workload: Workload,
    greedy: list[GreedyComparison],
    prompts: list[ImagePrompt],
    progress: Progress,
) -> PhaseMetrics:
    """The effect of rounding once on side a, over the same rows as the phase of that name."""

    def rounded(what: str) -> None:
        progress(f"rounded once, {what}")

    # The prompt of a greedy text comes through prefill, so it is rounded as that.
    phase: Phase = "decode" if name == "decode" else "prefill"
    pair = Pair(a, RoundedSide(a, phase))
    if name == "images":
        return _with_images(pair, prompts, rounded)
    if name != "greedy":
        return _teacher_forced(pair, workload.windows, phase, rounded).metrics()
    comparison = Comparison()
    for index, (prompt, text) in enumerate(zip(workload.prompts, greedy, strict=True)):
        rounded(f"greedy: prompt {index + 1} of {len(greedy)}")
        for logits in paired_blocks(*pair.continuations(prompt, text.tokens)):
            comparison.add(*logits)
    return comparison.metrics()


def _teacher_forced(pair: Pair, windows: list[list[int]], phase: Phase, progress: Progress) -> Comparison:
    comparison, began = Comparison(), time.perf_counter()
    for index, ids in enumerate(windows):
        done, elapsed = sum(map(len, windows[:index])), time.perf_counter() - began
        rate = f", {done / elapsed:.0f} tok/s{_left(done, sum(map(len, windows)), elapsed)}" if done else ""
        progress(f"{phase}: text {index + 1} of {len(windows)}, {len(ids)} tokens{rate}")
        span = pair.most_together(phase)
        if phase == "decode" and not any(pair.a.are_states):
            span = DECODE_SPAN
        for part, start in in_parts(ids, 0, span):
            forced = _ForcedCache(pair, start, start + len(part))
            comparison.add(*pair.span(part, start, phase, forced.after))
            comparison.add_cached(forced.of_a, forced.of_b)
    return comparison


def _left(done: int, total: int, elapsed: float) -> str:
    """The time left of a phase, at the speed of the part that is `done`."""
    seconds = elapsed * (total - done) / done
    return (
        f", {seconds:.0f} s left of this phase"
        if seconds < 120
        else f", {seconds / 60:.0f} min left of this phase"
    )


def _place(row: int, texts: list[tuple[list[int], int]], shift: int = 0) -> TextPosition:
    """The place of row number `row` among the rows of all texts. Each text has a row for every token from a first one
    on, at the token's position plus `shift`.
    """
    for ids, first in texts:
        if row < len(ids) - first:
            return TextPosition(ids, first + row + shift)
        row -= len(ids) - first
    raise ValueError(f"row {row} lies beyond the texts")


class _ForcedCache:
    """The rows that both sides cache in a span. After each of its steps side b is given side a's rows, so that the next
    step starts from the same state on both sides.

    A cache in fp16 turns the last bit of a correct side into a whole step of fp16 now and then. Left alone,
    those steps add up to more than what is to be measured (docs/parity.md has the numbers).
    """

    def __init__(self, pair: Pair, start: int, end: int) -> None:
        self._pair, self._start, self._end = pair, start, end
        self._steps: list[list[Tensor]] = []

    @cached_property
    def of_a(self) -> list[Tensor]:
        """The rows of side a, which has computed the whole span."""
        return self._pair.a.cached(self._start, self._end)

    @property
    def of_b(self) -> list[Tensor]:
        """The rows that side b itself computed, of all steps."""
        return [torch.cat(steps) for steps in zip(*self._steps, strict=True)]

    def after(self, start: int, end: int) -> None:
        """Keeps the rows of side b, which has computed these positions of the span, and gives it those of side a. Where
        there are states, the positions are the whole span."""
        rows = [
            rows if is_state else rows[start - self._start : end - self._start]
            for is_state, rows in zip(self._pair.a.are_states, self.of_a, strict=True)
        ]
        self._steps.append(self._pair.b.cached(start, end))
        self._pair.b.set_cached(start, end, rows)


def _free_running(pair: Pair, workload: Workload, progress: Progress) -> Iterator[GreedyComparison]:
    """Side b generates freely; both then compute the logits along its text.

    Up to the first difference this is what a would have generated too, so nothing is lost by not running a
    freely, and the slow side computes whole chunks instead of single tokens. Where there are experts the logits are
    compared under the same routing, while side b chose its tokens from logits of its own routing.
    """
    began = time.perf_counter()
    for index, prompt in enumerate(workload.prompts):
        elapsed = time.perf_counter() - began
        rate = index * workload.tokens / elapsed
        shown = f", {rate:.1f} tok/s{_left(index, len(workload.prompts), elapsed)}" if index else ""
        progress(f"greedy: prompt {index + 1} of {len(workload.prompts)}{shown}")
        tokens = pair.b.greedy(prompt, workload.tokens)
        found = compare_greedy(index, tokens, *pair.continuations(prompt, tokens))
        if pair.a.has_experts and found.divergences:
            found = explained_by(found, pair.b.continuation(prompt, tokens))
        yield found
