"""The effect of rounding on one model: a measure of the distance at which two correct sides may end.

The budgets of whole passes hold for models that carry an operation's rounding on as it is. Some amplify it: in a slice
of two random layers of 7B shape fp16 arithmetic with every operation within its budget ends 2.9e-6 off, where 2e-6 is
the limit. So a phase that is over its budget is held against the model itself: side a runs once more with the input of
every operation rounded once, and the change of its logits is what the budget is widened by. Side b has no part in it:
an error in b widens nothing.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from quengine.diagnostics.parity.parity_metrics import Budget, PhaseMetrics
from quengine.diagnostics.parity.parity_operations import Call, Operation, in_the_form_of, rows_of, watched
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.kernels.backend import Hidden
from quengine.kernels.phase import Phase

SIGNIFICANT_BITS: dict[Phase, int] = {"prefill": 10, "decode": 13}
"""Significant bits of an operation's rounded input. Prefill: fp16 has 11; one less, because weights and attention
probabilities may be rounded to fp16 as well. Decode: int16 by groups of 32 with one scale loses at most as much as 13
bits do, 32 / 12 / 32767^2 of a group's energy, where one value of the group is all of it."""

FACTOR = 4.0
"""Factor by which a correct side may move the logits further than this rounding: one measurement of noise is noise
itself."""

_EXACT: frozenset[Operation] = frozenset(("embed", "route"))
"""Operations that are computed in fp32 in both phases."""


def widened(budget: Budget, rounding: PhaseMetrics) -> Budget:
    """The budget of a phase, widened to `FACTOR` times the change of the logits by `rounding` where that is more.

    The maximum, and with it the clear margin, keeps its distance from the 99th percentile. A measurement that is not
    finite widens nothing.
    """

    def wider(limit: float, *measured: float) -> float:
        return max([limit, *(FACTOR * value for value in measured if math.isfinite(value))])

    median, p99 = wider(budget.nmse_median, rounding.nmse_median), budget.nmse_p99
    most = wider(p99, rounding.nmse_p99, rounding.cached_p99)
    return Budget(median, most, budget.nmse_max * (most / p99 if most > p99 else 1.0))


def round_to(values: Tensor, bits: int) -> Tensor:
    """`values` rounded to `bits` significant bits, ties to even; of the same shape and dtype (fp32 or fp64)."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2.0**bits).round() * 2.0**-bits, exponent).to(values.dtype)


class RoundedSide(LLMSide):
    """Side a again, on the same weights and cache, with the input of every operation rounded once.

    It borrows the model of `side`. Its own rows, at positions from `_first` on, are in the cache during its steps only;
    between them the cache has side a's rows. Its states start from those that side a had before its newest steps. On
    CUDA a norm that the preceding operation has begun cannot be rounded again and is left as it is.
    """

    def __init__(self, side: LLMSide, phase: Phase) -> None:
        super().__init__(f"{side.name}, rounded", side.llm, side.device)
        self.images = side.images
        self._bits = SIGNIFICANT_BITS[phase]
        self._first = 0
        self._rows: list[Tensor] = []
        self._before: list[Tensor] = []

    def forward(self, ids: list[int], start: int) -> Tensor:
        """As `LLMSide.forward`, rounded."""
        return self.eager(ids, start)

    def eager(self, ids: list[int], start: int) -> Tensor:
        end = start + len(ids)
        if not self._rows or start <= self._first:
            self._first, self._rows = start, []
        of_a = super().cached(self._first, end)
        if self._rows:
            super().set_cached(self._first, start, self._parts(0, start - self._first))
        elif start and any(self.are_states):
            held = zip(self.are_states, self._before, super().cached(start - 1, start), strict=True)
            super().set_cached(start - 1, start, [before if state else rows for state, before, rows in held])
        with watched(self.decoder, self._rounded):
            logits = super().eager(ids, start)
        self._rows = super().cached(self._first, end)
        super().set_cached(self._first, end, of_a)
        return logits

    def cached(self, start: int, end: int) -> list[Tensor]:
        """The rows that the last steps of this side cached."""
        return self._parts(start - self._first, end - self._first)

    def _parts(self, first: int, last: int) -> list[Tensor]:
        """Rows first .. last - 1 that the last steps cached, and the states after them."""
        pairs = zip(self.are_states, self._rows, strict=True)
        return [rows if is_state else rows[first:last] for is_state, rows in pairs]

    def set_cached(self, start: int, end: int, rows: list[Tensor]) -> None:
        """Continue from side a's rows, which the cache has."""
        del start, rows
        self._rows = []
        if any(self.are_states):
            self._before = super().cached(end - 1, end)

    def continuation(self, prompt: list[int], tokens: list[int]) -> Iterator[Tensor]:
        self._rows = []
        return super().continuation(prompt, tokens)

    def _rounded(self, call: Call) -> Hidden:
        if call.operation in _EXACT or not call.inputs:
            return call.run(*call.inputs)
        own, *others = call.inputs
        rows = round_to(rows_of(own), self._bits)
        return call.run(in_the_form_of(rows, own, self.decoder.backend), *others)
