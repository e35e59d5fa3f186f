"""POST /completion: llama-server's own route, with its names."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quengine.request.sampling_params import SamplingParams
from quengine.serve.http import json_response, read_fields, unless_gone
from quengine.serve.processes.server_thread import Ask
from quengine.serve.processes.shared_engine import Finished, Piece
from quengine.serve.routes.extensions import read_constraint
from quengine.serve.routes.logprob_forms import native_probabilities
from quengine.serve.routes.prompts import read_prompts
from quengine.serve.routes.streaming import data, stream_texts, whole_texts
from quengine.serve.schemas.fields import Fields
from quengine.serve.schemas.request_form import (
    LOGPROBS,
    asks_of,
    prepare,
    read_max_tokens,
    read_n,
    timings_body,
)
from quengine.serve.schemas.sampling_fields import read_sampling
from quengine.serve.service import Service

_STOP_TYPES = {"length": "limit"}


@dataclass(frozen=True)
class _Wanted:
    asks: list[Ask]
    stream: bool
    several: bool
    return_tokens: bool


async def completion(service: Service, request: Request) -> Response:
    wanted = await unless_gone(request.receive, _read(await read_fields(request, service.limits), service))
    form = _Form(service, wanted)
    if wanted.stream:
        return await stream_texts(service, request, wanted.asks, form)
    texts = await whole_texts(service, request, wanted.asks)
    bodies = []
    for index, text in enumerate(texts):
        body = form.last(index, text.end) | {"content": text.text, "has_new_line": "\n" in text.text}
        body |= {"tokens": text.tokens if wanted.return_tokens else []}
        bodies.append(body | form.probabilities(index, text.logprobs))
    return json_response(bodies if wanted.several else bodies[0])


async def _read(fields: Fields, service: Service) -> _Wanted:
    service.check_model_name(fields)
    constraint = read_constraint(fields)
    n_probs = fields.integer("n_probs", LOGPROBS)
    params = read_sampling(
        fields,
        service.settings.defaults,
        service.limits,
        service.model,
        max_tokens=read_max_tokens(fields, service, "n_predict", "max_tokens"),
        logprobs=n_probs or None,
        constraint=constraint,
    )
    await prepare(service, params)
    n, stream = read_n(fields, service), fields.flag("stream") or False
    return_tokens = fields.flag("return_tokens") or False
    fields.neutral("post_sampling_probs", False)
    fields.neutral("return_progress", False)
    fields.neutral("image_data", [])
    fields.neutral("response_fields", [])
    fields.ignore("prompt", "parse_special")
    fields.finish()
    prompts = await read_prompts(fields, service)
    asks = asks_of(prompts, n, params)
    return _Wanted(asks, stream, len(asks) > 1, return_tokens)


@dataclass
class _Form:
    """Bodies and chunks, which have the same fields."""

    service: Service
    wanted: _Wanted
    _predicted: dict[int, int] = field(default_factory=dict)
    _lines: set[int] = field(default_factory=set)

    def begin(self) -> bytes:
        return b""

    def piece(self, choice: int, piece: Piece) -> bytes:
        self._predicted[choice] = self._predicted.get(choice, 0) + len(piece.tokens)
        if "\n" in piece.text:
            self._lines.add(choice)
        chunk = {
            "index": choice,
            "content": piece.text,
            "tokens": piece.tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._predicted[choice],
            "tokens_evaluated": len(self.wanted.asks[choice].prompt),
        }
        return data(chunk | self.probabilities(choice, piece.logprobs))

    def finished(self, choice: int, end: Finished) -> bytes:
        return data(self.last(choice, end) | {"content": "", "tokens": []})

    def end(self, ends: Sequence[Finished]) -> bytes:
        del ends
        return b""

    def probabilities(self, choice: int, entries: Sequence[Any]) -> dict[str, Any]:
        if self.wanted.asks[choice].params.logprobs is None:
            return {}
        return {"completion_probabilities": native_probabilities(entries, self.service.model)}

    def last(self, choice: int, end: Finished) -> dict[str, Any]:
        """What is told with the end of a text. `truncated`: the context was full; no prompt is ever cut."""
        ask, model = self.wanted.asks[choice], self.service.model
        prompt, generated = len(ask.prompt), end.timings.generated_tokens
        word = end.stop_text
        return {
            "index": choice,
            "content": "",
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self.service.model_name,
            "tokens_predicted": generated,
            "tokens_evaluated": prompt,
            "tokens_cached": prompt + generated,
            "generation_settings": generation_settings(ask.params, model.ctx_size) | {"seed": end.seed},
            "prompt": model.decode(ask.prompt),
            "has_new_line": choice in self._lines,
            "truncated": end.reason == "length" and prompt + generated >= model.ctx_size,
            "stop_type": "word" if word is not None else _STOP_TYPES.get(end.reason, "eos"),
            "stopping_word": word or "",
            "timings": timings_body(end.timings),
        }


def generation_settings(params: SamplingParams, ctx_size: int) -> dict[str, Any]:
    """The sampling parameters as llama-server names them."""
    values = asdict(params)
    max_tokens = -1 if params.max_tokens is None else params.max_tokens
    seed = -1 if params.seed is None else params.seed
    banned = float("-inf")
    biases = [[token, False if bias == banned else bias] for token, bias in params.logit_bias.items()]
    copied = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n")
    return {key: values[key] for key in (*copied, "presence_penalty", "frequency_penalty", "ignore_eos")} | {
        "n_predict": max_tokens,
        "max_tokens": max_tokens,
        "seed": seed,
        "stop": list(params.stop),
        "logit_bias": biases,
        "n_probs": params.logprobs or 0,
        "n_ctx": ctx_size,
        "mirostat": 0,
    }
