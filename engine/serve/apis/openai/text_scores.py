"""Log-probabilities of completions, as parallel arrays."""

from collections.abc import Sequence

from quengine.sampler import TokenLogprobs
from quengine.serve.apis.openai.schemas import TextScores
from quengine.serve.processes.shared_model import ServedModel


def completion_logprobs(
    entries: Sequence[TokenLogprobs], model: ServedModel, offset: int
) -> tuple[TextScores, int]:
    """Log-probabilities as completions have them, in parallel arrays, and the offset of the token after the last.
    offset: where the first token begins in the text. Offsets are in characters."""
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
    """`completion_logprobs` of an echoed prompt. Nothing comes before its first token, which has no log-probability.

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
