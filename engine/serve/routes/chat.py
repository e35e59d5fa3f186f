"""POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.errors import EngineError
from quengine.serve.http import json_response, read_request, unless_gone
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.answers import (
    LiveTimings,
    answer_head,
    answer_tail,
    stream_end,
    timings_body,
    token_count,
)
from quengine.serve.routes.constraints import answer_constraint, read_constraint, read_tools, violation_field
from quengine.serve.routes.images import counted
from quengine.serve.routes.logprob_forms import chat_logprobs
from quengine.serve.routes.native import verbose_chunk, verbose_result
from quengine.serve.routes.old_functions import old_form
from quengine.serve.routes.prompts import (
    chat_ids,
    given_answer,
    read_messages,
    reasoning_wanted,
)
from quengine.serve.routes.sampling import check_choices, completions_of, requests_of, sampling_params
from quengine.serve.routes.streaming import ChunkForm, data, stream_answer, whole_answer
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.openai import ChatRequest
from quengine.structured.answer_format import AnswerFormat, answer_violation
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.tool_calls import (
    CallDelta,
    Delta,
    ReasoningDelta,
    ToolUse,
    collect,
    reasoning_of,
)


async def chat_completions(host: ModelHost, request: Request) -> Response:
    """Answer a conversation."""
    body = await read_request(request, ChatRequest, host.limits)
    requests, answers = await unless_gone(request.receive, prepare_chat(host, body))
    if body.stream:
        live = LiveTimings(body, requests)
        chunks = _Chunks(host, requests, answers, body.stream_options.include_usage, host.verbose(body), live)
        return await stream_answer(host, request, requests, chunks)
    outputs = await whole_answer(host, request, requests)
    answer = _body(host, requests, answers, outputs)
    return json_response(answer | (verbose_result(host, requests, outputs) if host.verbose(body) else {}))


async def chat_tokens(host: ModelHost, request: Request) -> Response:
    """Tokens of a conversation's prompt.

    Of a request that would be answered.
    """
    body = await read_request(request, ChatRequest, host.limits)
    requests, _ = await unless_gone(request.receive, prepare_chat(host, body))
    tokens = await counted(host, requests[0].prompt, requests[0].images, "messages")
    return json_response(token_count(tokens))


async def prepare_chat(
    host: ModelHost, body: ChatRequest
) -> tuple[list[GenerationRequest], "list[ChatAnswer]"]:
    """A chat's requests, and what takes the answer of each apart. Raises ApiError."""
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
    answers = [
        ChatAnswer(model, form, use, prompt.end, params.constraint, bool(body.functions))
        for _ in range(completions_of(body))
    ]
    n, images = completions_of(body), [prompt.images]
    requests = requests_of([prompt.ids], n, params, special, False, body.reports, body.id_slot, images=images)
    return requests, answers


def _form(host: ModelHost, body: ChatRequest) -> AnswerFormat:
    """How the answer is taken apart. Raises ApiError where reasoning cannot stay in the text."""
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


class ChatAnswer:
    """One answer, taken apart as the model's form has it. `prompt`: the prompt's end (`ServedModel.end_of`).

    functions: its call is given as OpenAI's API had it before tools.
    """

    def __init__(
        self,
        model: ServedModel,
        form: AnswerFormat,
        use: ToolUse,
        prompt: str,
        constraint: ConstraintSpec | None = None,
        functions: bool = False,
    ) -> None:
        self._model = model
        self._functions = functions
        self._form = form
        self._use = use
        self._prompt = prompt
        self._parser = form.parser(use, prompt)
        self._tokens: list[int] = []
        self._constraint = constraint
        self._deltas: list[Delta] = []  # kept for the check of the finished answer

    @property
    def reasoning_tokens(self) -> int:
        return self._form.reasoning_tokens(self._use, self._tokens, self._model.decode, self._prompt)

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        """The `delta` of each chunk that this piece becomes."""
        return [self._delta(part) for part in self.read(piece)]

    def read(self, piece: Piece) -> list[Delta]:
        """What this piece makes certain."""
        self._tokens += piece.tokens
        return self._kept(self._parser.push(piece.text))

    def finish(self) -> list[dict[str, Any]]:
        """The `delta` of each chunk of what was held back."""
        return [self._delta(part) for part in self.rest()]

    def rest(self) -> list[Delta]:
        """What was held back."""
        return self._kept(self._parser.finish())

    def checked(self, host: ModelHost, end: Finished) -> dict[str, Any]:
        """The field of an answer that ended by itself and is not valid under its schema."""
        if end.reason != "stop" or (self._constraint is None):
            return {}
        text, calls = collect(self._deltas)
        return violation_field(host, answer_violation(self._constraint, self._use, text, calls))

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        if self._constraint is not None:
            self._deltas += deltas
        return deltas

    def reason(self, end: Finished) -> str:
        called = "function_call" if self._functions else "tool_calls"
        return called if self._parser.calls and end.reason == "stop" else end.reason

    def message(self, piece: Piece) -> dict[str, Any]:
        """The whole answer."""
        deltas = self.read(piece) + self.rest()
        spoken, calls = collect(deltas)
        message: dict[str, Any] = {"role": "assistant", "content": spoken, "refusal": None}
        if reasoning := reasoning_of(deltas):
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"content": spoken or None, "tool_calls": [call.as_openai() for call in calls]}
        return old_form(message) if self._functions else message

    def _delta(self, part: Delta) -> dict[str, Any]:
        if isinstance(part, CallDelta):
            called = {"tool_calls": [part.as_openai()]}
            return old_form(called) if self._functions else called
        return {"reasoning_content" if isinstance(part, ReasoningDelta) else "content": part.text}


def _body(
    host: ModelHost,
    requests: Sequence[GenerationRequest],
    answers: Sequence[ChatAnswer],
    outputs: Sequence[tuple[Piece, Finished]],
) -> dict[str, Any]:
    messages = [answer.message(piece) for answer, (piece, _) in zip(answers, outputs, strict=True)]
    reasoning = sum(answer.reasoning_tokens for answer in answers)
    return {
        **answer_head(host, "chatcmpl-", "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": messages[index],
                "logprobs": _logprobs(requests[index], piece, host.model),
                "finish_reason": answers[index].reason(end),
                **answers[index].checked(host, end),
            }
            for index, (piece, end) in enumerate(outputs)
        ],
        **answer_tail(requests, [end for _, end in outputs], reasoning),
    }


def _logprobs(request: GenerationRequest, piece: Piece, model: ServedModel) -> dict[str, Any] | None:
    params = request.params
    wanted = params.logprobs is not None
    return chat_logprobs(piece.logprobs, model, params.post_sampling_probs) if wanted else None


@dataclass
class _Chunks(ChunkForm):
    """A stream of chat.completion.chunk objects."""

    host: ModelHost
    requests: Sequence[GenerationRequest]
    answers: Sequence[ChatAnswer]
    include_usage: bool
    verbose: bool
    live: LiveTimings

    def __post_init__(self) -> None:
        self._head = answer_head(self.host, "chatcmpl-", "chat.completion.chunk")
        self._with_logprobs = self.requests[0].params.logprobs is not None
        self._model = self.host.model

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": None}
        return b"".join(self._chunk(index, first, None) for index in range(len(self.requests)))

    def piece(self, choice: int, piece: Piece) -> bytes:
        progress = b"".join(
            self._chunk(choice, {}, None, more=each) for each in self.live.progress(choice, piece)
        )
        deltas = self.answers[choice].push(piece)
        if self._with_logprobs and piece.tokens and not deltas:
            deltas = [{}]
        more = self.live.after(choice, piece)
        return progress + b"".join(
            self._chunk(choice, d, None, None if i else piece, more) for i, d in enumerate(deltas)
        )

    def finished(self, choice: int, end: Finished) -> bytes:
        answer = self.answers[choice]
        held = b"".join(self._chunk(choice, delta, None) for delta in answer.finish())
        more = {} if self.include_usage else {"timings": timings_body(end.timings)}
        if self.verbose:
            more |= verbose_chunk(self.host, choice, self.requests[choice], end)
        return held + self._chunk(
            choice, {}, answer.reason(end), more=more, last=answer.checked(self.host, end)
        )

    def end(self, ends: Sequence[Finished]) -> bytes:
        reasoning = sum(answer.reasoning_tokens for answer in self.answers) if self.include_usage else 0
        return stream_end(self._head, self.requests, ends, self.include_usage, reasoning)

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        reason: str | None,
        piece: Piece | None = None,
        more: Mapping[str, Any] | None = None,
        last: Mapping[str, Any] | None = None,
    ) -> bytes:
        entry: dict[str, Any] = {"index": choice, "delta": delta, "finish_reason": reason, "logprobs": None}
        entry |= last or {}
        if piece is not None and self._with_logprobs:
            entry["logprobs"] = _logprobs(self.requests[choice], piece, self._model)
        usage = {"usage": None} if self.include_usage else {}
        return data({**self._head, "choices": [entry], **usage, **(more or {})})
