"""POST /api/chat and /api/generate."""

import time

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
from quengine.serve.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest
from quengine.serve.schemas.requests import ChatRequest, CompletionRequest
from quengine.serve.service import Service


async def chat(service: Service, request: Request) -> Response:
    began = time.perf_counter()
    body = await read_request(request, OllamaChatRequest, service.limits)
    service.check_model_name(served_name(service, body.model))
    if not body.messages:
        return json_response(loaded(service, ChatLines.part_body(Part()), body.keep_alive))
    prepared = await unless_gone(request.receive, _prepared(service, chat_request(service, body)))
    return await _answer(service, request, prepared[0], ChatLines(service, *prepared, began), body.stream)


async def generate(service: Service, request: Request) -> Response:
    began = time.perf_counter()
    body = await read_request(request, OllamaGenerateRequest, service.limits)
    service.check_model_name(served_name(service, body.model))
    if not body.prompt:
        return json_response(loaded(service, GenerateLines.part_body(Part()), body.keep_alive))
    prepared = await unless_gone(request.receive, _prepared(service, generate_request(service, body)))
    return await _answer(service, request, prepared[0], GenerateLines(service, *prepared, began), body.stream)


async def _prepared(
    service: Service, body: ChatRequest | CompletionRequest
) -> tuple[GenerationRequest, Reader]:
    if isinstance(body, CompletionRequest):
        (request,) = await prepare_completions(service, body)
        return request, RawReader()
    (request,), (reader,) = await prepare_chat(service, body)
    return request, reader


async def _answer(
    service: Service, request: Request, prepared: GenerationRequest, lines: AnswerLines, stream: bool
) -> Response:
    if stream:
        return await stream_answer(service, request, [prepared], lines)
    ((piece, end),) = await whole_answer(service, request, [prepared])
    return json_response(lines.whole(piece, end))
