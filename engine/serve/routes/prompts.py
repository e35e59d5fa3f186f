"""Prompts of requests, to token ids: raw ones (text, token ids, or several of either) and conversations.

Control tokens that raw text spells are read as such, as llama-server and vLLM do, unless `parse_special` is false.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quengine.errors import EngineError
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.processes.shared_text import TextJob, least_tokens, unpacked, utf8_size
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.messages import Content, Message, TextPart
from quengine.serve.schemas.reading import read_part, shown, token_ids, whole_number
from quengine.serve.service import Service
from quengine.structured.answer_format import effort_variables


async def read_prompts(
    service: Service, given: str | list[Any] | dict[str, Any], key: str, parse_special: bool
) -> list[list[int]]:
    """The ids of every prompt in the field `key` of a request, checked against the limits. Raises ApiError."""
    values = _separate(given, key)
    service.check_count(len(values))
    prompts = [_parts(value, service, key) for value in values]
    job = TextJob("encode", prompts, special=parse_special, most_tokens=service.most_prompt_tokens)
    return await _ids(service, job, key)


async def chat_ids(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
    param: str,
    limited: bool = True,
) -> list[int]:
    """The ids of a conversation; `limited`: checked against the limits. Raises ApiError."""
    job = TextJob(
        "encode_chat",
        messages=messages,
        tools=tools,
        variables=variables,
        most_tokens=service.most_prompt_tokens if limited else None,
    )
    (prompt,) = await _ids(service, job, param)
    return prompt


def template_variables(
    model: ServedModel, given: Mapping[str, Any], effort: str | None, param: str
) -> Mapping[str, Any]:
    """chat_template_kwargs with `effort`, the field `param`. Raises ApiError where the template takes no such value."""
    try:
        return {**effort_variables(model.answer_format, model.template, effort), **given}
    except EngineError as error:
        raise bad_request(f"{param} = {error}", param, "unsupported") from None


async def _ids(service: Service, job: TextJob, param: str) -> list[list[int]]:
    result = await service.text_pool.perform(service.model, job)
    if result.tokens is not None:
        raise service.prompt_error(result.tokens, param, result.size)
    prompts = [unpacked(ids) for ids in result.ids]
    if not all(prompts):
        raise bad_request("the prompt has no tokens", param)
    return prompts


def _separate(value: str | list[Any] | dict[str, Any], key: str) -> list[Any]:
    """One entry a prompt: an array of ids, or of ids and strings, is one; one of strings, objects or arrays several."""
    if not isinstance(value, list):
        return [value]
    if not value:
        raise bad_request(f"{key} must be a string, token ids, or an array of these", key)
    one = any(whole_number(part) is not None for part in value)
    return [value] if one else value


def _parts(value: Any, service: Service, key: str) -> list[str | int]:
    """A prompt's strings and ids. Raises ApiError for one that is too long by its bytes alone."""
    given = (
        value if isinstance(value, list) else [_object_text(value, key) if isinstance(value, dict) else value]
    )
    model = service.model
    texts = [part for part in given if isinstance(part, str)]
    least = len(given) - len(texts) + sum(least_tokens(model, text) for text in texts)
    if least > service.most_prompt_tokens:
        raise service.prompt_error(least, key, sum(map(utf8_size, texts)) if texts else None)
    return [part if isinstance(part, str) else _token_id(part, model.vocab_size, key) for part in given]


def _object_text(value: dict[str, Any], key: str) -> str:
    """The text of {"prompt_string": ...}, or of {"content": [{"type": "text", "text": ...}, ...]}. Raises ApiError."""
    if value.get("multimodal_data") not in (None, []):
        raise bad_request(f"{key}.multimodal_data: this model reads text only", key, "unsupported")
    text, parts = value.get("prompt_string"), value.get("content")
    if isinstance(text, str):
        return text
    if text is None and isinstance(parts, list) and parts:
        return "".join(part.text for part in read_part(list[TextPart], parts, f"{key}.content"))
    rule = "must have a string prompt_string, or an array of text parts content"
    raise bad_request(f"{key} = {shown(value)}: {rule}", key, "invalid_value")


def _token_id(part: Any, vocab_size: int, key: str) -> int:
    if whole_number(part) is None:
        raise bad_request(f"{key}: {json.dumps(part)[:40]} is neither text nor a token id", key)
    return token_ids([part], key, vocab_size)[0]


def read_messages(values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the field `messages`. Raises ApiError for what no template is given."""
    return [
        template_message(value, message.content)
        for value, message in zip(values, read_part(list[Message], values, "messages"), strict=True)
    ]


def template_message(value: dict[str, Any], content: Content | None) -> dict[str, Any]:
    """A message as templates read it, with all else that it has; parts of its content are joined by line breaks."""
    role = "system" if value["role"] == "developer" else value["role"]
    given = {key: part for key, part in value.items() if part is not None}
    return {**given, "role": role, "content": content_text(content)}


def content_text(content: Content | None) -> str:
    return "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
