"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.chat_messages import read_messages
from quengine.serve.engine_port import Finished, Piece
from quengine.serve.errors import bad_request
from quengine.serve.extensions import refuse_constraints, refuse_tools
from quengine.serve.fields import Fields
from quengine.serve.http import json_response, off_loop, read_fields
from quengine.serve.logprob_forms import chat_logprobs
from quengine.serve.request_form import (
    MAX_LOGPROBS,
    Delivery,
    asks_of,
    read_delivery,
    read_max_tokens,
    read_n,
    timings_body,
)
from quengine.serve.sampling_fields import read_sampling
from quengine.serve.service import Service, Text, Usage, new_id
from quengine.serve.streaming import DONE, data, stream_texts, whole_texts
from quengine.serve.worker import Ask


async def chat_completions(service: Service, request: Request) -> Response:
    fields = await read_fields(request, service.limits)
    delivery, asks = await _read(fields, service)
    if delivery.stream:
        return await stream_texts(service, request, asks, _Chunks(service, asks, delivery.include_usage))
    return json_response(_body(service, asks, await whole_texts(service, request, asks)))


async def chat_prompt(fields: Fields, service: Service, values: Any, param: str = "messages") -> list[int]:
    """The prompt's ids of messages in a request, checked against the limits."""
    messages = read_messages(values, param)
    variables = fields.object("chat_template_kwargs") or {}
    model = service.model
    prompt = await off_loop(lambda: model.encode_chat(messages, None, variables))
    service.check_prompt(prompt, param)
    return prompt


async def _read(fields: Fields, service: Service) -> tuple[Delivery, list[Ask]]:
    service.check_model_name(fields)
    refuse_constraints(fields)
    refuse_tools(fields)
    delivery, n = read_delivery(fields), read_n(fields, service)
    params = read_sampling(
        fields,
        service.settings.defaults,
        service.limits,
        service.model,
        max_tokens=read_max_tokens(fields, service, "max_completion_tokens", "max_tokens", "n_predict"),
        logprobs=_read_logprobs(fields),
    )
    skip_special = fields.flag("skip_special_tokens")
    fields.neutral("modalities", ["text"])
    fields.neutral("verbosity", "medium")
    fields.neutral("reasoning_effort", "none")
    fields.neutral("add_generation_prompt", True)
    fields.neutral("continue_final_message", False)
    fields.neutral("return_progress", False)
    for key in ("audio", "web_search_options", "chat_template"):
        fields.neutral(key)
    fields.ignore("reasoning_format")
    values = fields.any("messages")
    fields.object("chat_template_kwargs")
    fields.finish()
    prompt = await chat_prompt(fields, service, values)
    return delivery, asks_of([prompt], n, params, skip_special is False)


def _read_logprobs(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


def _body(service: Service, asks: Sequence[Ask], texts: Sequence[Text]) -> dict[str, Any]:
    ends = [text.end for text in texts]
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": service.model_name,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text.text, "refusal": None},
                "logprobs": chat_logprobs(text.logprobs, service.model)
                if asks[index].params.logprobs is not None
                else None,
                "finish_reason": text.end.reason,
            }
            for index, text in enumerate(texts)
        ],
        "usage": Usage.of([asks[0].prompt], ends).body,
        "seed": ends[0].seed,
        "timings": timings_body(ends[0].timings),
    }


@dataclass
class _Chunks:
    """A stream of chat.completion.chunk objects."""

    service: Service
    asks: Sequence[Ask]
    include_usage: bool

    def __post_init__(self) -> None:
        self._head = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.service.model_name,
        }
        self._with_logprobs = self.asks[0].params.logprobs is not None
        self._model = self.service.model

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, first, None) for index in range(len(self.asks)))

    def piece(self, choice: int, piece: Piece) -> bytes:
        if not piece.text and not self._with_logprobs:
            return b""
        return self._chunk(choice, {"content": piece.text}, None, piece)

    def finished(self, choice: int, end: Finished) -> bytes:
        return self._chunk(choice, {}, end.reason)

    def end(self, ends: Sequence[Finished]) -> bytes:
        tail = {**self._head, "choices": [], "usage": Usage.of([self.asks[0].prompt], ends).body}
        tail |= {"seed": ends[0].seed, "timings": timings_body(ends[0].timings)}
        return (data(tail) if self.include_usage else b"") + DONE

    def _chunk(
        self, choice: int, delta: dict[str, str], reason: str | None, piece: Piece | None = None
    ) -> bytes:
        entry: dict[str, Any] = {"index": choice, "delta": delta, "finish_reason": reason, "logprobs": None}
        if piece is not None and self._with_logprobs:
            entry["logprobs"] = chat_logprobs(piece.logprobs, self._model)
        return data({**self._head, "choices": [entry], **({"usage": None} if self.include_usage else {})})
