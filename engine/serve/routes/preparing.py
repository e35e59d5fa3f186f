"""Turns canonical requests (a chat, or prompts to complete) into completions for the engine to compute."""

from dataclasses import dataclass
from typing import Any

from quengine.errors import EngineError
from quengine.serve.models.model_host import ModelHost
from quengine.serve.routes.answer_events import Answer, text_answers
from quengine.serve.routes.constraints import answer_constraint, read_constraint, read_tools
from quengine.serve.routes.gaps import suffix_prompt
from quengine.serve.routes.prompts import (
    chat_ids,
    given_answer,
    read_messages,
    read_prompts,
    reasoning_wanted,
)
from quengine.serve.routes.sampling import check_choices, completions_of, requests_of, sampling_params
from quengine.serve.schemas.canonical import ChatRequest, CompletionRequest
from quengine.serve.schemas.errors import bad_request
from quengine.structured.answer_format import AnswerFormat
from quengine.structured.tool_calls import (
    ToolUse,
)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route."""


async def prepare_chat(host: ModelHost, body: ChatRequest) -> list[Answer]:
    """A chat's completions. Raises ApiError."""
    host.check_model_name(body.model)
    check_choices(body, host.limits)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    model = host.model
    form, use, text = _form(host, body), await read_tools(body, model), await read_constraint(body)
    prompt = await chat_prompt(host, body, use)
    params = await sampling_params(
        host,
        body,
        logprobs=body.top_logprobs if body.logprobs else None,
        constraint=await answer_constraint(use, model, text, prompt.end, prompt.budget),
    )
    special = not body.skip_special_tokens or form.shown(use)
    n, images = completions_of(body), [prompt.images]
    requests = requests_of([prompt.ids], n, params, special, False, body.reports, body.id_slot, images=images)
    return [Answer(host, request, choice, form, use, prompt.end) for choice, request in enumerate(requests)]


def _form(host: ModelHost, body: ChatRequest) -> AnswerFormat:
    """The format by which the answer is parsed. Raises ApiError where reasoning cannot stay in the text."""
    form = host.model.answer_format
    if (body.reasoning_format or host.settings.chat.reasoning_format) != "none":
        return form
    try:
        return form.with_reasoning_in_text()
    except EngineError as error:
        raise bad_request(str(error), "reasoning_format", "unsupported") from None


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation's prompt.

    Attributes:
        ids: its tokens, with markers for `images`.
        end: its end as text (`ServedModel.end_of`).
        budget: the most tokens of reasoning; -1: any number.
    """

    ids: list[int]
    end: str
    budget: int
    images: tuple[bytes, ...] = ()


async def chat_prompt(host: ModelHost, body: ChatRequest, use: ToolUse, limited: bool = True) -> ChatPrompt:
    """The prompt of a conversation; `limited`: checked against the limits. Raises ApiError."""
    model = host.model
    messages, ending = read_messages(body)
    effort = body.reasoning_effort or body.reasoning.effort
    variables, budget = reasoning_wanted(host, body, effort, "reasoning_effort")
    tools = model.answer_format.tools(use)
    ids, images = await chat_ids(host, messages, tools, variables, "messages", ending, limited)
    return ChatPrompt(ids, model.end_of(ids, given_answer(messages, ending)), budget, images)


async def prepare_completions(host: ModelHost, body: CompletionRequest) -> list[Answer]:
    """The completions of all prompts. Raises ApiError."""
    host.check_model_name(body.model)
    check_choices(body, host.limits)
    default = host.settings.defaults.max_tokens
    params = await sampling_params(
        host,
        body,
        logprobs=body.logprobs,
        constraint=await read_constraint(body),
        max_tokens=DEFAULT_MAX_TOKENS if default is None else default,
    )
    given: Any = suffix_prompt(host.model, body) if body.suffix else body.prompt
    special = body.parse_special and not body.suffix
    images = list[tuple[bytes, ...]]()
    prompts = await read_prompts(host, given, "prompt", special, images=images)
    scored = body.echo and body.logprobs is not None and not params.post_sampling_probs
    shown = not body.skip_special_tokens
    n = completions_of(body)
    requests = requests_of(prompts, n, params, shown, scored, body.reports, body.id_slot, images=images)
    return text_answers(host, requests)
