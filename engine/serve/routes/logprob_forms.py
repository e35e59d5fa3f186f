"""Log-probabilities in the three forms that the routes answer with; in the first and the last as probabilities, under
llama-server's names, where they are those after the samplers (`SamplingParams.post_sampling_probs`)."""

import math
from collections.abc import Sequence
from typing import Any

from quengine.sampler import TokenLogprobs
from quengine.serve.processes.shared_model import ServedModel


def chat_logprobs(
    entries: Sequence[TokenLogprobs], model: ServedModel, sampled: bool = False
) -> dict[str, Any]:
    """As in chat completions; `sampled`: as probabilities."""
    return {"content": native_probabilities(entries, model, sampled), "refusal": None}


def native_probabilities(
    entries: Sequence[TokenLogprobs], model: ServedModel, sampled: bool
) -> list[dict[str, Any]]:
    """As llama-server's `completion_probabilities`: each token with its id, text and bytes, and the likeliest;
    `sampled`: as probabilities."""
    return [_entry(entry, model, sampled) for entry in entries]


def _entry(entry: TokenLogprobs, model: ServedModel, sampled: bool) -> dict[str, Any]:
    def likely(token: int, logprob: float) -> dict[str, Any]:
        raw = model.token_bytes(token)
        value = {"prob": math.exp(logprob)} if sampled else {"logprob": logprob}
        return {"id": token, "token": raw.decode(errors="replace"), "bytes": list(raw), **value}

    top = [likely(token, logprob) for token, logprob in entry.top]
    return likely(entry.token, entry.logprob) | {"top_probs" if sampled else "top_logprobs": top}


def completion_logprobs(
    entries: Sequence[TokenLogprobs], model: ServedModel, offset: int
) -> tuple[dict[str, Any], int]:
    """As in completions: parallel arrays. `offset` is where the first token begins in the text, in characters;
    the second value is where the next one would."""
    tokens, offsets = [], []
    for entry in entries:
        tokens.append(_name(entry.token, model))
        offsets.append(offset)
        offset += len(model.token_bytes(entry.token).decode(errors="replace"))
    value = {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {_name(token, model): logprob for token, logprob in (*entry.top, (entry.token, entry.logprob))}
            for entry in entries
        ],
        "text_offset": offsets,
    }
    return value, offset


def echoed_logprobs(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs], model: ServedModel
) -> tuple[dict[str, Any], int]:
    """`completion_logprobs` of a prompt that is given back: nothing comes before its first token, which has none.

    `entries` are those of prompt[1:].
    """
    first = model.token_bytes(prompt[0]).decode(errors="replace")
    rest, offset = completion_logprobs(entries, model, len(first))
    begin = {
        "tokens": [_name(prompt[0], model)],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    return joined_logprobs(begin, rest), offset


def joined_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two values of `completion_logprobs` as one."""
    return {key: first[key] + second[key] for key in first}


def _name(token: int, model: ServedModel) -> str:
    """The token's text; its bytes spelled out where they are only part of a character."""
    raw = model.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
