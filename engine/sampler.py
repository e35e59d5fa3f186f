"""Samples the next token of one sequence, with its constraint, bias, penalties and random numbers.

The arithmetic is in kernels/sampling.py and runs on the host: logits on a device are copied.
"""

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from quengine.errors import EngineError
from quengine.kernels import sampling
from quengine.kernels.sampling import Choose, Logits
from quengine.request.sampling_params import SamplingParams
from quengine.sampling_chain.chain import Choice, SamplerChain
from quengine.sampling_chain.dry import Breakers
from quengine.sampling_chain.pool import Infill
from quengine.structured.constraint import ConstraintError
from quengine.structured.token_mask import Mask, TokenMask

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of a token, by the model's own logits or, with `SamplingParams.post_sampling_probs`,
    after the samplers.

    `top`: the most likely tokens and their log-probabilities, best first; the sampled token need not be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sample(NamedTuple):
    """A sampled token; `logprobs` is None unless the request asks for them."""

    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Verified:
    """The result of a step for a sequence with a draft: the tokens after its newest token and after the drafted ones.

    `first`: the token sampled after the newest token. `later(n)`: the result after the first n drafted tokens, once
    the sequence has accepted exactly these; valid until the next step. `draft`: the tokens that the device drafted; it
    has accepted some by itself, and gone on after them. None: the draft is `Sequence.draft`.
    """

    first: Sample
    later: "Callable[[int], Result]"
    draft: Seq[int] | None = None


Result: TypeAlias = "Sample | Verified | Exception | None"
"""The result of a step for one sequence: a Sample, or Verified if it had a draft; the exception that ends the sequence;
or None if no token was due."""

_SHIFTED_STREAM = 1 << 16
"""Distance between the random streams of one completion before and after a context shift."""

NO_CHOICE = EngineError("the device found no token to choose")
"""The result if a device finds no token to sample: no logit is finite, or the bias bans every token."""


class Sampler:
    """Samples one sequence.

    Args:
        params: the sampling parameters; the seed must be set (`SamplingParams.with_seed`).
        vocab_size: number of logits.
        stream: number of the completion; under one seed, each completion of a prompt has random numbers of its own.
        constraint: masks the tokens; the sequence advances it.
        choose: `kernels.sampling.sample`, or a faster function that returns the same tokens.
        breakers: compiled `params.dry_sequence_breakers`, if DRY is among the samplers.
        infill: state of the infill sampler, if it is among them.

    Raises:
        EngineError: `logit_bias` or `stop_token_ids` names a token outside the vocabulary.
        ValueError: the parameters have no seed.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        stream: int = 0,
        constraint: TokenMask | None = None,
        choose: Choose = sampling.sample,
        breakers: Breakers | None = None,
        infill: Infill | None = None,
    ) -> None:
        if params.seed is None:
            raise ValueError("the parameters have no seed: call with_seed() first")
        for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens:
                if token >= vocab_size:
                    raise EngineError(f"{name}: token id {token} is not in the vocabulary of {vocab_size}")
        self.params = params
        self.vocab_size = vocab_size
        self.seed: int = params.seed
        self.stream = stream
        self.constraint = constraint
        self._choose = choose
        self._chain = (
            SamplerChain(params, vocab_size, self._penalized, breakers, infill) if params.chained else None
        )
        self._recent = RecentTokens(params.repeat_last_n)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float64)

    def sample(self, logits: "Tensor", history: Seq[int], position: int) -> Sample:
        """Samples the token at `position`, given the `logits` [vocab_size] fp32 there and the tokens before it.

        `history` is the prompt and the generated tokens; the penalties use its end. Between two calls it may grow or be
        cut short. The random number depends on seed, stream and `position` alone.

        Raises:
            EngineError: the logits are not all finite, every token is banned, or the constraint's grammar exceeds its
                work limit; the message names the position.
        """
        assert logits.shape == (self.vocab_size,), (
            f"logits {tuple(logits.shape)}, vocabulary {self.vocab_size}"
        )
        params = self.params
        # Before waiting for the logits: the device computes them meanwhile.
        allowed = None if self.constraint is None else self.constraint.allowed()
        given: Logits = logits.float().cpu().numpy()
        check_finite(given, position)
        processed = self._processed(given, history, position) if params.logits_processors else given
        biased = self._biased(processed, allowed)
        uniform = 0.0 if params.greedy else sampling.uniform(self.seed, position, self.stream)
        try:
            if self._chain is not None:
                chance = sampling.uniform(self.seed, position, self.stream, word=1)
                choice = self._chain.choose(biased, history, position, uniform, chance)
                return self._with_logprobs(choice.token, given, choice)
            token = self._choose(
                self._penalized(biased, history) if params.penalizes else biased,
                top_k=params.top_k,
                typical_p=params.typical_p,
                top_p=params.top_p,
                min_p=params.min_p,
                temperature=params.temperature,
                uniform=uniform,
            )
        except sampling.NoCandidateError:
            kind = EngineError if self.constraint is None else ConstraintError
            raise kind(f"token {position}: {self._why_none()}") from None
        return self._with_logprobs(token, given)

    def change_stream(self) -> None:
        """Switches to random numbers that no other completion of the prompt uses, as positions will recur."""
        self.stream = (self.stream + _SHIFTED_STREAM) % 2**31
        self.reset()

    def reset(self) -> None:
        """Prepares for a history that is not a continuation of the last one."""
        self._recent = RecentTokens(self.params.repeat_last_n)
        if self._chain is not None:
            self._chain.reset_history()

    def _why_none(self) -> str:
        if self.params.logits_processors:
            return "the logits processors, with logit_bias and the constraint, ban every token"
        if self.constraint is None:
            by = "logit_bias bans" if self._chain is None else "logit_bias, penalties and DRY ban"
            return f"{by} every token, none is left to choose"
        return (
            "the constraint allows no token of this vocabulary that logit_bias, min_tokens and ignore_eos leave, "
            "none is left to choose"
        )

    def _with_logprobs(self, token: int, logits: Logits, choice: Choice | None = None) -> Sample:
        top = self.params.logprobs
        if top is None:
            return Sample(token)
        if choice is not None and self.params.post_sampling_probs:
            return Sample(token, choice_logprobs(choice, top))
        return Sample(token, token_logprobs(logits, token, top))

    def _processed(self, logits: Logits, history: Seq[int], position: int) -> Logits:
        """The logits after the caller's processors; `logits` itself stays.

        Raises:
            EngineError: a processor returns something else than logits of the vocabulary, NaN or infinity.
        """
        for process in self.params.logits_processors:
            name = getattr(process, "__name__", type(process).__name__)
            returned = process(list(history), logits.copy())
            found = np.asarray(returned)
            if found.shape != logits.shape or found.dtype.kind != "f":
                is_object = found.dtype == object
                got = type(returned).__name__ if is_object else f"{found.dtype} {list(found.shape)}"
                raise EngineError(
                    f"token {position}: the logits processor {name} returns {got}, no logits [{self.vocab_size}]"
                )
            logits = found.astype(np.float32, copy=False)
            if not logits.max() < math.inf:  # NaN is the largest
                raise EngineError(f"token {position}: the logits processor {name} returns NaN or infinity")
        return logits

    def _biased(self, logits: Logits, allowed: Mask | None) -> Logits:
        """The logits, masked and then biased; `logits` itself is kept for the model's own log-probabilities."""
        if allowed is not None:
            logits = np.where(allowed, logits, np.float32(-np.inf))
        if self.params.logit_bias:
            logits = sampling.add_logit_bias(logits, self._bias_ids, self._bias)
        return logits

    def _penalized(self, logits: Logits, history: Seq[int]) -> Logits:
        params, recent = self.params, self._recent.counts(history)
        ids = np.fromiter(recent, dtype=np.int64, count=len(recent))
        counts = np.fromiter(recent.values(), dtype=np.int64, count=len(recent))
        penalties = (params.repeat_penalty, params.presence_penalty, params.frequency_penalty)
        return sampling.penalize(logits, ids, counts, *penalties)


class RecentTokens:
    """Counts of the tokens among the last `window` of a growing history (-1: all of it).

    Counts are updated from call to call, so that the cost depends on the number of new tokens, not on the window.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._counts: Counter[int] = Counter()
        self._start = 0  # history[_start:_end] has been counted
        self._end = 0

    def counts(self, history: Seq[int]) -> Counter[int]:
        """Token id -> number of occurrences (at least 1) in the window of `history`."""
        end = len(history)
        start = 0 if self.window < 0 else max(0, end - self.window)
        if end < self._end or start >= self._end:  # cut short, or nothing of the old window is left
            self._counts.clear()
            self._start = self._end = start
        self._counts.update(history[self._end : end])
        for token in history[self._start : start]:
            self._counts[token] -= 1
            if self._counts[token] == 0:
                del self._counts[token]
        self._start, self._end = start, end
        return self._counts


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities of `token` and of the `top` most likely tokens under `logits` ([V], finite)."""
    normalizer = sampling.log_normalizer(logits)
    best: tuple[tuple[int, float], ...] = ()
    if top > 0:
        candidates = sampling.top_k_candidates(logits, top)
        values = (candidates.logits - normalizer).tolist()
        best = tuple(zip(candidates.ids.tolist(), values, strict=True))
    return TokenLogprobs(token, float(logits[token]) - normalizer, best)


def choice_logprobs(choice: Choice, top: int) -> TokenLogprobs:
    """Log-probabilities of the sampled token, and of the `top` most likely of the candidates it was sampled from."""
    total = math.log(int(choice.mass.sum()))
    likely = [
        (token, math.log(mass) - total)
        for token, mass in zip(choice.ids[:top].tolist(), choice.mass[:top].tolist(), strict=True)
        if mass
    ]
    drawn = int(choice.mass[int(np.flatnonzero(choice.ids == choice.token)[0])])
    return TokenLogprobs(choice.token, math.log(drawn) - total, tuple(likely))


def check_finite(logits: Logits, position: int) -> None:
    """Raises EngineError if the logits [V] of the token at `position` are not all finite."""
    if math.isfinite(logits.min()) and math.isfinite(logits.max()):  # NaN propagates through both
        return
    bad = np.flatnonzero(~np.isfinite(logits))
    raise EngineError(
        f"token {position}: {len(bad)} of {logits.shape[0]} logits are not finite "
        f"(first: {logits[bad[0]]} at token id {bad[0]}); the model file may be damaged, "
        f"or the backend is at fault: try --backend reference"
    )
