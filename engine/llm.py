"""The public API: a loaded model that completes prompts. `LLM.step` is one step of the engine."""

import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakSet

import torch
from torch import Tensor

from quengine.completion_stream import ChatStream, CompletionStream
from quengine.config import (
    BACKLOG_CHUNK,
    DEFAULT_CHUNK,
    MIXED_CHUNK,
    MIXED_SECONDS,
    Configured,
    EngineConfig,
)
from quengine.engine_lock import EngineLock
from quengine.errors import EngineError
from quengine.kernels.compile_clock import moment
from quengine.kernels.cpu.runtime.threads import dismiss_threads
from quengine.load import load_model
from quengine.memory import attended_bytes
from quengine.models.config import no_text
from quengine.platform.deferred_interrupt import DeferredInterrupt
from quengine.platform.device import on_device
from quengine.platform.machine import peak_memory
from quengine.platform.out_of_memory import memory_errors
from quengine.request.adapter_scales import LoadedAdapter
from quengine.request.chat_format import ChatFormat
from quengine.request.chat_options import ReasoningFormat
from quengine.request.content_parts import flattened, has_images, images_of, why_text_alone
from quengine.request.image_prompts import ImagePrompts
from quengine.request.output import Completion, ShowProgress
from quengine.request.pooling import (
    RANK,
    Pool,
    Pooling,
    check_ranks,
    default_pooling,
    pair_ids,
    task_prefix,
    tasks_of,
    with_end,
)
from quengine.request.prompt import Message, Prompt, as_ids, as_prompts, check_messages, check_text
from quengine.request.prompt_images import ImagePrompt, PromptImages
from quengine.request.sampling_params import SamplingParams, params_of_each
from quengine.request.sequence import Sequence
from quengine.request.sequence_factory import SequenceFactory
from quengine.runners.device_turns import DeviceTurns
from quengine.sampler import NO_CHOICE, Result, Sample, Verified
from quengine.scheduler import PENDING, Scheduler
from quengine.scoring.choices import ChoiceScore, score_choices
from quengine.scoring.perplexity import Perplexity, last, text_chunks, whole_text
from quengine.speculative.speculation import Speculation
from quengine.step_plan import StepPlan
from quengine.stream_batch import finish_all
from quengine.structured.answer_format import AnswerFormat
from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.tool_calls import ToolUse
from quengine.wrong_names import hinted

__all__ = ["LLM", "ChatStream", "CompletionStream"]

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 256
"""Token limit of a completion without `SamplingParams`. Answers of chats end by themselves and have no limit."""

_LIMITED = SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)
_open_models = WeakSet["LLM"]()
"""Models that are not closed. They share the threads of the CPU kernels."""


class LLM(Configured):
    """A loaded model.

    Threads may share one: their requests are batched together, like the prompts of one `generate`. Streams and
    ChatSessions are not thread-safe. A process forked from this one cannot use it.

    Args:
        model: an alias, `hf:user/repo:QUANT`, a GGUF file or a Hugging Face checkpoint folder.

    All further arguments are the fields of `EngineConfig`: `LLM(model, device="cpu", ctx_size=4096, parallel=8)`.

    Raises:
        EngineError: an argument or the model is wrong.
        CannotRunError: this machine has no such device or too little memory.
    """

    def _open(self, model: str | Path, config: EngineConfig) -> None:
        with memory_errors():
            self.loaded = load_model(model, config, config.progress)
        ranks = self.loaded.ranks
        config = replace(self.loaded.config, tensor_parallel=1 if ranks is None else ranks.count)
        self.config = config
        self.tokenizer = self.loaded.tokenizer
        self.constraints = ConstraintCompiler(self.tokenizer, self.loaded.checkpoint.config.vocab_size)
        self.chat_template = self.loaded.checkpoint.chat_template(config.chat_template)
        missing = f"{self.loaded.path.name} has no chat template; use --raw, or --chat-template chatml"
        self._chat = ChatFormat(self.tokenizer, self.chat_template, missing)
        self.model_config = self.loaded.checkpoint.config
        self.ctx_size = self.loaded.cache.ctx_size
        self.runner = self.loaded.runner
        self.scheduler = self._make_scheduler()
        # steps in flight, whose results have not been taken, in launch order
        self._in_flight = deque[StepPlan]()
        self.speculation = Speculation.of(config, self.scheduler, self.loaded.draft, self.loaded.device.type)
        vision = self.loaded.vision
        self.images: ImagePrompts | None = None
        self._turns: DeviceTurns | None = None
        if vision is not None:
            kept = config.image_cache << 20, self.loaded.kept_images
            windows = [pool.window for pool in self.loaded.cache.pools if pool.window is not None]
            most = min([self.loaded.decoder.chunk_size, *windows])
            if self.loaded.device.type == "cuda":
                self._turns = DeviceTurns(self.loaded.device)
            alone = self._turns is None or config.deterministic
            self.images = ImagePrompts(vision, self.tokenizer, self._turns, *kept, most, alone)
        self._sequences = SequenceFactory(
            *(self.tokenizer, self.model_config, self.ctx_size, self.constraints, self.runner.choose),
            adapters=self.loaded.adapters,
        )
        self.runner.adapters = self.loaded.adapters.of(None)
        source = self._chat.source
        has = "no chat template" if source is None else f"chat template of {len(source)} characters"
        logger.info("tokenizer of %d tokens, %s", self.tokenizer.vocab_size, has)
        self._lock = EngineLock()
        # Cancelled sequences that are still to be removed. Finalizers append at any time and in any thread. A `finally`
        # block appends with a single C call, since an interrupt may come before any further call.
        self.dropped: deque[Sequence] = deque()
        _open_models.add(self)

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """The model's LoRA adapters, in the order of their numbers (`SamplingParams.lora`)."""
        return self.loaded.adapters.adapters

    @property
    def answer_format(self) -> AnswerFormat:
        """The model's answer format: how it writes reasoning, text and tool calls."""
        return self._chat.answers

    @hinted
    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool | ShowProgress = False,
    ) -> list[Completion]:
        """Completes each prompt (text, or token ids) `params.n` times, in order, up to `parallel` sequences at a time.

        Text is encoded as it is: without a chat template, and without control tokens, whatever it contains.

        Args:
            prompts: one or several, each a text or token ids.
            params: for all prompts, or one for each; None: the defaults, and at most 256 tokens.
            progress: True shows a line on standard error; a function is called each time that a completion has ended.

        Raises:
            EngineError: a prompt does not fit the context (the message has both numbers), is neither text nor token
                ids, or contains half a surrogate pair; or logits were not finite.
        """
        listed = as_prompts(prompts)
        each = params_of_each(_LIMITED if params is None else params, len(listed))
        return finish_all(
            self,
            [
                self.stream(prompt, given, index=index)
                for prompt, given in zip(listed, each, strict=True)
                for index in range(given.n)
            ],
            progress,
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        index: int = 0,
        show_special: bool | Collection[int] = False,
    ) -> CompletionStream:
        """Completes one prompt; iterating yields pieces of text as soon as they are certain.

        The request is computed while the stream is iterated over, and cancelled when the stream is closed or
        garbage-collected, as after a `break`. A stream that is kept but not iterated over stays queued: later requests
        may be computed after it.

        Args:
            prompt: a text or token ids.
            params: None: the defaults, and at most 256 tokens.
            index: distinguishes several completions of one prompt under one seed.
            show_special: keeps the names of control tokens in the text: of all, or of the given ones.

        Raises:
            EngineError: the prompt does not fit the context, is neither text nor token ids, or contains half a
                surrogate pair; or `params.constraint` cannot be compiled.
        """
        self._check_generates()
        ids, images = self._prompt_parts(prompt)
        sequence = self._sequences.make(ids, params or _LIMITED, index, show_special, images=images)
        return CompletionStream(self, sequence)

    @hinted
    def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        tools: Seq[Message] | None = None,
        tool_choice: str | Message | None = None,
    ) -> Completion:
        """Answers a conversation, a list of {"role", "content"}, formatted with the model's chat template.

        A content is text, or a list of parts: {"type": "text", "text": ...}, {"type": "image", "image": bytes or the
        path of a file} and {"type": "image_url", "image_url": {"url": "data:..."}}.

        Args:
            tools: functions that the model may call, as OpenAI's API has them; calls are `Completion.tool_calls`.
            tool_choice: "auto", "none", "required", or {"type": "function", "function": {"name": ...}}.
        """
        return self.stream_chat(messages, params, tools=tools, tool_choice=tool_choice).finish()

    @hinted
    def chat_batch(
        self,
        conversations: Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        tools: Seq[Message] | None = None,
        tool_choice: str | Message | None = None,
        progress: bool | ShowProgress = False,
    ) -> list[Completion]:
        """Answers each conversation as `chat` does, `params.n` times, up to `parallel` at a time, in order.

        `params` are for all conversations, or one for each; the other arguments are those of `chat` and `generate`.
        """
        each = params_of_each(SamplingParams() if params is None else params, len(conversations))
        return finish_all(
            self,
            [
                self.stream_chat(messages, given, tools=tools, tool_choice=tool_choice, index=index)
                for messages, given in zip(conversations, each, strict=True)
                for index in range(given.n)
            ],
            progress,
        )

    def stream_chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        tools: Seq[Message] | None = None,
        tool_choice: str | Message | None = None,
        index: int = 0,
    ) -> ChatStream:
        """Answers a conversation; iterating yields pieces of text as soon as they are certain.

        The arguments are those of `chat` and `stream`.
        """
        use, form = ToolUse.from_openai(tools, tool_choice), self.answer_format
        shown = form.messages(messages, use.described) if use.tools else messages
        ids = self.encode_chat(shown, form.tools(use), self.effort_variables(None))
        return self.stream_answer(self.with_images(ids, images_of(messages)), params, use, index=index)

    def stream_answer(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        use: ToolUse | None = None,
        *,
        reasoning_budget: int = -1,
        reasoning_format: ReasoningFormat = "auto",
        index: int = 0,
    ) -> ChatStream:
        """`stream_chat` for a conversation that is already encoded. `use`: the tools that may be called.

        `params.constraint` applies to the answer's text; the model may reason before it, with at most
        `reasoning_budget` tokens (-1: no limit). With the format "none" the reasoning stays in the text.

        Raises:
            EngineError: as for `stream`; or a tool's schema is not a JSON schema, or the model supports no such budget
                or format.
        """
        self._check_generates()
        form, use, params = self.answer_format, use or ToolUse(), params or SamplingParams()
        ids, images = self._prompt_parts(prompt)
        end = self._chat.end_of(ids)
        if reasoning_format == "none":
            form = form.with_reasoning_in_text()
        spec = form.bounded(form.constraint(use, params.constraint, end), end, reasoning_budget)
        params = replace(params, constraint=spec)
        sequence = self._sequences.make(ids, params, index, show_special=form.shown(use), images=images)
        return ChatStream(self, sequence, partial(form.parser, use, end))

    def logits(self, token_ids: Seq[int] | ImagePrompt, *, decode: bool = False) -> Tensor:
        """Teacher-forced logits [T, vocab] fp32 after each token.

        The cache is emptied. Requests of other threads are first computed to their end.

        Args:
            token_ids: ids, or a prompt with images as `with_images` gives it.
            decode: compute one decode step per token instead of prefill steps; not possible with images.

        Raises:
            EngineError: a stream of this thread is unfinished, or `decode` is set and the prompt has images.
        """
        self._check_generates()
        given, images = self._prompt_parts(token_ids)
        ids = self._sequences.checked(given)
        if decode and images is not None:
            raise EngineError("decode: rows of images are computed in prefill steps")
        with self._alone():
            self.scheduler.reset()
            if decode:
                return self.runner.logits(ids, 0, "decode")
            size = self.loaded.decoder.chunk_size
            ends = [0]
            while ends[-1] < len(ids):
                end = min(ends[-1] + size, len(ids))
                ends.append(end if images is None else images.whole(ends[-1], end))
            chunks = [(ids[start:end], start) for start, end in pairwise(ends)]
            return torch.cat([self.runner.logits(*chunk, "prefill", images).float() for chunk in chunks])

    def score(self, prompt: str | Seq[int], choices: Seq[str]) -> list[ChoiceScore]:
        """The log-probability of each choice as the text after the prompt, in the order of the choices.

        The likeliest is `max(scores, key=lambda score: score.logprob)`. Choices are taken as they are, with the space
        in front of them if there is to be one.

        Raises:
            EngineError: a choice is empty; the prompt and a choice together exceed the context; or no token precedes
                the choices.
        """
        self._check_generates()
        return score_choices(self, prompt, choices)

    def perplexity(
        self,
        text: str,
        ctx: int | None = None,
        *,
        stride: int = 0,
        progress: Callable[[Perplexity], None] | None = None,
    ) -> Perplexity:
        """The perplexity of a text: e to the mean negative log-probability of its tokens.

        Args:
            ctx: tokens per chunk, counted as in llama-perplexity (`quengine.perplexity`). None: every token but the
                first is scored, after all of the text before it or after at least half a context of that text.
            stride: with `ctx`, the distance of overlapping windows in tokens; 0: chunks that do not overlap.
            progress: called after each part of the text.

        Raises:
            EngineError: the text is too short, `ctx` does not fit the model's context, or logits were not finite.
        """
        self._check_generates()
        if ctx is not None:
            return last(self, text_chunks(self, text, ctx, stride), ctx, stride, progress)
        if stride:
            raise EngineError(f"stride {stride}: it goes with ctx")
        return last(self, whole_text(self.encode(text), self.ctx_size), self.ctx_size, 0, progress)

    def embed(
        self, prompts: Prompt | Seq[Prompt], pooling: Pooling | None = None, task: str | None = None
    ) -> list[list[float]]:
        """A unit-length embedding for each prompt: its hidden rows after the last norm, pooled.

        Args:
            prompts: one or several, each a text or token ids. A text ends with the end token if the model's file says
                so.
            pooling: "mean", "cls", "last", or "none" for the rows themselves, concatenated; None: the model's own
                pooling, or the mean.
            task: what the texts are embedded for, if the model has adapters for tasks; texts then begin with the
                prefix that it was trained with.

        Raises:
            EngineError: a prompt does not fit the context, hidden values were not finite, or the model's own pooling is
                not supported.
        """
        pooling = pooling or default_pooling(self.model_config.pooling)
        prefix = task_prefix(tasks_of(self.model_config), task)
        begun = [f"{prefix}{prompt}" if isinstance(prompt, str) else prompt for prompt in as_prompts(prompts)]
        given = [(self._prompt_ids(prompt), isinstance(prompt, str)) for prompt in begun]
        end = self.tokenizer.end_of_text
        texts = [with_end(ids, end) if is_text else ids for ids, is_text in given]
        return self._pooled([self.embedding_sequence(ids, pooling, task) for ids in texts])

    def rank(self, query: str, documents: Seq[str]) -> list[float]:
        """Scores how well each document answers the query, with the ranking head that the model was trained with.

        Scores have no fixed range; higher is better.

        Raises:
            EngineError: the model has no such head, the head has several outputs, or a pair does not fit the context.
        """
        check_ranks(self.model_config)
        if (ranker := self.model_config.ranker) is not None:
            for text in (query, *documents):
                check_text(text, "the prompt")
            pairs = [pair_ids(self.tokenizer, ranker, query, document) for document in documents]
            return [
                scores[0] for scores in self._pooled([self.embedding_sequence(ids, RANK) for ids in pairs])
            ]
        end = self.tokenizer.end_of_text
        first, *others = [with_end(self.encode(text), end) for text in (query, *documents)]
        start = int(self.tokenizer.add_bos)
        first = [*first, *self.tokenizer.pair_gap]
        pairs = [first + other[start:] for other in others]
        return [score for (score,) in self._pooled([self.embedding_sequence(ids, RANK) for ids in pairs])]

    def _check_generates(self) -> None:
        """Raises EngineError where this process is a fork, or the model generates no text."""
        self._lock.check_process()
        if self.model_config.encoder is not None or self.model_config.ranker is not None:
            raise EngineError(no_text(self.model_config))

    def _pooled(self, sequences: list[Sequence]) -> list[list[float]]:
        try:
            for sequence in sequences:
                self.add(sequence)
            while not all(sequence.finished for sequence in sequences):
                self.step()
            self.end_step()
            return [sequence.embedding() for sequence in sequences]
        finally:
            self.dropped.extend(sequences)
            self._cancel_dropped_now()

    def embedding_sequence(
        self,
        ids: list[int],
        pooling: Pooling | Literal["rank"],
        task: str | None = None,
        lora: Mapping[int, float] | None = None,
    ) -> Sequence:
        """Makes a sequence for the scheduler whose prompt is pooled. `lora`: adapter scales, as `SamplingParams.lora`.

        Raises EngineError as `embed` does.
        """
        self._lock.check_process()
        sequence = self._sequences.make(ids, SamplingParams(temperature=0, lora=lora), answers=False)
        sequence.pool = Pool(pooling, task)
        return sequence

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a raw prompt, with the beginning-of-text token if the model uses one.

        Raises:
            EngineError: the text contains half a surrogate pair (the message has its position).
        """
        check_text(text, "the prompt")
        return self.tokenizer.encode(text, bos=self.tokenizer.add_bos, special=special)

    def decode(self, ids: Seq[int], *, special: bool = False) -> str:
        """The text of token ids; with `special`, control tokens are written by name. Bytes that are no UTF-8 become
        U+FFFD.

        Raises:
            EngineError: an id is not in the vocabulary.
        """
        return self.tokenizer.decode(as_ids(ids), skip_special=not special)

    def effort_variables(self, effort: str | None, budget: int = -1) -> dict[str, Any]:
        """The `variables` of `encode_chat` for a reasoning effort; a budget of 0 switches reasoning off.

        Raises:
            EngineError: the template does not support this effort.
        """
        try:
            return self._chat.effort_variables(effort, budget)
        except EngineError as error:
            raise EngineError(f"reasoning effort {error}") from None

    def render_chat(
        self,
        messages: Seq[Message],
        tools: Seq[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continued: bool = False,
    ) -> str:
        """The prompt of a conversation as text, for people to read; `encode_chat` has its tokens and explains the
        other arguments.

        Args:
            continued: the prompt ends within the last message, an answer that is to go on.

        Raises:
            EngineError: the model has no template, or the template fails.
        """
        check_messages(messages)
        return self._chat.render(messages, tools, variables or {}, "continued" if continued else "answer")

    def encode_chat(
        self,
        messages: Seq[Message],
        tools: Seq[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation rendered with the model's chat template, ready for the answer.

        An image among the messages is a marker in the prompt, for `with_images`.

        Args:
            messages: the conversation, as `chat` takes it.
            tools: descriptions of functions as the template reads them (`answer_format.tools`).
            variables: further variables of the template, such as `reasoning_effort`.

        Raises:
            EngineError: the model has no template, or the template fails (the error has the line); or a message of the
                conversation contains half a surrogate pair (the error has its position).
        """
        self._lock.check_process()
        check_messages(messages)
        shown = has_images(messages)
        if shown and self.images is None:
            raise EngineError(why_text_alone(self.loaded.notes))
        marker = self.images.marker if shown and self.images is not None else ""
        return self._chat.encode(flattened(messages) if shown else messages, tools, variables, marker=marker)

    def with_images(self, prompt: str | Seq[int], images: Seq[bytes]) -> Prompt:
        """Replaces the image markers (`LLM.images.marker`) in a prompt by the contents of image files.

        The prompt is text, or ids as `encode_chat` returns them. Images are decoded and encoded here, unless their
        encoding is kept from before.

        Raises:
            EngineError: the model has no projector, a file is no image, or the numbers of markers and images differ.
        """
        if not images:
            return prompt
        self._lock.check_process()
        if self.images is None:
            raise EngineError(why_text_alone(self.loaded.notes))
        ids = self.encode(prompt, special=True) if isinstance(prompt, str) else as_ids(prompt)
        return self.images.make(ids, images)

    def step(self) -> list[tuple[Sequence, str]]:
        """Computes one batch, and returns its sequences, each with its new text; an empty list if there is no batch.

        A sequence that cannot continue fails alone (`Sequence.error`); an exception concerns the whole batch. While
        another thread computes a batch, this waits until that is done and returns an empty list.
        """
        with self._uninterrupted():
            try:
                if not self._lock.acquire_or_wait():
                    return []
                self._cancel_dropped()
                with on_device(self.loaded.device):
                    return self._compute()
            finally:
                self._lock.release()

    def _compute(self) -> list[tuple[Sequence, str]]:
        """Launches the steps that the scheduler plans, and takes the results of the first one in flight."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].cancelled:
            in_flight.popleft()
        while all(step.may_follow for step in in_flight):
            step = self.scheduler.plan(in_flight)
            if step is None:
                break
            streams = len(self.scheduler.decoding)
            try:
                with nullcontext() if self._turns is None else self._turns.step(streams):
                    if self.speculation is not None:
                        self.speculation.propose(step)
                    self.runner.launch(step)
            except BaseException:  # the results of the steps in flight are still to be taken
                self.scheduler.failed(step)
                raise
            in_flight.append(step)
        return self._commit(in_flight.popleft()) if in_flight else []

    def _commit(self, step: StepPlan) -> list[tuple[Sequence, str]]:
        """Takes the results of a step; returns its sequences that were not cancelled, each with its new text."""
        try:
            results = self._results(step)
        except BaseException:
            self.scheduler.failed(step)
            raise
        self.scheduler.commit(step)
        if self.speculation is not None:
            self.speculation.committed(step)
        texts, now = list[tuple[Sequence, str]](), moment()
        for sequence, result in results:
            text = ""
            if isinstance(result, Sample):
                text = sequence.advance(result, now)
            elif isinstance(result, Verified) and self.speculation is not None:
                text = self.speculation.take(sequence, result)
            elif sequence.pooled and not sequence.finished:
                sequence.end_pooled()
            texts.append((sequence, text))
        step.logits = {}  # the scheduler keeps the step, which need not hold the logits of all rows
        self.scheduler.release()
        if logger.isEnabledFor(logging.INFO):
            self._log_ends(step.sequences)
        return texts

    def _results(self, step: StepPlan) -> list[tuple[Sequence, Result]]:
        """Waits for a step; returns its sequences that were not cancelled, each with its result. A sequence whose
        result is an exception fails."""
        results, errors = list[tuple[Sequence, Result]](), list[tuple[Sequence, Exception]]()
        for sequence, slot, given in zip(step.sequences, step.slots, step.results(), strict=True):
            if sequence.slot is not slot:
                continue
            result = self.runner.explain(step, sequence) if given is NO_CHOICE else given
            results.append((sequence, result))
            if isinstance(result, Exception):
                errors.append((sequence, result))
        for sequence, error in errors:
            sequence.fail(error)
        return results

    def _log_ends(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            if sequence.finished:
                t = self.completion(sequence).timings
                logger.info(
                    "request of %d tokens (%d from the cache): %.2f s; %d generated, %.1f tok/s; ended by %s%s",
                    *(t.prompt_tokens, t.cached_tokens, t.prompt_s, t.generated_tokens, t.decode_tok_s),
                    sequence.finish_reason,
                    f"; {t.shifts} context shifts" if t.shifts else "",
                )

    def warm_up(self, params: SamplingParams | None = None) -> None:
        """Captures the steps that the first requests would otherwise wait for: a second or two on a GPU.

        With `params`, only the decode steps of one request with such settings: some hundredths of a second. The cache
        is emptied. Requests of other threads are first computed to their end.

        Raises:
            EngineError: a stream of this thread is unfinished.
        """
        with self._alone():
            self.scheduler.reset()
            resolved = None if params is None else self._sequences.resolved(params)
            self.runner.warm_up(resolved)
            if self.loaded.draft is not None:
                self.loaded.draft.warm_up(resolved)
        if self.images is not None and params is None:
            self.images.warm_up()
        logger.debug("warmed up")

    def warm_up_next(self) -> bool:
        """Captures one more step that rarer requests use, in some hundredths of a second; False if none is left.

        The cache keeps its content. Requests of other threads are first computed to their end.
        """
        with self._alone():
            drafts = self.loaded.draft
            return (drafts is not None and drafts.capture_next()) or self.runner.capture_next()

    def completion(self, sequence: Sequence) -> Completion:
        """The completion of a finished or interrupted sequence. Raises EngineError once the model is closed."""
        self._lock.check_process()
        return sequence.completion(
            load_s=self.loaded.load_s,
            step_bytes=self.loaded.decoder.step_bytes,
            cache_bytes=self.cache_bytes,
            peak=peak_memory(),
            text=self._token_text,
        )

    def _token_text(self, token: int) -> str:
        """The text of a token; "" for an id of the model that its tokenizer lacks."""
        known = token < self.tokenizer.vocab_size
        return self.tokenizer.decode([token], skip_special=False, continuation=True) if known else ""

    def cache_bytes(self, positions: int) -> int:
        """Bytes of the KV cache that the last of `positions` tokens reads, on each device that shares the model."""
        return attended_bytes(self.loaded.decoder.config, positions, self.config.cache_type)

    def close(self) -> None:
        """Waits until no thread computes, then frees the model's memory on every device and ends its processes and
        threads.

        Any later use of the model raises EngineError; finished streams keep their text. A second call does nothing.
        """
        with self._uninterrupted():
            try:
                if not self._lock.close():
                    return
                if self.images is not None:
                    self.images.close()
                self.loaded.close()
                self._release()
            finally:
                self._lock.release()

    def _release(self) -> None:
        """Drops the objects that hold memory, and releases torch's cached CUDA memory for other processes."""
        self._in_flight.clear()
        self.dropped.clear()
        self.loaded = replace(self.loaded, draft=None, vision=None)
        del self.scheduler, self.runner
        self.speculation = self.images = None
        _open_models.discard(self)
        if not _open_models:
            dismiss_threads()
        gc.collect()  # parts of a model refer to each other
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises EngineError if it does not fit into the cache, or in a forked process."""
        with self._uninterrupted():
            try:
                self._lock.acquire()
                self._cancel_dropped()
                self.scheduler.add(sequence)
            finally:
                self._lock.release()

    def end_step(self) -> None:
        """Waits until the current step, if any, is done, including its changes to finished sequences."""
        with self._uninterrupted():
            try:
                self._lock.acquire()
            finally:
                self._lock.release()

    def cancel(self, sequence: Sequence) -> None:
        """Removes a sequence, now or before the next step. Never waits: finalizers call it."""
        self.dropped.append(sequence)
        self._cancel_dropped_now()

    def _cancel_dropped_now(self) -> None:
        """Removes the cancelled sequences, unless a step is being computed. Never waits."""
        with self._uninterrupted():
            if self._lock.try_acquire():
                try:
                    self._cancel_dropped()
                finally:
                    self._lock.release()

    def _cancel_dropped(self) -> None:
        """Removes the cancelled sequences. The caller holds the lock."""
        while self.dropped:
            self.scheduler.cancel(self.dropped.popleft())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A block that holds the lock and begins once no sequence is unfinished.

        Sequences of other threads are first computed to their end. Raises EngineError if an unfinished sequence belongs
        to this thread, or in a forked process.
        """
        me = threading.get_ident()
        try:
            with self._uninterrupted(), on_device(self.loaded.device):
                self._lock.acquire()
                self._cancel_dropped()
                while sequences := self.scheduler.sequences:
                    if any(sequence.thread == me for sequence in sequences):
                        raise EngineError(
                            "the cache is in use: finish or close the streams that are under way first"
                        )
                    self._compute()
                    self._lock.step_done()
                    self._cancel_dropped()
            with on_device(self.loaded.device):
                yield
        finally:
            with self._uninterrupted():
                self._lock.release()

    def _uninterrupted(self) -> DeferredInterrupt:
        """A block that holds the lock or changes the scheduler: Ctrl-C takes effect at its end, after one step at most.

        A step may wait for other ranks: with ranks a second Ctrl-C takes effect at once.
        """
        return DeferredInterrupt(second_at_once=self.config.ranks > 1)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt that is embedded. Raises EngineError if it has images."""
        ids, images = self._prompt_parts(prompt)
        if images is not None:
            raise EngineError("embeddings are those of text: the prompt has images")
        return ids

    def _prompt_parts(self, prompt: Prompt) -> tuple[list[int], PromptImages | None]:
        if isinstance(prompt, ImagePrompt):
            return list(prompt.ids), prompt.images  # a sequence appends to them
        return self.encode(prompt) if isinstance(prompt, str) else as_ids(prompt), None

    def _make_scheduler(self) -> Scheduler:
        config, kind = self.config, self.loaded.device.type
        packed = self.runner.packs_prompts
        # A step of several prompts may have more rows than the context of any one of them.
        chunk_size = config.chunk_size or DEFAULT_CHUNK[kind] if packed else self.loaded.decoder.chunk_size
        decoder = self.runner.device_decoder
        return Scheduler(
            self.loaded.cache,
            config.parallel,
            chunk_size,
            mixed_chunk=MIXED_CHUNK[kind],
            mixed_seconds=MIXED_SECONDS[kind],
            deterministic=config.deterministic,
            packed=packed,
            shares=config.reuse_prefix or config.parallel > 1,
            backlog_chunk=BACKLOG_CHUNK[kind],
            copy_blocks=self.runner.copy_blocks,
            ahead=0 if decoder is None else PENDING,
            most_ahead=None if decoder is None else decoder.most_rows,
        )
