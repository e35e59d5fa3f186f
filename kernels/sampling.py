"""From the logits of one position to a token id: the torch definition of every sampler, and random numbers.

Knows logits, token ids and one uniform number; nothing of requests, histories, seeds' origin or stop rules. A
later CUDA kernel must give the same token for the same logits, so nothing here depends on the thread count:

* Random numbers are a pure function of (seed, position): Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel
  Random Numbers: As Easy as 1, 2, 3", SC 2011). There is no generator state to keep or to lose.
* Candidates are ranked by logit, ties by the lower token id, and all that follows is fp64 in that order.
* Sums are sequential (`cumsum`): torch's `sum` adds in an order that follows the thread count.
"""

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

_MASK32 = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1: the key's step from round to round
_PHILOX_ROUNDS = 10


class NoCandidateError(ValueError):
    """Every token is banned: there is nothing to choose from."""


class Candidates(NamedTuple):
    """The tokens still in play, most likely first; equal logits by the lower id."""

    ids: Tensor  # int64 [C]
    logits: Tensor  # fp64 [C], descending, none of them -inf


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10: four 32-bit random words for a 128-bit counter and a 64-bit key.

    Words are Python integers or int64 tensors of one shape, each in 0..2^32-1. The products need 64 unsigned
    bits; int64 tensors wrap to the same bits, and the mask after the shift drops the copies of the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        a = c0 * _PHILOX_MULTIPLIERS[0]
        b = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((b >> 32) & _MASK32) ^ c1 ^ k0,
            b & _MASK32,
            ((a >> 32) & _MASK32) ^ c3 ^ k1,
            a & _MASK32,
        )
        k0 = (k0 + _PHILOX_WEYL[0]) & _MASK32
        k1 = (k1 + _PHILOX_WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """The uniform number in (0, 1), exclusive on both sides, that belongs to one position of one sequence.

    `seed` (64 bits) is the Philox key; the counter is (position low, position high, stream, 0). `stream`
    tells apart the completions of one prompt under one seed. Exact in fp64: (first word + 1/2) / 2^32.
    """
    counter = (position & _MASK32, position >> 32, stream, 0)
    word, _, _, _ = philox4x32(counter, (seed & _MASK32, seed >> 32))
    return (word + 0.5) * 2.0**-32


def add_logit_bias(logits: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    """A copy of `logits` (fp32 [V]) with `bias` (fp64 [n]) added at `ids` (int64 [n], distinct)."""
    return logits.index_copy(0, ids, _to_fp32(logits[ids].double() + bias))


def penalize(
    logits: Tensor, ids: Tensor, counts: Tensor, repeat: float, presence: float, frequency: float
) -> Tensor:
    """A copy of `logits` (fp32 [V]) with the tokens `ids` (int64 [n], distinct) made less likely.

    `counts` (int64 [n]) says how often each was seen. The repeat penalty (Keskar et al., CTRL, 2019) divides
    a positive logit and multiplies a negative one, so that a factor above 1 always makes a token less likely;
    then `presence + counts * frequency` is subtracted.
    """
    seen = logits[ids].double()
    seen = torch.where(seen > 0, seen / repeat, seen * repeat)
    return logits.index_copy(0, ids, _to_fp32(seen - (presence + counts.double() * frequency)))


def greedy(logits: Tensor) -> int:
    """The id of the largest of `logits` [V]; of equal ones the lowest id (torch.argmax returns the first)."""
    return int(torch.argmax(logits))


def top_k_candidates(logits: Tensor, k: int) -> Candidates:
    """The `k` largest of `logits` (fp32 [V]), ranked; k <= 0 or k >= V: all. Banned tokens (-inf) stay out.

    Raises:
        NoCandidateError: every token is banned.
    """
    if 0 < k < logits.shape[0]:
        # topk takes any of the tokens that tie for the last place: take all that reach it, rank them, cut.
        least = torch.topk(logits, k, sorted=False).values.min()
        ids = _ranked(logits, torch.nonzero(logits >= least).squeeze(1))[:k]
    else:
        ids = _ranked(logits, torch.arange(logits.shape[0], device=logits.device))
    kept = logits[ids]
    allowed = int(torch.searchsorted(-kept, math.inf))  # the -inf ones come last
    if allowed == 0:
        raise NoCandidateError("every token is banned")
    return Candidates(ids[:allowed], kept[:allowed].double())


def _ranked(logits: Tensor, ids: Tensor) -> Tensor:
    """`ids` (int64 [n]) by falling logit, ties by rising id: a sort of distinct integers.

    The key's high word is the logit's bits in an order-reversing integer form, its low word the id. The bits
    of an fp32 sort as an integer where the sign is clear; where it is set the other 31 count backwards.
    """
    bits = (logits[ids] + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0, which it equals
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (torch.bitwise_not(rising).long() << 32) | ids
    return torch.sort(keys).values & _MASK32


def keep_typical_p(candidates: Candidates, p: float) -> Candidates:
    """Locally typical sampling (Meister et al., 2022): the tokens whose surprise is nearest to the entropy.

    Keeps the fewest of them whose probability together exceeds `p`; p >= 1 keeps all.
    """
    if p >= 1:
        return candidates
    probabilities = _probabilities(candidates.logits)
    surprise = -torch.log(probabilities.clamp(min=torch.finfo(torch.float64).tiny))
    entropy = torch.cumsum(probabilities * surprise, 0)[-1]
    order = torch.sort((surprise - entropy).abs(), stable=True).indices
    reached = torch.cumsum(probabilities[order], 0)
    count = int(torch.searchsorted(reached, p, right=True)) + 1
    kept = torch.sort(order[:count]).values  # back to the order of the logits
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def keep_top_p(candidates: Candidates, p: float) -> Candidates:
    """Nucleus sampling (Holtzman et al., 2020): the fewest most likely tokens whose probability reaches `p`.

    Probabilities are those among the candidates. At least one is kept; p >= 1 keeps all.
    """
    if p >= 1:
        return candidates
    reached = torch.cumsum(_probabilities(candidates.logits), 0)
    count = int(torch.searchsorted(reached, p)) + 1
    return Candidates(candidates.ids[:count], candidates.logits[:count])


def keep_min_p(candidates: Candidates, p: float) -> Candidates:
    """Min-p sampling (Nguyen et al., 2024): tokens at least `p` times as likely as the first; 0 keeps all."""
    if p <= 0:
        return candidates
    least = float(candidates.logits[0]) + math.log(p)
    count = int(torch.searchsorted(-candidates.logits, -least, right=True))
    return Candidates(candidates.ids[:count], candidates.logits[:count])


def draw(candidates: Candidates, temperature: float, uniform: float) -> int:
    """The token where the cumulative probability at `temperature` (> 0) first exceeds `uniform` in (0, 1)."""
    reached = torch.cumsum(_weights(candidates.logits, temperature), 0)
    index = torch.searchsorted(reached, uniform * reached[-1], right=True)
    return int(candidates.ids[index])


def sample(
    logits: Tensor,
    *,
    top_k: int,
    typical_p: float,
    top_p: float,
    min_p: float,
    temperature: float,
    uniform: float,
) -> int:
    """A token id from `logits` (fp32 [V], finite or -inf), the samplers applied in llama.cpp's order.

    Bias and penalties have been applied before. Temperature 0 is greedy: the most likely token, whatever the
    other settings.

    Raises:
        NoCandidateError: every token is banned.
    """
    if temperature == 0:
        token = greedy(logits)
        if logits[token] == -math.inf:
            raise NoCandidateError("every token is banned")
        return token
    candidates = top_k_candidates(logits, top_k)
    candidates = keep_typical_p(candidates, typical_p)
    candidates = keep_top_p(candidates, top_p)
    candidates = keep_min_p(candidates, min_p)
    return draw(candidates, temperature, uniform)


def log_normalizer(logits: Tensor) -> float:
    """log(sum(exp(logits))) of fp32 [V] in fp64: a token's log-probability is its logit minus this."""
    largest = float(logits.max())
    return largest + math.log(float(torch.cumsum(_weights(logits.double(), 1.0, largest), 0)[-1]))


def _weights(logits: Tensor, temperature: float, largest: float | None = None) -> Tensor:
    """exp((logits - largest) / temperature), fp64 [C]; `largest` is the first logit unless given."""
    return torch.exp((logits - (logits[0] if largest is None else largest)) / temperature)


def _probabilities(logits: Tensor) -> Tensor:
    weights = _weights(logits, 1.0)
    return weights / torch.cumsum(weights, 0)[-1]


def _to_fp32(values: Tensor) -> Tensor:
    """fp64 -> fp32, at most fp32's largest number: a huge bias forces a token, it makes no infinity."""
    return values.clamp(max=torch.finfo(torch.float32).max).float()
