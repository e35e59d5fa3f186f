"""POST /api/chat and /api/generate."""

import time
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import json_response, read_request, unless_gone
from quengine.serve.processes.shared_engine import GenerationRequest
from quengine.serve.routes.chat import prepare_chat
from quengine.serve.routes.completions import prepare_completions
from quengine.serve.routes.ollama.answers import (
    AnswerLines,
    ChatLines,
    GenerateLines,
    Part,
    RawReader,
    Reader,
    loaded,
)
from quengine.serve.routes.ollama.requests import chat_request, generate_request, served_name
from quengine.serve.routes.streaming import stream_answer, whole_answer
from quengine.serve.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaGeneration
from quengine.serve.schemas.openai import ChatRequest, CompletionRequest
from quengine.serve.service import Service

G = TypeVar("G", bound=OllamaGeneration)


async def chat(service: Service, request: Request) -> Response:
    return await _answered(service, request, OllamaChatRequest, chat_request, ChatLines)


async def generate(service: Service, request: Request) -> Response:
    return await _answered(service, request, OllamaGenerateRequest, generate_request, GenerateLines)


async def _answered(
    service: Service,
    request: Request,
    kind: type[G],
    converted: Callable[[Service, G], ChatRequest | CompletionRequest],
    form: type[AnswerLines],
) -> Response:
    began = time.perf_counter()
    body = await read_request(request, kind, service.limits)
    service.check_model_name(served_name(service, body.model))
    if body.asks_nothing:
        return json_response(loaded(service, form.part_body(Part()), body.keep_alive))
    prepared, reader = await unless_gone(request.receive, _prepared(service, converted(service, body)))
    lines = form(service, prepared, reader, began)
    if body.stream:
        return await stream_answer(service, request, [prepared], lines)
    ((piece, end),) = await whole_answer(service, request, [prepared])
    return json_response(lines.whole(piece, end))


async def _prepared(
    service: Service, body: ChatRequest | CompletionRequest
) -> tuple[GenerationRequest, Reader]:
    if isinstance(body, CompletionRequest):
        (request,) = await prepare_completions(service, body)
        return request, RawReader()
    (request,), (reader,) = await prepare_chat(service, body)
    return request, reader
