"""POST /completion: llama-server's own route, with its names."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quengine.request.sampling_params import MAX_COUNT, RANGES, SamplingParams
from quengine.serve.apis.llama.requests import NativeRequest
from quengine.serve.apis.llama.schemas import (
    AppliedAdapter,
    Bias,
    GenerationSettings,
    NativeChunk,
    NativeCompletion,
    NativeFields,
)
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_engine import Finished
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.answer_events import Answer, End, Part, text_answers
from quengine.serve.routes.answers import LiveTimings, prompt_tokens, timings_body
from quengine.serve.routes.constraints import read_constraint
from quengine.serve.routes.logprob_forms import scored_tokens
from quengine.serve.routes.prompts import read_prompts
from quengine.serve.routes.sampling import check_choices, completions_of, requests_of, sampling_params
from quengine.serve.routes.streaming import AnswerForm, data
from quengine.serve.schemas.canonical import Native
from quengine.serve.schemas.shared_answers import ScoredToken

_ABSENT = object()


async def completion(host: ModelHost, body: NativeRequest) -> "NativeForm":
    """Complete a prompt, with llama-server's names."""
    return await native_form(host, body, body.prompt, body.parse_special)


async def native_form(host: ModelHost, body: Native, prompt: Any, parse_special: bool) -> "NativeForm":
    """The answer in llama-server's own form. Raises ApiError."""
    host.check_model_name(body.model)
    check_choices(body, host.limits)
    params = await sampling_params(
        host, body, logprobs=body.n_probs or None, constraint=await read_constraint(body)
    )
    images = list[tuple[bytes, ...]]()
    prompts = await read_prompts(host, prompt, "prompt", parse_special, images=images)
    n = completions_of(body)
    requests = requests_of(prompts, n, params, progress=body.reports, slot=body.id_slot, images=images)
    return NativeForm(host, text_answers(host, requests), body)


def native_result(
    host: ModelHost, answer: Answer, end: Finished, text: str, tokens: Sequence[int]
) -> NativeCompletion:
    """llama-server's own answer for one completion. The newest token is not in the cache. `truncated`: a full context
    ended the text or was shifted; no prompt is ever cut."""
    model, request = answer.model, answer.request
    prompt, generated = prompt_tokens(request, end), end.timings.generated_tokens
    held = prompt + generated - end.timings.discarded_tokens
    word = end.stop_text
    kind: Any = "word" if word is not None else "limit" if end.reason == "length" else "eos"
    return NativeCompletion(
        index=answer.choice,
        content=text,
        tokens=tokens,
        id_slot=request.slot,
        model=host.name,
        tokens_predicted=generated,
        tokens_evaluated=prompt,
        tokens_cached=held - min(1, generated),
        generation_settings=generation_settings(request.params, model, end.seed),
        prompt=b"".join(map(model.token_bytes, request.prompt)).decode(errors="replace"),
        has_new_line="\n" in text,
        truncated=end.timings.shifts > 0 or (end.reason == "length" and held >= model.ctx_size),
        stop_type=kind,
        stopping_word=word or "",
        timings=timings_body(end.timings),
    )


def verbose_result(
    host: ModelHost, answers: Sequence[Answer], outputs: Sequence[tuple[Part, End]]
) -> dict[str, Any]:
    """What `verbose` adds to an answer in OpenAI's form: llama-server's own, an array for several completions."""
    results = [
        native_result(host, answer, end.finished, part.piece.text, part.piece.tokens)
        for answer, (part, end) in zip(answers, outputs, strict=True)
    ]
    return {"verbose": results if len(results) > 1 else results[0]}


def verbose_chunk(host: ModelHost, answer: Answer, end: Finished) -> dict[str, Any]:
    """As `verbose_result`, for the last chunk of a streamed completion, whose text has been sent."""
    return {"verbose": native_result(host, answer, end, "", ())}


def _chosen(answer: NativeCompletion, fields: Sequence[str]) -> NativeCompletion | NativeFields:
    """The fields of an answer that response_fields names (a/b stands for b in a), or all where it names none."""
    if not fields:
        return answer
    chosen, built = {}, msgspec.to_builtins(answer)
    for path in fields:
        value: Any = built
        for key in path.split("/"):
            value = value.get(key, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            chosen[path] = value
    return chosen


class NativeForm(AnswerForm):
    """One completion or several, or the chunks of a stream; the last chunk has the fields of a whole answer."""

    def __init__(self, host: ModelHost, answers: Sequence[Answer], body: Native) -> None:
        super().__init__(host, answers, body.stream)
        self.fields = body.response_fields
        self.tokens = body.return_tokens
        self.live = LiveTimings(body, self.requests)
        self._predicted: dict[int, int] = {}
        self._lines: set[int] = set()

    def whole(
        self, outputs: Sequence[tuple[Part, End]]
    ) -> NativeCompletion | NativeFields | list[NativeCompletion] | list[NativeFields]:
        written: Any = [self._written(part, end) for part, end in outputs]
        answer: NativeCompletion | list[NativeCompletion] = written if len(written) > 1 else written[0]
        return answer

    def _written(self, part: Part, end: End) -> NativeCompletion | NativeFields:
        choice, piece = part.choice, part.piece
        given = piece.tokens if self.tokens else ()
        answer = native_result(self.host, self.answers[choice], end.finished, piece.text, given)
        answer.schema_violation = end.violation
        answer.completion_probabilities = self._probabilities(choice, piece.logprobs)
        return _chosen(answer, self.fields)

    def part(self, part: Part) -> bytes:
        choice, piece = part.choice, part.piece
        steps, more = self.live.of(choice, piece)
        progress = b"".join(data(self._chunk(choice, "", (), **each)) for each in steps)
        if not (piece.tokens or piece.text):
            return progress
        self._predicted[choice] = self._predicted.get(choice, 0) + len(piece.tokens)
        if "\n" in piece.text:
            self._lines.add(choice)
        chunk = self._chunk(choice, piece.text, piece.tokens, **more)
        chunk.completion_probabilities = self._probabilities(choice, piece.logprobs)
        return progress + data(chunk)

    def finished(self, end: End) -> bytes:
        choice = end.choice
        last = native_result(self.host, self.answers[choice], end.finished, "", ())
        last.schema_violation, last.has_new_line = end.violation, choice in self._lines
        return data(_chosen(last, self.fields))

    def _chunk(self, choice: int, text: str, tokens: Sequence[int], **more: Any) -> NativeChunk:
        return NativeChunk(
            index=choice,
            content=text,
            tokens=tokens,
            id_slot=self.requests[choice].slot,
            tokens_predicted=self._predicted.get(choice, 0),
            tokens_evaluated=prompt_tokens(self.requests[choice]),
            **more,
        )

    def _probabilities(self, choice: int, entries: Sequence[Any]) -> list[ScoredToken] | UnsetType:
        answer = self.answers[choice]
        if answer.request.params.logprobs is None:
            return UNSET
        return scored_tokens(entries, answer.model, answer.request.params.post_sampling_probs)


def generation_settings(
    params: SamplingParams, model: ServedModel | None, seed: int | None = None
) -> GenerationSettings:
    """The sampling parameters as llama-server names them, with the `seed` that was drawn. model: None for several."""
    unlimited = (None, MAX_COUNT, None if model is None else model.ctx_size)
    max_tokens = -1 if params.max_tokens in unlimited else params.max_tokens
    seed = params.seed if seed is None else seed
    banned = float("-inf")
    biases = [Bias(token, None if bias == banned else bias) for token, bias in params.logit_bias.items()]
    if params.ignore_eos and model is not None:
        biases += [Bias(token, None) for token in sorted(model.eos_ids)]
    return GenerationSettings(
        **{key: getattr(params, key) for key in RANGES if key not in ("max_tokens", "logprobs", "n", "seed")},
        seed=-1 if seed is None else seed,
        n_predict=max_tokens,
        max_tokens=max_tokens,
        stop=params.stop,
        logit_bias=biases,
        n_probs=params.logprobs or 0,
        n_ctx=0 if model is None else model.ctx_size,
        ignore_eos=params.ignore_eos,
        context_shift=params.context_shift,
        dry_sequence_breakers=params.dry_sequence_breakers,
        samplers=params.samplers,
        post_sampling_probs=params.post_sampling_probs,
        lora=_applied(params, model),
    )


def _applied(params: SamplingParams, model: ServedModel | None) -> list[AppliedAdapter]:
    if model is None:
        return []
    scales = model.adapters.scales(params.lora)
    return [AppliedAdapter(number, scale) for number, scale in enumerate(scales) if scale]
