"""Turns the prompts of requests into token ids: raw ones (text, token ids, or several of either) and conversations.

Control tokens that are spelled out in raw text are encoded as control tokens, as by llama-server and vLLM, unless
`parse_special` is false.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quengine.errors import EngineError
from quengine.request.chat_format import Ending
from quengine.request.pooling import with_end
from quengine.serve import access_log
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.processes.shared_text import TextJob, least_tokens, utf8_size
from quengine.serve.routes.images import (
    IMAGES,
    MEDIA_MARKER,
    image_urls,
    parts_text,
    read_data,
    read_urls,
    without_urls,
)
from quengine.serve.routes.old_functions import with_calls
from quengine.serve.routes.shortening import shortened
from quengine.serve.schemas.canonical import ChatRequest, TemplateRequest
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.fields import Tools
from quengine.serve.schemas.messages import Content, Message, TextContent, TextPart
from quengine.serve.schemas.reading import are_token_ids, read_part, shown, token_ids, whole_number
from quengine.structured.answer_format import effort_variables, nearest_effort, switch_variables
from quengine.structured.reasoning_tags import reasoning_in

logger = logging.getLogger("quengine.serve")

NOTHING: Mapping[str, Any] = {}


async def read_prompts(
    host: ModelHost,
    given: str | list[Any] | dict[str, Any],
    key: str,
    parse_special: bool,
    ended: bool = False,
    notes: list[str] | None = None,
    images: list[tuple[bytes, ...]] | None = None,
) -> list[list[int]]:
    """The ids of every prompt in the field `key` of a request, checked against the limits. Raises ApiError.

    ended: prompts that end with text are whole texts, and get EOS where the model wants it. notes: prompts that do not
        fit the context lose their end, and a line about it is added here. images: the images of each prompt, which has
        markers for them, are added here; None: images are an error.
    """
    values = _separate(given, key)
    host.check_inputs(len(values), key)
    most = host.most_prompt_tokens
    if images is not None:
        images += [_images(value, host, key) for value in values]
        values = [_marked(value, host.model.marker) for value in values]
    prompts = [_parts(value, host, key, checked=notes is None) for value in values]
    job = TextJob("encode", prompts, special=parse_special, most_tokens=most if notes is None else None)
    end = host.model.end_of_text if ended else None
    found = await _ids(host, job, key)
    ends = [end if parts and isinstance(parts[-1], str) else None for parts in prompts]
    for number, (ids, last) in enumerate(zip(found, ends, strict=True)):
        if notes is not None and len(ids) > most:
            shortened(notes, f"{key}[{number}]: the last {len(ids) - most} of {len(ids)} tokens are left out")
            found[number] = ids[: most - (last is not None)]
    return [with_end(ids, last) for ids, last in zip(found, ends, strict=True)]


async def read_pairs(host: ModelHost, query: str, documents: Sequence[str], key: str) -> list[list[int]]:
    """The prompts of a decoder that ranks: the query with each of the documents in a request's field `key`. They are
    checked against the limits. Raises ApiError."""
    host.check_inputs(1 + len(documents), key)
    texts = [_parts(text, host, key) for text in (query, *documents)]
    return await _ids(host, TextJob("encode_pairs", texts, most_tokens=host.most_prompt_tokens), key)


class PromptIds(NamedTuple):
    """A prompt's tokens, with markers for its images, and the contents of these."""

    ids: list[int]
    images: tuple[bytes, ...] = ()


async def chat_ids(
    host: ModelHost,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
    param: str,
    ending: Ending | None = None,
    limited: bool = True,
    fetched: dict[str, bytes] | None = None,
) -> PromptIds:
    """The prompt of a conversation; `limited`: checked against the limits. Raises ApiError.

    ending: how the prompt ends; None: an answer at the end of the messages is continued. fetched: as `read_urls`.
    """
    messages, urls = without_urls(messages)
    images = await read_urls(host, urls, param, fetched) if urls else ()
    job = TextJob(
        "encode_chat",
        messages=host.settings.chat.opened(messages),
        marker=host.model.marker if images else "",
        tools=tools,
        variables=variables,
        ending=ending or ending_of(messages),
        most_tokens=host.most_prompt_tokens if limited else None,
    )
    (prompt,) = await _ids(host, job, param)
    return PromptIds(prompt, images)


def ending_of(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> Ending:
    """How a conversation's prompt ends. Raises ApiError for fields that contradict the others."""
    if continue_final_message and add_generation_prompt:
        wrong = "continue_final_message and add_generation_prompt: only one of them can be true"
        raise bad_request(wrong, "continue_final_message")
    if continue_final_message:
        if not messages:
            wrong = "continue_final_message: the last message must be the assistant's, and there is none"
            raise bad_request(wrong, "continue_final_message")
        return "continued"
    if add_generation_prompt is False:
        return "nothing"
    last: Mapping[str, Any] = messages[-1] if messages else {}
    answered = last.get("role") == "assistant" and not last.get("tool_calls")
    return "continued" if answered and continue_final_message is None else "answer"


def given_answer(messages: Sequence[Mapping[str, Any]], ending: Ending) -> str:
    """The beginning of the answer at the prompt's end, where an answer is continued; else empty."""
    if ending != "continued":
        return ""
    return str(messages[-1].get("content") or reasoning_in(messages[-1]))


def reasoning_wanted(
    host: ModelHost, body: Tools, effort: str | None, param: str
) -> tuple[Mapping[str, Any], int]:
    """The template's variables, and the most tokens of reasoning: 0 where none is wanted, -1 for any number.

    effort: the field `param`. Raises ApiError where the template takes no such value.
    """
    options = host.settings.chat
    switched = body.reasoning.enabled if body.enable_thinking is None else body.enable_thinking
    given = (
        *(body.reasoning_budget, body.thinking_budget_tokens, body.reasoning_budget_tokens),
        body.reasoning.max_tokens,
    )
    default = options.reasoning_budget if switched is None and effort is None else -1
    budget = next((each for each in given if each is not None), default)
    if switched is False or (effort == "none" and host.model.answer_format.efforts is None):
        budget = 0
    thinking = False if budget == 0 else switched
    variables = template_variables(
        host.model, body.chat_template_kwargs, effort, param, thinking, options.variables
    )
    return variables, budget


def template_variables(
    model: ServedModel,
    given: Mapping[str, Any],
    effort: str | None,
    param: str,
    thinking: bool | None = None,
    defaults: Mapping[str, Any] = NOTHING,
) -> Mapping[str, Any]:
    """chat_template_kwargs (`given`), with the variables for `effort`, the field `param`, and for `thinking`: whether
    to reason (None: as the effort says).

    defaults: the server's own variables. An effort that the template lacks becomes the nearest that it has, or is
    ignored, and counts as an ignored field. Raises ApiError where the template takes no such value.
    """
    form, template = model.answer_format, model.template
    if effort is not None and (nearest := nearest_effort(form, template, effort)) != effort:
        access_log.current().ignored.append(param)
        logger.debug("%s = %s: %s", param, effort, f"taken as {nearest}" if nearest else "has no effect")
        effort = nearest
    try:
        switched_on = effort_variables(form, template, None)
        asked = {} if effort is None else effort_variables(form, template, effort)
        switch = {} if thinking is None else switch_variables(form, template, thinking)
        return {**switched_on, **defaults, **asked, **switch, **given}
    except EngineError as error:
        raise bad_request(f"{param} = {error}", param, "unsupported") from None


async def _ids(host: ModelHost, job: TextJob, param: str) -> list[list[int]]:
    result = await host.text_pool.perform(host.model, job)
    if result.tokens is not None:
        raise host.prompt_error(result.tokens, param, result.size)
    if not all(result.ids):
        raise bad_request("the prompt has no tokens", param)
    return result.ids


def _separate(value: str | list[Any] | dict[str, Any], key: str) -> list[Any]:
    """The prompts of a value. An array with token ids is one prompt; one of strings, objects or arrays is several."""
    if not isinstance(value, list):
        return [value]
    if not value:
        raise bad_request(f"{key} must be a string, token ids, or an array of these", key)
    one = any(whole_number(part) is not None for part in value)
    return [value] if one else value


def _parts(value: Any, host: ModelHost, key: str, checked: bool = True) -> list[str | int]:
    """A prompt's strings and ids. Raises ApiError for one that is too long by its bytes alone, if that is `checked`."""
    given = (
        value if isinstance(value, list) else [_object_text(value, key) if isinstance(value, dict) else value]
    )
    model = host.model
    texts = [part for part in given if isinstance(part, str)]
    least = len(given) - len(texts) + sum(least_tokens(model, text) for text in texts)
    if checked and least > host.most_prompt_tokens:
        raise host.prompt_error(least, key, sum(map(utf8_size, texts)) if texts else None)
    if are_token_ids(given, model.vocab_size):
        return given
    return [part if isinstance(part, str) else token_id(part, model.vocab_size, key) for part in given]


def _images(value: Any, host: ModelHost, key: str) -> tuple[bytes, ...]:
    """The images beside a prompt that is an object. Raises ApiError."""
    given = value.get("multimodal_data") if isinstance(value, dict) else None
    return () if given in (None, []) else read_data(host, given, key)


def _marked(value: Any, marker: str) -> Any:
    """A prompt that is an object with images, with the model's markers in place of llama-server's."""
    if not isinstance(value, dict) or not value.get("multimodal_data"):
        return value
    text = value.get("prompt_string")
    marked = text.replace(MEDIA_MARKER, marker) if isinstance(text, str) else text
    return {**value, "multimodal_data": None, "prompt_string": marked}


def _object_text(value: dict[str, Any], key: str) -> str:
    """The text of {"prompt_string": ...}, or of {"content": [{"type": "text", "text": ...}, ...]}. Raises ApiError."""
    if value.get("multimodal_data") not in (None, []):
        raise bad_request(f"{key}.multimodal_data: images have no place in this prompt", key, "unsupported")
    text, parts = value.get("prompt_string"), value.get("content")
    if isinstance(text, str):
        return text
    if text is None and isinstance(parts, list) and parts:
        return "".join(part.text for part in read_part(list[TextPart], parts, f"{key}.content"))
    rule = "must have a string prompt_string, or an array of text parts content"
    raise bad_request(f"{key} = {shown(value)}: {rule}", key, "invalid_value")


def token_id(part: Any, vocab_size: int, key: str) -> int:
    if whole_number(part) is None:
        raise bad_request(f"{key}: {json.dumps(part)[:40]} is neither text nor a token id", key)
    return token_ids([part], key, vocab_size)[0]


def read_messages(body: ChatRequest | TemplateRequest) -> tuple[list[dict[str, Any]], Ending]:
    """The messages of a body, and how their prompt ends. Raises ApiError for what no template is given.

    Parts of a message that is continued are joined by an empty line, as llama-server does.
    """
    given = [spoken(value) for value in with_calls(body.messages)]
    read = read_part(list[Message], given, "messages")
    messages = [template_message(value, each.content) for value, each in zip(given, read, strict=True)]
    ending = ending_of(messages, body.add_generation_prompt, body.continue_final_message)
    if ending == "continued":
        messages[-1]["content"] = content_text(read[-1].content, "\n\n")
    return messages, ending


def spoken(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its refusal as its text, and empty text for null in a user's message, answer or tool result."""
    if message.get("role") == "user" and message.get("content", "") is None:
        return {**message, "content": ""}
    if message.get("role") not in ("assistant", "tool"):
        return message
    content = message.get("content", message.get("refusal"))
    if isinstance(content, list):
        content = [
            {"type": "text", "text": part.get("refusal")}
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for part in content
        ]
    elif content is None and ("content" in message or reasoning_in(message)):
        content = message.get("refusal") or (None if message.get("tool_calls") else "")
    return message if content is None else {**message, "content": content}


def template_message(value: dict[str, Any], content: Content | None) -> dict[str, Any]:
    """A message as templates read it, with its other fields; the parts of its content are joined by line breaks."""
    role = "system" if value["role"] == "developer" else value["role"]
    given = {key: part for key, part in value.items() if part is not None}
    urls = image_urls(content) if isinstance(content, list) else []
    return {**given, "role": role, "content": content_text(content), **({IMAGES: urls} if urls else {})}


def content_text(content: Content | TextContent | None, between: str = "\n") -> str:
    return parts_text(content, between) if isinstance(content, list) else content or ""
