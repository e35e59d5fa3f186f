"""From Ollama's bodies to the canonical requests."""

from collections.abc import Sequence
from typing import Any

from quengine.serve import access_log
from quengine.serve.apis.ollama.schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaMessage,
)
from quengine.serve.models.model_host import ModelHost
from quengine.serve.routes.gaps import fills_gaps
from quengine.serve.schemas.canonical import ChatRequest, CompletionRequest
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.fields import Body, Sampling
from quengine.serve.schemas.reading import shown

_SAMPLING = Sampling.__struct_fields__[len(Body.__struct_fields__) :]


def served_name(host: ModelHost, name: str) -> str:
    """A model's name without the tag `:latest`, which Ollama's clients add, unless it is served under that."""
    return name if name in host.settings.model_names else name.removesuffix(":latest")


def chat_request(host: ModelHost, body: OllamaChatRequest) -> ChatRequest:
    """Raises ApiError for what this model cannot do."""
    return _chat(host, body, openai_messages(body.messages), body.tools)


def generate_request(host: ModelHost, body: OllamaGenerateRequest) -> ChatRequest | CompletionRequest:
    """A chat whose user message is the prompt; or a completion: of a gap if there is a `suffix`, of the plain prompt if
    it is `raw` or the model has no chat template.

    Raises ApiError for what this model cannot do.
    """
    kind = "raw prompt" if body.raw else "prompt before a suffix"
    if body.system and (body.raw or body.suffix):
        raise bad_request(f"system: a {kind} has none; write it into the prompt", "system")
    if body.suffix and body.raw:
        raise bad_request("suffix: a raw prompt has none", "suffix")
    if body.suffix and not fills_gaps(host.model):
        raise bad_request(f"{host.name} does not support insert", "suffix", "unsupported")
    if body.raw or body.suffix or (host.model.template is None and not body.system):
        fields = _fields(host, body)
        if fields["max_tokens"] is None and host.settings.defaults.max_tokens is None:
            fields["max_tokens"] = -1  # the other route's own default is 16
        logprobs = body.top_logprobs if body.logprobs else None
        if body.images:
            raise bad_request(f"images: a {kind} has none, and needs a chat template for them", "images")
        return CompletionRequest(prompt=body.prompt, suffix=body.suffix, logprobs=logprobs, **fields)
    system = [{"role": "system", "content": body.system}] if body.system else []
    content = _content(body.prompt, body.images)
    return _chat(host, body, [*system, {"role": "user", "content": content}], None)


def _chat(
    host: ModelHost, body: OllamaGeneration, messages: list[dict[str, Any]], tools: list[Any] | None
) -> ChatRequest:
    fields = _fields(host, body)
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    elif body.think is not None:
        if body.think and not host.model.answer_format.reasons:
            access_log.current().ignored.append("think")
        elif host.model.answer_format.efforts is None:  # models with efforts reason less or more, but always
            fields["enable_thinking"] = body.think
    return ChatRequest(
        messages=messages, tools=tools, logprobs=body.logprobs, top_logprobs=body.top_logprobs, **fields
    )


def _fields(host: ModelHost, body: OllamaGeneration) -> dict[str, Any]:
    """The fields that both routes take under the same names."""
    options = body.options
    fields = {name: getattr(options, name) for name in _SAMPLING}
    limit = options.num_predict
    if options.num_keep is not None:
        fields["n_keep"] = options.num_keep
    if body.shift is False:
        fields["context_shift"] = False
    return {
        **fields,
        "model": served_name(host, body.model),
        "stop": options.stop,
        "max_tokens": limit if limit is None or limit > 0 else -1,
        "response_format": _response_format(body.format),
        "stream": body.stream,
    }


def _response_format(given: Any) -> dict[str, Any] | None:
    if given is None or given == "":
        return None
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"schema": given}}
    raise bad_request(f'format = {shown(given)}: must be "json" or a JSON schema', "format", "invalid_value")


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """The content of a message, images before its text, as Ollama writes them."""
    if not images:
        return text
    urls = [image if image.startswith("data:") else f"data:;base64,{image}" for image in images]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*shown, {"type": "text", "text": text}]


def openai_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form. Ollama's calls may have no ids: a result without one belongs to the first
    unanswered call with the name `tool_name`, or, without that field too, to the first unanswered call."""
    given: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        content = _content(message.content or "", message.images)
        each: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            each["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call_{number}_{n}" for n, call in enumerate(message.tool_calls)]
            functions = [call.function for call in message.tool_calls]
            waiting = [(function.name, id_) for function, id_ in zip(functions, ids, strict=True)]
            each["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": f.name, "arguments": f.arguments or {}}}
                for id_, f in zip(ids, functions, strict=True)
            ]
        if message.role == "tool":
            each |= _answered(message, waiting)
        given.append(each)
    return given


def _answered(message: OllamaMessage, waiting: list[tuple[str, str]]) -> dict[str, str]:
    """Name and id of the call that a result answers. The call is removed from `waiting`, the unanswered calls."""
    name, given = message.tool_name, message.tool_call_id
    call = next((each for each in waiting if given == each[1] or (given is None and name == each[0])), None)
    if call is None and waiting and given is None and name is None:
        call = waiting[0]
    if call is not None:
        waiting.remove(call)
        name, given = call
    return {key: value for key, value in (("name", name), ("tool_call_id", given)) if value}
