"""The public API: a model that turns prompts into text.

`step` is the engine's whole story; everything else prepares for it or reads what it made.
"""

import math
from collections.abc import Callable, Collection, Generator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from quengine.config import DEFAULT_CHUNK, MIXED_CHUNK, MIXED_SECONDS, EngineConfig
from quengine.constraint import ConstraintCompiler
from quengine.draft_pace import draft_rows, draft_tokens
from quengine.errors import EngineError
from quengine.kernels.cache_types import CacheType
from quengine.load import load_model
from quengine.machine import peak_memory
from quengine.models.chat_template import encode_chat
from quengine.output import Completion
from quengine.paged_scheduler import PagedScheduler
from quengine.pooling import Pool, Pooling
from quengine.runner import Result, Verified
from quengine.sampler import Sample, Sampler
from quengine.sampling_params import SamplingParams
from quengine.scheduler import Scheduler
from quengine.sequence import Sequence
from quengine.speculation import Speculation
from quengine.text_stream import TextStream

Prompt = str | Seq[int]
Message = Mapping[str, Any]


class LLM:
    """A loaded model.

    Args:
        model: an alias, `hf:user/repo:QUANT`, a GGUF file or a Hugging Face checkpoint folder.
        device: "auto", "cpu", "cuda" or "cuda:N".
        ctx_size: positions of the cache; None: the model's own, cut to what fits.
        threads: CPU threads; None: the physical cores.
        backend: "auto", or "reference" for the float64 definition.
        chunk_size: the most prompt tokens computed at once; None: what suits the device.
        reuse_prefix: compute only what differs from the previous request (conversations).
        cache_type: how keys and values are stored, "f16" or "q8_0".
        deterministic: the same logits to the last bit for every chunk size and batch, without `reuse_prefix`.
        parallel: most sequences computed at once. Each may take `ctx_size` positions, from blocks that all share; equal
            beginnings are computed once, whatever `reuse_prefix` says.
        draft_model: a small model with the same vocabulary, which drafts tokens that this one checks several of in a
            step. The text stays the same (docs/speculative.md).
        draft_ngram: look runs of up to so many tokens up in the text itself, for what followed them, as drafts; 0: not.
        draft_tokens: tokens of a draft at most; None: what suits the device.
        mmap: on the CPU, compute with the pages of the mapped file; else with a copy in huge pages.
        progress: called with a line of text as weights are loaded onto a GPU, or copied.

    Raises:
        EngineError: an argument or the model is wrong.
        CannotRunError: this machine has no such device or too little memory.
    """

    def __init__(
        self,
        model: str | Path,
        device: str = "auto",
        ctx_size: int | None = None,
        threads: int | None = None,
        backend: str = "auto",
        *,
        chunk_size: int | None = None,
        reuse_prefix: bool = False,
        cache_type: CacheType = "f16",
        deterministic: bool = False,
        parallel: int = 1,
        draft_model: str | Path | None = None,
        draft_ngram: int = 0,
        draft_tokens: int | None = None,
        mmap: bool = True,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.config = EngineConfig(
            device,
            ctx_size,
            threads,
            backend,
            chunk_size,
            reuse_prefix,
            cache_type,
            deterministic,
            parallel,
            draft_model,
            draft_ngram,
            draft_tokens,
            mmap,
        )
        self.loaded = load_model(model, self.config, progress)
        self.tokenizer = self.loaded.checkpoint.tokenizer()
        self.constraints = ConstraintCompiler(self.tokenizer, self.loaded.checkpoint.config.vocab_size)
        self.chat_template = self.loaded.checkpoint.chat_template()
        self.model_config = self.loaded.checkpoint.config
        self.ctx_size = self.loaded.cache.ctx_size
        self.runner = self.loaded.runner
        self.scheduler = self._make_scheduler()
        self.speculation = self._make_speculation()

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete each prompt (text, or token ids), `params.n` times each, in order, `parallel` at a time.

        Text is taken as it is: no chat template, and nothing in it becomes a control token.

        Raises:
            EngineError: a prompt does not fit the context (with both numbers), or logits were not finite.
        """
        params = (params or SamplingParams()).with_seed()
        streams = [
            self.stream(prompt, params, index=index)
            for prompt in _as_prompts(prompts)
            for index in range(params.n)
        ]
        try:
            for stream in streams:
                stream.start()
            return [stream.finish() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        index: int = 0,
        show_special: bool | Collection[int] = False,
    ) -> "CompletionStream":
        """Complete one prompt; iterating yields pieces of text as they become certain.

        `index` tells apart several completions of one prompt under one seed. `show_special` keeps the names of
        control tokens in the text: of all, or of those given (`tool_calls.ToolFormat.marker_ids`).

        Raises:
            EngineError: the prompt does not fit the context, or `params.constraint` cannot be compiled.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return CompletionStream(self, self._sequence(ids, params or SamplingParams(), index, show_special))

    def chat(self, messages: Seq[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation, a list of {"role", "content"}, through the model's own template."""
        return self.stream_chat(messages, params).finish()

    def stream_chat(self, messages: Seq[Message], params: SamplingParams | None = None) -> "CompletionStream":
        """Answer a conversation; iterating yields pieces of text as they become certain."""
        return self.stream(self.encode_chat(messages), params)

    def logits(self, token_ids: Seq[int], *, decode: bool = False) -> Tensor:
        """Teacher-forced logits [T, vocab] fp32 after each token; `decode` computes them one token at a time.

        What the cache holds is forgotten.

        Raises:
            EngineError: a stream is under way.
        """
        ids = self._checked(list(token_ids))
        self.scheduler.forget()
        return self.runner.teacher_forced(ids, 1 if decode else self.loaded.decoder.chunk_size).float()

    def embed(self, prompts: Prompt | Seq[Prompt], pooling: Pooling = "mean") -> list[list[float]]:
        """A vector of unit length for each prompt (text, or token ids): its hidden rows behind the last norm, pooled.

        Raises:
            EngineError: a prompt does not fit the context, or hidden values were not finite.
        """
        sequences = [
            self.embedding_sequence(self.encode(prompt) if isinstance(prompt, str) else list(prompt), pooling)
            for prompt in _as_prompts(prompts)
        ]
        try:
            for sequence in sequences:
                self.scheduler.add(sequence)
            while not all(sequence.finished for sequence in sequences):
                self.step()
            return [_embedding(sequence) for sequence in sequences]
        finally:
            for sequence in sequences:
                self.scheduler.cancel(sequence)

    def embedding_sequence(self, ids: list[int], pooling: Pooling) -> Sequence:
        """A sequence whose prompt is pooled, to be given to the scheduler. Raises EngineError as `embed` does."""
        sequence = self._sequence(ids, SamplingParams(temperature=0), 0, False)
        sequence.pool = Pool(pooling)
        return sequence

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a raw prompt, with the beginning-of-text token where the model wants one."""
        return self.tokenizer.encode(text, bos=self.tokenizer.add_bos, special=special)

    def encode_chat(self, messages: Seq[Message], tools: Seq[Any] | None = None) -> list[int]:
        """Ids of a conversation rendered through the model's template, ready for the answer.

        `tools` are descriptions of functions as the template reads them (`tool_calls.Tool.described`).

        Raises:
            EngineError: the model has no template, or the template fails (with its line).
        """
        if self.chat_template is None:
            raise EngineError(f"{self.loaded.path.name} has no chat template; use a raw prompt (--raw)")
        return encode_chat(self.tokenizer, self.chat_template, messages, tools=tools)

    def step(self) -> list[tuple[Sequence, str]]:
        """Compute one batch; returns its sequences and the text it made visible of each, nothing when none waits.

        A sequence that cannot go on fails alone (`Sequence.error`); what is raised concerns the whole batch.
        """
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        if self.speculation is not None:
            self.speculation.prepare(batch)
        results = self.runner.run(batch)
        for sequence, result in zip(batch.sequences, results, strict=True):
            if isinstance(result, Exception):
                sequence.fail(result)
        self.scheduler.computed()
        for sequence in batch.sequences:
            if sequence.pooled and not sequence.finished:
                sequence.end_pooled()
        texts = [
            (sequence, self._take(sequence, result))
            for sequence, result in zip(batch.sequences, results, strict=True)
        ]
        self.scheduler.release()
        return texts

    def _take(self, sequence: Sequence, result: Result) -> str:
        if isinstance(result, Sample):
            return sequence.advance(result)
        if isinstance(result, Verified) and self.speculation is not None:
            return self.speculation.take(sequence, result)
        return ""

    def warm_up(self) -> None:
        """Do ahead what the first requests would otherwise wait for: a second or two on a GPU.

        What the cache holds is forgotten. Raises EngineError where a stream is under way.
        """
        self.scheduler.forget()
        self.runner.warm_up()

    def completion(self, sequence: Sequence) -> Completion:
        """What a finished or interrupted sequence has come to."""
        return sequence.completion(
            load_s=self.loaded.load_s,
            weight_bytes=self.loaded.decoder.bytes_per_token,
            cache_bytes_per_position=self.cache_bytes(1),
            peak=peak_memory(),
        )

    def cache_bytes(self, positions: int) -> int:
        """What keys and values of so many positions take, as this model's cache stores them."""
        return self.model_config.kv_cache_bytes(positions, self.config.cache_type)

    def close(self) -> None:
        """Let the mapped file go. The model cannot be used afterwards."""
        self.loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_scheduler(self) -> Scheduler | PagedScheduler:
        config, cache, chunk_size = self.config, self.loaded.cache, self.loaded.decoder.chunk_size
        if cache.num_blocks:
            kind = self.loaded.device.type
            mixed = MIXED_CHUNK[kind], MIXED_SECONDS[kind]
            packed = self.runner.packs_prompts
            if packed:  # a step of several prompts may be longer than the context of each
                chunk_size = config.chunk_size or DEFAULT_CHUNK[kind]
            return PagedScheduler(cache, config.parallel, chunk_size, *mixed, config.deterministic, packed)
        # A kept answer was computed token by token, and a prompt that holds it would not be.
        return Scheduler(cache, chunk_size, config.reuse_prefix and not config.deterministic)

    def _make_speculation(self) -> Speculation | None:
        config, kind = self.config, self.loaded.device.type
        if not config.speculates:
            return None
        assert isinstance(self.scheduler, PagedScheduler)
        most, rows = draft_tokens(config, kind), draft_rows(config, kind)
        return Speculation(self.scheduler, config.draft_ngram, self.loaded.draft, most, rows)

    def _sequence(
        self, ids: list[int], params: SamplingParams, index: int, show_special: bool | Collection[int]
    ) -> Sequence:
        ids = self._checked(ids)
        params = params.with_seed()
        if params.ignore_eos:
            banned = dict.fromkeys(self.tokenizer.eos_ids, -math.inf)
            params = replace(params, logit_bias={**params.logit_bias, **banned})
        spec = params.constraint
        constraint = None if spec is None else self.constraints.compile(spec, params.stop_token_ids)
        sampler = Sampler(params, self.model_config.vocab_size, index, constraint, self.runner.choose)
        end_ids = self.tokenizer.eos_ids | set(params.stop_token_ids)
        stream = TextStream(self._shown_bytes(show_special), params.stop)
        return Sequence(ids, params, sampler, stream, end_ids, self.ctx_size)

    def _shown_bytes(self, special: bool | Collection[int]) -> Callable[[int], bytes]:
        tokenizer = self.tokenizer
        if special is True:
            return tokenizer.token_bytes
        shown = special or ()
        return lambda token: (
            b"" if tokenizer.is_control(token) and token not in shown else tokenizer.token_bytes(token)
        )

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise EngineError("the prompt is empty: it has no tokens, and this model adds none of its own")
        if len(ids) > self.ctx_size - 1:
            raise EngineError(
                f"the prompt has {len(ids)} tokens and the context holds {self.ctx_size}, of which one is for the "
                f"answer; shorten the prompt or raise -c (this model: up to {self.model_config.context_length})"
            )
        vocab = self.model_config.vocab_size
        for position, token in enumerate(ids):
            if not 0 <= token < vocab:
                raise EngineError(
                    f"token id {token} at position {position} is not in the vocabulary of {vocab}"
                )
        return ids


class CompletionStream:
    """One request being computed: iterate for its text, then read `completion`.

    Leaving the iteration early (an error, Ctrl-C, `close`) cancels the request; `completion` then holds what was
    generated, with finish_reason "abort".
    """

    def __init__(self, llm: LLM, sequence: Sequence) -> None:
        self._llm = llm
        self.sequence = sequence
        self._started = False
        self._pieces = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def completion(self) -> Completion:
        return self._llm.completion(self.sequence)

    def start(self) -> None:
        """Queue the request now; else the first piece that is asked for does. Then it must be finished or closed.

        Raises:
            EngineError: the request does not fit into the cache.
        """
        if not self._started:
            self._started = True
            self._llm.scheduler.add(self.sequence)

    def finish(self) -> Completion:
        """Compute to the end."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        self._pieces.close()
        self._llm.scheduler.cancel(self.sequence)

    def _run(self) -> Generator[str, None, None]:
        self.start()
        try:
            while not self.sequence.finished:
                # Other streams' sequences may advance as well, and this one may have in their steps.
                self._llm.step()
                if text := self.sequence.stream.read():
                    yield text
            if text := self.sequence.stream.read():
                yield text
            if self.sequence.error is not None:
                raise self.sequence.error
        finally:
            self._llm.scheduler.cancel(self.sequence)


def _embedding(sequence: Sequence) -> list[float]:
    if sequence.error is not None:
        raise sequence.error
    assert sequence.pool is not None
    return sequence.pool.embedding()


def _as_prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
