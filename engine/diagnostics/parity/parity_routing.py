"""The routers of a mixture of experts in parity: both sides on the same tokens, side b with the experts of side a.

One other expert changes a row's logits by far more than rounding does, so that values can only be compared under the
same routing. Side a chooses; side b is given its choice (`Backend.route`'s `experts`). What side b would have chosen on
the same rows is counted beside it, with the margin by which side a's routers made the choice.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import tee

import torch
from torch import Tensor

from quengine.diagnostics.harness import in_parts
from quengine.diagnostics.parity.parity_operations import Call, rows_of, watched
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.kernels.backend import Hidden
from quengine.kernels.moe.router import Router
from quengine.kernels.phase import Phase
from quengine.kernels.rms_norm import rms_norm


@dataclass(frozen=True)
class RoutingMetrics:
    """The share of places where side b's routers, on rows after the same routing, choose other experts than side a's.

    places: positions times layers with experts. differing: those where the two sets of experts are not the same.
    margin: at a differing place, the router logit on side a of the best expert that side b left out, minus that of the
        worst expert that it took instead (where the k-th and the next change places, these two). The place is the
        differing one with the largest `relative`; 0 without any.
    relative: the margin in units of the standard deviation of that row's logits.
    layer, position: where that place is; -1 without any.
    bound: of `relative`; a difference above it is a failure (`Budget.clear_margin`).
    """

    places: int
    differing: int
    margin: float
    relative: float
    layer: int
    position: int
    bound: float

    @property
    def failures(self) -> list[str]:
        """One phrase for the margin that exceeds the bound; empty if none does."""
        if self.relative <= self.bound:  # not ">": what is not finite must not pass
            return []
        return [
            f"another choice of experts where a's margin is {self.margin:.2g} logits (layer {self.layer}, position "
            f"{self.position}), {self.relative:.2g} of their standard deviation; over {self.bound:.2g} it is clear"
        ]


@dataclass
class RoutingCounts:
    """Collects the places of one phase in a few numbers, however many places there are."""

    places: int = 0
    differing: int = 0
    worst: tuple[float, float, int, int] = (0.0, 0.0, -1, -1)
    """Relative margin, margin, layer, position."""

    def add(self, layer: int, positions: Tensor, margins: tuple[Tensor, Tensor], differing: Tensor) -> None:
        """Take the rows of one layer: their positions, margins with relative ones, and where the choices differ."""
        self.places += len(positions)
        self.differing += int(differing.sum())
        for row in differing.nonzero()[:, 0].tolist():
            margin, relative = (float(values[row]) for values in margins)
            self.worst = max(self.worst, (relative, margin, layer, int(positions[row])))

    def metrics(self, bound: float) -> RoutingMetrics:
        relative, margin, layer, position = self.worst
        return RoutingMetrics(self.places, self.differing, margin, relative, layer, position, bound)


@dataclass
class _Choices:
    """What one layer's router chose on side a at the positions of a span: experts [n, k], logits fp64 [n, E]."""

    router: Router
    experts: Tensor
    logits: Tensor


@dataclass
class Pair:
    """Two sides that compute the same tokens, and in a mixture of experts with the same experts.

    If side b's free choices in a step are those of side a, the step runs as it serves, captured or not. Otherwise its
    operations run one by one, with side a's experts.
    """

    a: LLMSide
    b: LLMSide
    counts: RoutingCounts = field(default_factory=RoutingCounts)
    _start: int = 0
    _rows: int = 0
    _chosen: dict[int, _Choices] = field(default_factory=dict)

    def most_together(self, phase: Phase) -> int:
        """Tokens that side a computes before side b does. Where there are states, they are handed over after these."""
        steps = self.a.step(phase), self.b.step(phase)
        return min(steps) if any(self.a.are_states) else max(steps)

    def span(
        self, ids: list[int], start: int, phase: Phase, after: Callable[[int, int], None] = lambda *_: None
    ) -> tuple[Tensor, Tensor]:
        """Both sides' logits [n, vocab] of `ids` from position `start` on, over what is cached before them.

        `after(start, end)` is called when both have computed these positions.
        """
        self._start, self._rows, self._chosen = start, len(ids), {}
        logits_a = [self._forward_a(part, at) for part, at in in_parts(ids, start, self.a.step(phase))]
        logits_b = []
        for part, at in in_parts(ids, start, self.b.step(phase)):
            logits_b.append(self._forward_b(part, at))
            after(at, at + len(part))
        return torch.cat(logits_a), torch.cat(logits_b)

    def continuations(
        self, prompt: list[int], tokens: list[int]
    ) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """The logits of each side, in blocks [t, vocab], from which each of `tokens` follows after `prompt`."""
        if not self.a.has_experts:
            return self.a.continuation(prompt, tokens), self.b.continuation(prompt, tokens)
        first, second = tee(self._together(prompt, tokens))
        return (block for block, _ in first), (block for _, block in second)

    def _together(self, prompt: list[int], tokens: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        phases: tuple[Phase, ...] = ("prefill", "decode")
        chunk, step = (self.most_together(phase) for phase in phases)
        for part in in_parts(prompt, 0, chunk):
            last = self.span(*part, "prefill")
        yield last[0][-1:], last[1][-1:]
        for part in in_parts(tokens[:-1], len(prompt), step):
            yield self.span(*part, "decode")

    def _forward_a(self, ids: list[int], start: int) -> Tensor:
        if not self.a.has_experts:
            return self.a.forward(ids, start)
        with watched(self.a.decoder, self._record):
            return self.a.eager(ids, start)

    def _forward_b(self, ids: list[int], start: int) -> Tensor:
        if not self.a.has_experts:
            return self.b.forward(ids, start)
        before, rows = self.counts.differing, slice(start - self._start, start - self._start + len(ids))
        self.b.choose_experts({layer: chosen.experts[rows] for layer, chosen in self._chosen.items()})
        states = self.b.states_before(start)
        with watched(self.b.decoder, self._force):
            logits = self.b.eager(ids, start)
        if self.counts.differing > before:
            return logits
        self.b.go_back(start, states)
        return self.b.forward(ids, start)

    def _record(self, call: Call) -> Hidden:
        found = call.run(*call.inputs)
        if call.operation == "route" and (layer := call.layer) is not None:
            batch, router, logits = call.args[0], call.args[3], router_logits(call)
            rows = batch.positions.long().cpu() - self._start
            if layer not in self._chosen:
                experts = torch.zeros(self._rows, found.selected.shape[1], dtype=torch.int64)
                scores = torch.zeros(self._rows, logits.shape[1], dtype=torch.float64)
                self._chosen[layer] = _Choices(router, experts, scores)
            self._chosen[layer].experts[rows] = found.selected.long().cpu()
            self._chosen[layer].logits[rows] = logits
        return found

    def _force(self, call: Call) -> Hidden:
        found = call.run(*call.inputs)
        if call.operation != "route" or (layer := call.layer) is None:
            return found
        batch, chosen = call.args[0], self._chosen[layer]
        positions = batch.positions.long().cpu()
        rows = positions - self._start
        wanted, free = chosen.experts[rows], found.selected.long().cpu()
        differing = (free != wanted).any(dim=1)
        margins = torch.zeros(len(rows)), torch.zeros(len(rows))
        if differing.any():
            margins = choice_margins(chosen.logits[rows], chosen.router, wanted, free)
        self.counts.add(layer, positions, margins, differing)
        return call.run(*call.inputs, experts=wanted.to(batch.device, torch.int32))


def choice_margins(logits: Tensor, router: Router, wanted: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    """The margin of side a's logits fp64 [n, E] for its experts `wanted` [n, k] over `taken` [n, k]: [n] each,
    in logits, and in units of their standard deviation. See RoutingMetrics; infinite where there is no number.

    Scores with a selection bias are brought to logits by the slope of the score at the two experts. Where experts are
    chosen from groups, the margin of a choice between groups is that of the experts in them.
    """
    scores, slopes = logits, torch.ones_like(logits)
    if router.selection_bias is not None:
        if router.kind.scores != "softmax_of_chosen":
            scores = logits.sigmoid() if router.kind.scores == "sigmoid" else logits.softmax(-1)
            slopes = scores * (1 - scores)
        scores = scores + router.selection_bias.double().cpu()
    of_a, of_b = (torch.zeros_like(logits, dtype=torch.bool).scatter(1, of, True) for of in (wanted, taken))
    best = scores.masked_fill(~(of_a & ~of_b), float("-inf")).max(dim=1)
    worst = scores.masked_fill(~(of_b & ~of_a), float("inf")).min(dim=1)
    two = slopes.gather(1, torch.stack([best.indices, worst.indices], dim=1))
    margin = (best.values - worst.values) / two.mean(dim=1)
    margin = margin.nan_to_num(nan=float("inf")).clamp(min=0)
    spread = logits.std(dim=1, correction=0)
    relative = (margin / spread).nan_to_num(nan=float("inf"))
    return margin, torch.where(margin == 0, 0.0, relative)


def router_logits(call: Call) -> Tensor:
    """The router's logits [T, E] in a call of `Backend.route`, by the definition in fp64 on the host, from the rows
    that the backend has."""
    _, x, norm, router, *_ = call.args
    normed = rms_norm(rows_of(x).double().cpu(), norm.weight.double().cpu(), norm.eps)
    logits: Tensor = normed @ router.weight.double().cpu().T
    return logits if router.bias is None else logits + router.bias.double().cpu()
