"""POST /api/chat and /api/generate."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from quengine.serve.apis.ollama.answers import AnswerLines, ChatLines, GenerateLines, loaded
from quengine.serve.apis.ollama.requests import chat_request, generate_request, served_name
from quengine.serve.apis.ollama.schemas import (
    OllamaChat,
    OllamaChatRequest,
    OllamaGenerate,
    OllamaGenerateRequest,
    OllamaGeneration,
)
from quengine.serve.models.model_host import ModelHost
from quengine.serve.routes.answer_events import Answer
from quengine.serve.routes.preparing import prepare_chat, prepare_completions
from quengine.serve.routes.shortening import fitted, shortened, with_longest_cut, without_oldest
from quengine.serve.schemas.canonical import ChatRequest, CompletionRequest

G = TypeVar("G", bound=OllamaGeneration)


async def chat(host: ModelHost, body: OllamaChatRequest) -> ChatLines | OllamaChat:
    """Answer a conversation."""
    answer: ChatLines | OllamaChat = await _answered(host, body, chat_request, ChatLines)
    return answer


async def generate(host: ModelHost, body: OllamaGenerateRequest) -> GenerateLines | OllamaGenerate:
    """Answer a prompt."""
    answer: GenerateLines | OllamaGenerate = await _answered(host, body, generate_request, GenerateLines)
    return answer


async def _answered(
    host: ModelHost,
    body: G,
    converted: Callable[[ModelHost, G], ChatRequest | CompletionRequest],
    form: type[AnswerLines],
) -> Any:
    began, notes = time.perf_counter(), list[str]()
    host.check_model_name(served_name(host, body.model))
    if body.asks_nothing:
        return loaded(host, form, body.keep_alive)
    given = converted(host, body)
    prepare = _prepared(host, given) if body.truncate is False else _fitting(host, given, notes)
    return form(host, await prepare, body.stream, notes, began)


async def _fitting(host: ModelHost, body: ChatRequest | CompletionRequest, notes: list[str]) -> list[Answer]:
    """The completion of a body. If it does not fit the context, its oldest messages or the beginning of its text are
    left out, so that part of the context is free for the answer; `notes` gets a line about it. Raises ApiError.
    """
    asked, context = body.max_tokens, host.model.ctx_size
    reserved = min(context // 4, asked if asked is not None and asked > 0 else context)
    prepared, given = await fitted(body, partial(_prepared, host), _shorter, reserved)
    if given is not body:
        shortened(notes, _left_out(body, given))
    return prepared


def _shorter(body: ChatRequest | CompletionRequest, keep: float) -> ChatRequest | CompletionRequest | None:
    """The body with the share `keep` of its text; None where nothing more can be left out."""
    if isinstance(body, ChatRequest):
        messages = without_oldest(body.messages, keep) or with_longest_cut(body.messages, keep)
        return None if messages is None else replace(body, messages=messages)
    cut = with_longest_cut([{"role": "user", "content": body.prompt}], keep)
    return None if cut is None else replace(body, prompt=cut[0]["content"])


def _left_out(body: ChatRequest | CompletionRequest, kept: ChatRequest | CompletionRequest) -> str:
    before, after = _texts(body), _texts(kept)
    cut = sum(map(len, before)) - sum(map(len, after))
    if len(before) > len(after):
        return f"truncate: the oldest {len(before) - len(after)} of {len(before)} messages are left out"
    return f"truncate: {cut} of {sum(map(len, before))} characters are left out"


def _texts(body: ChatRequest | CompletionRequest) -> list[str]:
    given = body.messages if isinstance(body, ChatRequest) else [{"content": body.prompt}]
    return [str(message.get("content") or "") for message in given]


async def _prepared(host: ModelHost, body: ChatRequest | CompletionRequest) -> list[Answer]:
    if isinstance(body, CompletionRequest):
        return await prepare_completions(host, body)
    return await prepare_chat(host, body)
