"""From the logits of one position to a token id: the definition of every sampler, and the random numbers.

The CUDA kernels return the same token for the same logits, so nothing here depends on an order of summation or on a
mathematical library:

* Random numbers are a pure function of (seed, position): Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel
  Random Numbers: As Easy as 1, 2, 3", SC 2011). There is no generator state to store.
* Candidates are ranked by logit, ties by the lower token id.
* A probability is an integer mass: exp(logit - largest) in units of 2^-44, from fp64 products and sums in a fixed
  order (`masses`). Integer sums are the same in any order, as in the q-dot of the matmuls.
* It is numpy, on one thread. torch splits a vocabulary between threads, which costs more than the work when
  the cores are busy (4 ms an operation, against 0.02 to 0.5 here), and its sums depend on the thread count.
"""

import math
from itertools import accumulate
from typing import NamedTuple, Protocol, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MASK32 = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1: the key's increment per round
_PHILOX_ROUNDS = 10

MASS_BITS = 44
"""The largest logit's mass is 2^44: 2^18 tokens of it sum to 2^62, within int64."""

HALVINGS = 64.0
"""The most halvings of a mass; more are clamped to it. Above MASS_BITS + 1 halvings a mass is 0 anyway."""

_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453

EXP2_COEFFICIENTS = tuple(accumulate(range(1, 13), lambda term, k: term * -_LN_2 / k, initial=1.0))
"""The Taylor series of 2^-f: for |f| <= 1/2 its remainder is below 2^-52."""

_PART = 4096  # candidates whose fp64 intermediates fit a core's L1 cache

Words4 = tuple[int, int, int, int]


class NoCandidateError(ValueError):
    """Every token is banned, so none can be sampled."""


class Candidates(NamedTuple):
    """The tokens still in play, most likely first; equal logits by the lower id."""

    ids: Ids  # [C]
    logits: Floats  # [C], descending, none of them -inf


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Philox4x32-10: four random words for a 128-bit counter and a 64-bit key, all in words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        a = c0 * _PHILOX_MULTIPLIERS[0]  # 64 bits: the high word goes to one side, the low word to the other
        b = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK32, (a >> 32) ^ c3 ^ k1, a & _MASK32
        k0 = (k0 + _PHILOX_WEYL[0]) & _MASK32
        k1 = (k1 + _PHILOX_WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int = 0, word: int = 0) -> float:
    """The uniform number in (0, 1), exclusive, of one position of one sequence.

    `seed` (64 bits) is the Philox key; the counter is (position low, position high, stream, 0). `stream` distinguishes
    the completions of one prompt under one seed. Exact in fp64: (word + 1/2) / 2^32. Tokens are drawn with the first
    of the four words (`word` 0), XTC's chance with the second.
    """
    counter = (position & _MASK32, position >> 32, stream, 0)
    return (philox4x32(counter, (seed & _MASK32, seed >> 32))[word] + 0.5) * 2.0**-32


def add_logit_bias(logits: Logits, ids: Ids, bias: Floats) -> Logits:
    """A copy of `logits` [V] with `bias` [n] added at the distinct `ids` [n]; -inf bans a token."""
    return _replaced(logits, ids, logits[ids].astype(np.float64) + bias)


def penalize(
    logits: Logits, ids: Ids, counts: Ids, repeat: float, presence: float, frequency: float
) -> Logits:
    """A copy of `logits` [V] with the distinct tokens `ids` [n] made less likely.

    `counts` [n]: occurrences of each token. The repeat penalty (Keskar et al., CTRL, 2019) divides a positive logit
    and multiplies a negative one: above 1 it makes a token less likely, whatever its sign. Then `presence + counts *
    frequency` is subtracted.
    """
    seen = logits[ids].astype(np.float64)
    seen = np.where(seen > 0, seen / repeat, seen * repeat)
    return _replaced(logits, ids, seen - (presence + counts * frequency))


def _replaced(logits: Logits, ids: Ids, values: Floats) -> Logits:
    """A copy of `logits` with `values` at `ids`, at most fp32's largest number: a huge bias does not become
    infinity.
    """
    changed = logits.copy()
    limit = float(np.finfo(np.float32).max)
    changed[ids] = np.where(values < -limit, -math.inf, np.minimum(values, limit))
    return changed


def greedy(logits: Logits) -> int:
    """The id of the largest of `logits` [V]; ties go to the lowest id (argmax returns the first)."""
    return int(np.argmax(logits))


def top_k_candidates(logits: Logits, k: int) -> Candidates:
    """The `k` largest of `logits` [V], ranked; k <= 0 or k >= V: all. Banned tokens (-inf) are excluded.

    Raises:
        NoCandidateError: every token is banned.
    """
    if 0 < k < logits.shape[0]:
        # Several tokens may tie for the last place: take all that reach it, rank them, then cut.
        least = np.partition(logits, -k)[-k]
        ids = _ranked(logits, np.flatnonzero(logits >= least))[:k]
    else:
        ids = _ranked(logits, np.arange(logits.shape[0]))
    kept = logits[ids]
    allowed = int(np.searchsorted(-kept, math.inf))  # the -inf ones come last
    if allowed == 0:
        raise NoCandidateError("every token is banned")
    return Candidates(ids[:allowed], kept[:allowed].astype(np.float64))


def _ranked(logits: Logits, ids: Ids) -> Ids:
    """`ids` [n] by descending logit, ties by ascending id: one sort of distinct integers.

    The key's high word is the logit's bits in an order-reversing integer form, its low word the id. The bits of an
    fp32 sort as an integer if the sign is clear; if it is set the other 31 sort in reverse.
    """
    bits = (logits[ids] + np.float32(0)).view(np.int32)  # + 0: -0.0 becomes 0.0, which it equals
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return np.sort(((~rising).astype(np.int64) << 32) | ids) & _MASK32


def keep_typical_p(candidates: Candidates, p: float) -> Candidates:
    """Locally typical sampling (Meister et al., 2022): the tokens whose surprise is nearest to the entropy.

    Keeps the fewest whose probability together exceeds `p`; p >= 1 keeps all.
    """
    if p >= 1:
        return candidates
    gaps = candidates.logits[0] - candidates.logits
    mass = masses(gaps, sharpness(1.0))
    total = int(mass.sum())
    # Surprise minus entropy is the gap minus the mean gap: log(total) cancels. At most 0.37 * 2^44 per token.
    moment = np.floor(mass * gaps + 0.5).astype(np.int64)
    order = np.argsort(np.abs(gaps - float(moment.sum()) / total), kind="stable")
    limit = min(math.floor(p * total), total - 1)
    count = int(np.searchsorted(np.cumsum(mass[order]), limit, side="right")) + 1
    kept = np.sort(order[:count])  # in the order of the logits again
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def keep_top_p(candidates: Candidates, p: float) -> Candidates:
    """Nucleus sampling (Holtzman et al., 2020): the fewest most likely tokens whose probability reaches `p`.

    Probabilities are relative to the candidates. At least one is kept; p >= 1 keeps all.
    """
    if p >= 1:
        return candidates
    reached = np.cumsum(masses(candidates.logits[0] - candidates.logits, sharpness(1.0)))
    total = int(reached[-1])
    count = int(np.searchsorted(reached, min(math.ceil(p * total), total))) + 1
    return Candidates(candidates.ids[:count], candidates.logits[:count])


def keep_min_p(candidates: Candidates, p: float) -> Candidates:
    """Min-p sampling (Nguyen et al., 2024): tokens at least `p` times as likely as the first; 0 keeps all."""
    if p <= 0:
        return candidates
    least = candidates.logits[0] + math.log(p)
    count = int(np.searchsorted(-candidates.logits, -least, side="right"))
    return Candidates(candidates.ids[:count], candidates.logits[:count])


def draw(candidates: Candidates, temperature: float, uniform: float) -> int:
    """The token where the cumulative probability at `temperature` (> 0) first exceeds `uniform` in (0, 1)."""
    mass = masses(candidates.logits[0] - candidates.logits, sharpness(temperature))
    return int(candidates.ids[drawn(mass, uniform)])


def drawn(mass: Ids, uniform: float) -> int:
    """The index where the cumulative `mass` [C] first exceeds the fraction `uniform` in (0, 1) of the total."""
    reached = np.cumsum(mass)
    return int(np.searchsorted(reached, math.floor(uniform * int(reached[-1])), side="right"))


class SamplerArguments(TypedDict):
    """The settings of the samplers, and the uniform number in (0, 1) to draw with."""

    top_k: int
    typical_p: float
    top_p: float
    min_p: float
    temperature: float
    uniform: float


class Choose(Protocol):
    """`sample`, or a function with the same results."""

    def __call__(self, logits: Logits, **settings: Unpack[SamplerArguments]) -> int: ...


def sample(logits: Logits, **settings: Unpack[SamplerArguments]) -> int:
    """A token id from `logits` [V] (finite or -inf), the samplers applied in llama.cpp's order.

    Bias and penalties have been applied before. Temperature 0 is greedy: the most likely token, whatever the other
    settings.

    Raises:
        NoCandidateError: every token is banned.
    """
    if settings["temperature"] == 0:
        token = greedy(logits)
        if logits[token] == -math.inf:
            raise NoCandidateError("every token is banned")
        return token
    candidates = top_k_candidates(logits, settings["top_k"])
    candidates = keep_typical_p(candidates, settings["typical_p"])
    candidates = keep_top_p(candidates, settings["top_p"])
    candidates = keep_min_p(candidates, settings["min_p"])
    return draw(candidates, settings["temperature"], settings["uniform"])


def sharpness(temperature: float) -> float:
    """Halvings of a token's mass per unit that its logit is below the largest, at `temperature` > 0."""
    return min(_LOG2_E / temperature, 1e300) if temperature > 1e-300 else 1e300


def masses(gaps: Floats, sharpness: float) -> Ids:
    """2^(44 - gaps * sharpness) to the nearest integer: int64 [C]. gaps: [C], the largest logit minus each, >= 0.

    Every product and sum is rounded to fp64 separately, in this order; a kernel that fuses them differs.
    """
    result = np.empty(gaps.shape, dtype=np.int64)
    for start in range(0, len(gaps), _PART):
        end = start + _PART
        result[start:end] = _part_of_masses(gaps[start:end], sharpness)
    return result


def _part_of_masses(gaps: Floats, sharpness: float) -> Floats:
    with np.errstate(over="ignore"):  # with a tiny temperature a gap becomes infinite: mass 0
        halvings = np.minimum(gaps * sharpness, HALVINGS)
    whole = np.floor(halvings + 0.5)
    halvings -= whole
    power = np.full_like(halvings, EXP2_COEFFICIENTS[-1])
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        power *= halvings
        power += coefficient
    power *= ((1023 + MASS_BITS - whole.astype(np.int64)) << 52).view(np.float64)  # 2^(44 - whole)
    power += 0.5
    return power  # truncated to an integer where it is stored


def log_normalizer(logits: Logits) -> float:
    """log(sum(exp(logits))) of [V] in fp64: a token's log-probability is its logit minus this."""
    largest = float(logits.max())
    with np.errstate(under="ignore"):
        return largest + math.log(np.sum(np.exp(logits.astype(np.float64) - largest)))
