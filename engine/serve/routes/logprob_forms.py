"""Log-probabilities in the three forms that the routes answer with; in the first and the last as probabilities, under
llama-server's names, where they are those after the samplers (`SamplingParams.post_sampling_probs`)."""

import math
from collections.abc import Sequence
from typing import TypeVar

from msgspec import UNSET

from quengine.sampler import TokenLogprobs
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.schemas.llama import ScoredToken, TokenScore
from quengine.serve.schemas.openai import TextScores

S = TypeVar("S", bound=TokenScore)


def scored_tokens(
    entries: Sequence[TokenLogprobs], model: ServedModel, sampled: bool = False
) -> list[ScoredToken]:
    """Each token with its id, text and bytes, and the likeliest; `sampled`: as probabilities."""
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


def completion_logprobs(
    entries: Sequence[TokenLogprobs], model: ServedModel, offset: int
) -> tuple[TextScores, int]:
    """As in completions: parallel arrays. `offset` is where the first token begins in the text, in characters;
    the second value is where the next one would."""
    tokens, offsets = [], []
    for entry in entries:
        tokens.append(_name(entry.token, model))
        offsets.append(offset)
        offset += len(model.token_bytes(entry.token).decode(errors="replace"))
    value = TextScores(
        tokens=tokens,
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[
            {_name(token, model): logprob for token, logprob in (*entry.top, (entry.token, entry.logprob))}
            for entry in entries
        ],
        text_offset=offsets,
    )
    return value, offset


def echoed_logprobs(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs], model: ServedModel
) -> tuple[TextScores, int]:
    """`completion_logprobs` of a prompt that is given back: nothing comes before its first token, which has none.

    `entries` are those of prompt[1:].
    """
    first = model.token_bytes(prompt[0]).decode(errors="replace")
    rest, offset = completion_logprobs(entries, model, len(first))
    begin = TextScores(
        tokens=[_name(prompt[0], model)], token_logprobs=[None], top_logprobs=[None], text_offset=[0]
    )
    return joined_logprobs(begin, rest), offset


def joined_logprobs(first: TextScores, second: TextScores) -> TextScores:
    """Two values of `completion_logprobs` as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return TextScores(**{name: getattr(first, name) + getattr(second, name) for name in names})


def _name(token: int, model: ServedModel) -> str:
    """The token's text; its bytes spelled out where they are only part of a character."""
    raw = model.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
