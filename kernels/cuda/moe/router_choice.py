"""The selection of a row's experts by their logits, and their weights: the last step of the router.

Defined in kernels/moe/router.py. A score and its expert make an int64 key in the definition's order: the higher score
first, ties to the lower expert, NaN below all others.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from quengine.kernels.moe.router import SUM_EPS
from quengine.kernels.moe.router_kind import RouterKind, Scores

_SOFTMAX, _SOFTMAX_OF_CHOSEN, _SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SCORES: dict[Scores, int] = {
    "softmax": _SOFTMAX.value,
    "softmax_of_chosen": _SOFTMAX_OF_CHOSEN.value,
    "sigmoid": _SIGMOID.value,
}
_SUM_EPS = tl.constexpr(SUM_EPS)
_LOWEST = tl.constexpr(-(2**63))
_NOTHING = tl.constexpr(-(2**31))
"""Below the key of every score."""

_MOST_COMPARED = tl.constexpr(128)
"""Experts up to which all pairs are compared; for more, the highest is extracted repeatedly."""


@dataclass(frozen=True)
class RouterConstants:
    """A RouterKind and the number of experts, as compile-time constants of the kernel; scores: see SCORES; joined: as
    Router.joins_shared."""

    count: int
    used: int
    scores: int
    normalized: bool
    scale: float
    groups: int
    groups_used: int
    joined: bool = False

    @classmethod
    def of(cls, kind: RouterKind, count: int, joined: bool = False) -> "RouterConstants":
        return cls(
            *(count, kind.used, SCORES[kind.scores], kind.normalized, kind.scale, kind.groups),
            *(kind.groups_used, joined),
        )

    @property
    def width(self) -> int:
        """Experts stored for each row: those that are chosen, and a shared one that is joined to them."""
        return self.used + self.joined

    @property
    def group_size(self) -> int:
        return self.count // self.groups

    @property
    def padded_size(self) -> int:
        """Places per group, a power of two."""
        return int(triton.next_power_of_2(self.group_size))

    @property
    def padded_groups(self) -> int:
        return int(triton.next_power_of_2(self.groups))


@triton.jit
def _order(score):
    """int32 keys in the order of the scores, with NaN as -inf, and both zeros equal."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _highest(keys, COUNT: tl.constexpr):
    """Marks the COUNT highest of distinct int64 keys [N]."""
    if keys.shape[0] <= _MOST_COMPARED:
        # Summed along columns, which a thread holds alone within its warp; along rows all lanes would have to
        # exchange.
        above = (keys[:, None] > keys[None, :]).to(tl.int32)
        return tl.sum(above, axis=0) < COUNT
    else:
        best = tl.max(keys, axis=0)
        for _ in range(COUNT - 1):
            best = tl.max(tl.where(keys < best, keys, _LOWEST), axis=0)
        return keys >= best


@triton.jit
def _in_best_groups(selection, real, C: tl.constexpr):
    """Marks the places of the selected groups; selection: [groups * size], scores where there are experts."""
    GROUPS: tl.constexpr = C.padded_groups
    SIZE: tl.constexpr = C.padded_size
    by_group = tl.reshape(tl.where(real, selection, float("-inf")), [GROUPS, SIZE])
    place = tl.arange(0, SIZE)[None, :]
    first = tl.max(by_group, axis=1)
    at = tl.min(tl.where(by_group == first[:, None], place, SIZE), axis=1)
    if C.group_size > 1:
        first += tl.max(tl.where(place == at[:, None], float("-inf"), by_group), axis=1)
    group = tl.arange(0, GROUPS)
    order = tl.where(group < C.groups, _order(first), _NOTHING)
    best = _highest((order.to(tl.int64) << 32) | (GROUPS - 1 - group), C.groups_used)
    inside = tl.broadcast_to(best[:, None], [GROUPS, SIZE])
    return tl.reshape(inside.to(tl.int32), [GROUPS * SIZE]) > 0


@triton.jit
def _scores(logits, real, C: tl.constexpr):
    if C.scores == _SOFTMAX:
        # A non-finite logit makes all scores NaN, as in the definition.
        powers = tl.exp(logits - tl.max(tl.where(real, logits, float("-inf")), axis=0))
        return powers / tl.sum(tl.where(real, powers, 0.0), axis=0)
    elif C.scores == _SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits))
    else:
        return logits


@triton.jit
def _chosen(scores, expert, real, selection_ptr, C: tl.constexpr):
    """Marks the selected experts, by their scores."""
    selection = tl.where(scores == scores, scores, float("-inf"))
    if selection_ptr is not None:
        selection += tl.load(selection_ptr + expert, mask=real, other=0.0)
    allowed = real
    if C.groups > 1:
        allowed = _in_best_groups(selection, real, C)
        selection = tl.where(allowed, selection, float("-inf"))
    order = tl.where(real, _order(selection), _NOTHING)
    return _highest((order.to(tl.int64) << 32) | (65535 - expert), C.used) & real


@triton.jit
def _weights(scores, chosen, C: tl.constexpr):
    """The weights of the selected experts; undefined for the others."""
    weights = scores
    if C.scores == _SOFTMAX_OF_CHOSEN:
        powers = tl.exp(scores - tl.max(tl.where(chosen, scores, float("-inf")), axis=0))
        weights = powers / tl.sum(tl.where(chosen, powers, 0.0), axis=0)
    if C.normalized:
        weights = weights / (tl.sum(tl.where(chosen, weights, 0.0), axis=0) + _SUM_EPS)
    return weights * C.scale


@triton.jit
def places(C: tl.constexpr):
    """The experts at all places, groups outermost, each padded to a power of two, and whether there is one."""
    SIZE: tl.constexpr = C.padded_size
    PLACES: tl.constexpr = C.padded_groups * C.padded_size
    place = tl.arange(0, PLACES)
    expert = place // SIZE * C.group_size + place % SIZE
    return expert, (place % SIZE < C.group_size) & (expert < C.count)


@triton.jit
def choose(
    logits, gate, bias_ptr, selection_ptr, forced_ptr, scale_ptr, experts_ptr, weights_ptr, shared_ptr, row,
    GATE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores the routing of row `row`, of its logits at their `places`: its experts, unless `forced`, in ascending
    order, their weights, times those at scale_ptr [experts], if any, and with GATE, by its logit `gate` [1], the weight
    of the shared expert, at shared_ptr, or, if joined, after those of the others.
    """
    USED: tl.constexpr = C.used
    expert, real = places(C)
    logits = tl.where(real, logits, float("-inf"))
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert, mask=real, other=0.0)
    scores = _scores(logits, real, C)
    if forced_ptr is None:
        chosen = _chosen(scores, expert, real, selection_ptr, C)
    else:
        chosen = expert < 0
        for slot in range(USED):
            chosen |= expert == tl.load(forced_ptr + row * USED + slot)
        chosen &= real
    slot = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    at = row * C.width + slot
    if C.joined or forced_ptr is None:
        tl.store(experts_ptr + at, expert, mask=chosen)
    weights = _weights(scores, chosen, C)
    if scale_ptr is not None:
        weights *= tl.load(scale_ptr + expert, mask=chosen, other=0.0)
    tl.store(weights_ptr + at, weights, mask=chosen)
    share = 1.0
    if GATE:
        share = 1.0 / (1.0 + tl.exp(-tl.sum(gate, axis=0)))
    if C.joined:
        tl.store(experts_ptr + (row * C.width + USED), C.count)
        tl.store(weights_ptr + (row * C.width + USED), share)
    elif GATE:
        tl.store(shared_ptr + row, share)
