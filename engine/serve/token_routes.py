"""POST /tokenize, /detokenize and /apply-template: what a prompt is made of, without computing it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.chat_messages import read_messages
from quengine.serve.extensions import read_tools
from quengine.serve.fields import token_ids
from quengine.serve.http import json_response, off_loop, read_fields
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
    model, text = service.model, content
    ids = await off_loop(lambda: model.encode(text, bos=bos, special=special))
    pieces = [{"id": token, "piece": _piece(model.token_bytes(token))} for token in ids]
    return json_response({"tokens": pieces if with_pieces else ids})


def _piece(raw: bytes) -> str | list[int]:
    """The token's text, or its bytes where they are only part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(service: Service, request: Request) -> Response:
    """{tokens} -> {content}."""
    fields = await read_fields(request, service.limits)
    values = fields.array("tokens")
    if values is None:
        raise fields.wrong("tokens", "must be an array of token ids")
    service.check_model_name(fields)
    fields.finish()
    return json_response(
        {"content": service.model.decode(token_ids(values, "tokens", service.model.vocab_size))}
    )


async def apply_template(service: Service, request: Request) -> Response:
    """{messages} -> {prompt}."""
    fields = await read_fields(request, service.limits)
    messages = read_messages(fields.any("messages"))
    variables: dict[str, Any] = fields.object("chat_template_kwargs") or {}
    use = read_tools(fields, service.model)
    service.check_model_name(fields)
    fields.neutral("add_generation_prompt", True)
    fields.finish()
    model = service.model
    return json_response(
        {"prompt": await off_loop(lambda: model.render_chat(messages, use.described, variables))}
    )
