"""POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import json_response, read_fields, unless_gone
from quengine.serve.processes.server_thread import Ask
from quengine.serve.processes.shared_engine import Finished, Piece, ServedModel
from quengine.serve.routes.extensions import read_constraint
from quengine.serve.routes.logprob_forms import completion_logprobs, echoed_logprobs, joined_logprobs
from quengine.serve.routes.prompts import read_prompts
from quengine.serve.routes.streaming import data, stream_texts, whole_texts
from quengine.serve.schemas.fields import Fields
from quengine.serve.schemas.request_form import (
    LOGPROBS,
    Delivery,
    answer_head,
    answer_tail,
    asks_of,
    prepare,
    read_delivery,
    read_max_tokens,
    read_n,
    stream_end,
)
from quengine.serve.schemas.sampling_fields import read_sampling
from quengine.serve.service import Service, Text

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route."""


@dataclass(frozen=True)
class _Wanted:
    delivery: Delivery
    prompts: list[list[int]]
    n: int
    asks: list[Ask]
    echo: list[str]
    """What each text begins with: its prompt, or nothing."""


async def completions(service: Service, request: Request) -> Response:
    wanted = await unless_gone(request.receive, _read(await read_fields(request, service.limits), service))
    if wanted.delivery.stream:
        return await stream_texts(service, request, wanted.asks, _Chunks(service, wanted))
    return json_response(_body(service, wanted, await whole_texts(service, request, wanted.asks)))


async def _read(fields: Fields, service: Service) -> _Wanted:
    service.check_model_name(fields)
    constraint = read_constraint(fields)
    delivery, n = read_delivery(fields), read_n(fields, service)
    logprobs, echo = fields.integer("logprobs", LOGPROBS), fields.flag("echo") or False
    max_tokens = read_max_tokens(fields, service, "max_tokens", "max_completion_tokens", "n_predict")
    params = read_sampling(
        fields,
        service.settings.defaults,
        service.limits,
        service.model,
        max_tokens=max_tokens or service.settings.defaults.max_tokens or DEFAULT_MAX_TOKENS,
        logprobs=logprobs,
        constraint=constraint,
    )
    await prepare(service, params)
    skip_special = fields.flag("skip_special_tokens")
    fields.neutral("suffix", "")
    fields.ignore("prompt", "parse_special")
    fields.finish()
    prompts = await read_prompts(fields, service)
    model = service.model
    texts = [model.decode(prompt) if echo else "" for prompt in prompts]
    asks = asks_of(prompts, n, params, skip_special is False, score_prompt=echo and logprobs is not None)
    return _Wanted(delivery, prompts, n, asks, [text for text in texts for _ in range(n)])


def _body(service: Service, wanted: _Wanted, texts: Sequence[Text]) -> dict[str, Any]:
    return {
        **answer_head(service, "cmpl-", "text_completion"),
        "choices": [
            {
                "index": index,
                "text": wanted.echo[index] + text.text,
                "logprobs": _logprobs(wanted.asks[index], text, service.model),
                "finish_reason": text.end.reason,
            }
            for index, text in enumerate(texts)
        ],
        **answer_tail(wanted.prompts, [text.end for text in texts]),
    }


def _logprobs(ask: Ask, text: Text, model: ServedModel) -> dict[str, Any] | None:
    if ask.params.logprobs is None:
        return None
    if not ask.score_prompt:
        return completion_logprobs(text.logprobs, model, 0)[0]
    prompt, offset = echoed_logprobs(ask.prompt, text.prompt_logprobs, model)
    return joined_logprobs(prompt, completion_logprobs(text.logprobs, model, offset)[0])


@dataclass
class _Chunks:
    """A stream of text_completion objects."""

    service: Service
    wanted: _Wanted
    _offsets: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._head = answer_head(self.service, "cmpl-", "text_completion")
        self._with_logprobs = self.wanted.asks[0].params.logprobs is not None
        self._model = self.service.model

    def begin(self) -> bytes:
        if self.wanted.asks[0].score_prompt:
            return b""  # the prompts are given back with their log-probabilities, once these are there
        echoed = [(index, text) for index, text in enumerate(self.wanted.echo) if text]
        return b"".join(self._chunk(index, text, None, None) for index, text in echoed)

    def piece(self, choice: int, piece: Piece) -> bytes:
        if not self._with_logprobs:
            return self._chunk(choice, piece.text, None, None) if piece.text else b""
        ask, echoed = self.wanted.asks[choice], b""
        if ask.score_prompt and choice not in self._offsets:
            scores, self._offsets[choice] = echoed_logprobs(ask.prompt, piece.prompt_logprobs, self._model)
            echoed = self._chunk(choice, self.wanted.echo[choice], scores, None)
        if not piece.tokens and not piece.text:
            return echoed
        start = self._offsets.get(choice, 0)
        logprobs, self._offsets[choice] = completion_logprobs(piece.logprobs, self._model, start)
        return echoed + self._chunk(choice, piece.text, logprobs, None)

    def finished(self, choice: int, end: Finished) -> bytes:
        return self._chunk(choice, "", None, end.reason)

    def end(self, ends: Sequence[Finished]) -> bytes:
        return stream_end(self._head, self.wanted.prompts, ends, self.wanted.delivery.include_usage)

    def _chunk(self, choice: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> bytes:
        entry = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return data({**self._head, "choices": [entry]})
