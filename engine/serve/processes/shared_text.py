"""The jobs of tokenizing and rendering chat templates, and their results, between the server and a text process."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from quengine.errors import EngineError
from quengine.request.chat_format import Ending
from quengine.serve.processes.shared_model import ServedModel

Kind = Literal["encode", "encode_pairs", "encode_chat", "render_chat", "tokenize"]


class TextJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job.

    Attributes:
        kind: what to do. "encode": encode each of `prompts`. "encode_pairs": encode the first prompt with each of the
            others, as pairs for a decoder that ranks. "encode_chat": encode `messages` through the chat template.
            "render_chat": only render them. "tokenize": the answer of /tokenize for the only prompt.
        prompts: texts and token ids, in order, of each prompt; checked.
        bos: begin a text with BOS where the model wants it.
        special: control tokens that are spelled out in texts are encoded as such.
        pieces: give each token's text, too.
        ending: how a conversation's prompt ends.
        marker: the text of an image in a conversation; "": there are no images.
        most_tokens: the ids of a longer prompt are not given, only their number.
        long: a chat is rendered first, and not tokenized where it has too many bytes; set by `text_main`.
    """

    kind: Kind
    prompts: Sequence[Sequence[str | int]] = ()
    bos: bool = True
    special: bool = False
    pieces: bool = False
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = {}
    ending: Ending = "answer"
    marker: str = ""
    most_tokens: int | None = None
    long: bool = False


class TextResult(msgspec.Struct, frozen=True):
    """The result of a job.

    Attributes:
        ids: token ids of each prompt.
        text: the rendered prompt, or the body of an answer, in UTF-8.
        tokens: how many the first prompt that is too long has; a lower bound where `size` is given.
        size: bytes of a text that was too long to be tokenized at all.
        error: an error of the text or the template.
        last: the process ends after this job.
    """

    ids: list[list[int]] = []
    text: bytes = b""
    tokens: int | None = None
    size: int | None = None
    error: str | None = None
    last: bool = False


def perform(model: ServedModel, job: TextJob) -> TextResult:
    """Does a job. Errors of the text or the template are in the result; all others, also MemoryError, are raised."""
    try:
        return _PERFORM[job.kind](model, job)
    except EngineError as error:
        return TextResult(error=str(error))


def least_tokens(model: ServedModel, text: str) -> int:
    """A lower bound of a text's number of tokens, found without tokenizing it."""
    return 0 if model.token_length is None else model.token_length.least_tokens(text)


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8. A lone surrogate, which cannot be encoded, counts as one."""
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _ids(model: ServedModel, job: TextJob, prompt: Sequence[str | int]) -> list[int]:
    ids: list[int] = []
    for position, part in enumerate(prompt):
        ids += [part] if isinstance(part, int) else model.encode(part, job.bos and position == 0, job.special)
    return ids


def _encode(model: ServedModel, job: TextJob) -> TextResult:
    return _counted(job, (_ids(model, job, prompt) for prompt in job.prompts))


def _encode_pairs(model: ServedModel, job: TextJob) -> TextResult:
    query, *documents = ("".join(map(str, prompt)) for prompt in job.prompts)
    return _counted(job, (model.encode_pair(query, document) for document in documents))


def _counted(job: TextJob, prompts: Iterable[list[int]]) -> TextResult:
    found = list[list[int]]()
    for ids in prompts:
        if job.most_tokens is not None and len(ids) > job.most_tokens:
            return TextResult(tokens=len(ids))
        found.append(ids)
    return TextResult(found)


def _encode_chat(model: ServedModel, job: TextJob) -> TextResult:
    if job.long and job.most_tokens is not None:
        text = model.render_chat(job.messages, job.tools, job.variables, job.ending)
        if (least := least_tokens(model, text)) > job.most_tokens:
            return TextResult(tokens=least, size=utf8_size(text))
    return _counted(job, [model.encode_chat(job.messages, job.tools, job.variables, job.ending, job.marker)])


def _render_chat(model: ServedModel, job: TextJob) -> TextResult:
    text = model.render_chat(job.messages, job.tools, job.variables, job.ending)
    return TextResult(text=text.encode(errors="replace"))


def _tokenize(model: ServedModel, job: TextJob) -> TextResult:
    ids = [token for prompt in job.prompts for token in _ids(model, job, prompt)]
    tokens = (
        [{"id": token, "piece": _piece(model.token_bytes(token))} for token in ids] if job.pieces else ids
    )
    return TextResult(text=msgspec.json.encode({"tokens": tokens}))


def _piece(raw: bytes) -> str | list[int]:
    """The token's text, or its bytes where they are only part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


_PERFORM = {
    "encode": _encode,
    "encode_pairs": _encode_pairs,
    "encode_chat": _encode_chat,
    "render_chat": _render_chat,
    "tokenize": _tokenize,
}
