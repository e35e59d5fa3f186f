"""POST /tokenize, /detokenize and /apply-template: what a prompt is made of, without computing it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import json_response, off_loop, read_fields, unless_gone
from quengine.serve.processes.shared_text import TextJob
from quengine.serve.routes.chat_messages import read_messages
from quengine.serve.routes.extensions import read_tools
from quengine.serve.schemas.fields import token_ids
from quengine.serve.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    """{content, add_special, parse_special, with_pieces} -> {tokens}."""
    fields = await read_fields(request, service.limits)
    content = fields.text("content")
    if content is None:
        raise fields.wrong("content", "must be the text")
    bos = fields.flag("add_special") or False
    special = fields.flag("parse_special") is not False
    with_pieces = fields.flag("with_pieces") or False
    service.check_model_name(fields)
    fields.finish()
    job = TextJob("tokenize", [[content]], bos=bos, special=special, pieces=with_pieces)
    result = await unless_gone(request.receive, service.text_pool.perform(service.model, job))
    return Response(result.text, media_type="application/json")


async def detokenize(service: Service, request: Request) -> Response:
    """{tokens} -> {content}."""
    fields = await read_fields(request, service.limits)
    values = fields.array("tokens")
    if values is None:
        raise fields.wrong("tokens", "must be an array of token ids")
    service.check_model_name(fields)
    fields.finish()
    model, ids = service.model, values
    text = await off_loop(lambda: model.decode(token_ids(ids, "tokens", model.vocab_size)))
    return json_response({"content": text})


async def apply_template(service: Service, request: Request) -> Response:
    """{messages} -> {prompt}."""
    fields = await read_fields(request, service.limits)
    messages = read_messages(fields.any("messages"))
    variables: dict[str, Any] = fields.object("chat_template_kwargs") or {}
    use = read_tools(fields, service.model)
    service.check_model_name(fields)
    fields.neutral("add_generation_prompt", True)
    fields.finish()
    job = TextJob("render_chat", messages=messages, tools=use.described, variables=variables)
    result = await unless_gone(request.receive, service.text_pool.perform(service.model, job))
    return json_response({"prompt": result.text.decode()})
