"""The log-probabilities of tokens in answers. Those after the samplers (`SamplingParams.post_sampling_probs`) are
written as probabilities, under llama-server's names."""

import math
from collections.abc import Sequence
from typing import TypeVar

from msgspec import UNSET

from quengine.sampler import TokenLogprobs
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.schemas.shared_answers import ScoredToken, TokenScore

S = TypeVar("S", bound=TokenScore)


def scored_tokens(
    entries: Sequence[TokenLogprobs], model: ServedModel, sampled: bool = False
) -> list[ScoredToken]:
    """Each token's id, text, bytes and score, and the likeliest tokens beside it. sampled: scores are probabilities."""
    return [_entry(entry, model, sampled) for entry in entries]


def _entry(entry: TokenLogprobs, model: ServedModel, sampled: bool) -> ScoredToken:
    scored = _scored(ScoredToken, model, entry.token, entry.logprob, sampled)
    top = [_scored(TokenScore, model, token, logprob, sampled) for token, logprob in entry.top]
    scored.top_logprobs, scored.top_probs = (UNSET, top) if sampled else (top, UNSET)
    return scored


def _scored(kind: type[S], model: ServedModel, token: int, logprob: float, sampled: bool) -> S:
    raw = model.token_bytes(token)
    scored = kind(id=token, token=raw.decode(errors="replace"), bytes=list(raw))
    scored.logprob, scored.prob = (UNSET, math.exp(logprob)) if sampled else (logprob, UNSET)
    return scored
