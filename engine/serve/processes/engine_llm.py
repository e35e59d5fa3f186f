"""An LLM as the server's `Engine`. It computes as many sequences at once as it was loaded for."""

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import torch

from quengine.errors import EngineError
from quengine.llm import LLM
from quengine.request.prompt import Prompt
from quengine.request.prompt_images import ImagePrompt
from quengine.request.prompt_scores import PromptScores
from quengine.request.sequence import Sequence as LLMSequence
from quengine.sampler import TokenLogprobs
from quengine.serve.processes.engine_handover import BlockReceiver, BlockSender, SharedBlocks
from quengine.serve.processes.engine_slots import EngineSlots
from quengine.serve.processes.shared_engine import (
    EngineStats,
    EngineWork,
    Event,
    Finished,
    GenerationRequest,
    Piece,
    Prefill,
    PromptProgress,
    PromptTooLongError,
    SlotAction,
    SlotStats,
    TakeBlocks,
    failed,
)
from quengine.serve.processes.shared_model import ServedModel, TextSide
from quengine.structured.constraint import ConstraintError

logger = logging.getLogger("quengine.serve")


KEPT_WITHIN, KEPT_WITHIN_IDLE = 60.0, 2.0
"""Seconds after which uses of experts are kept again, and at the end of the last request: it takes a millisecond or
two."""


@dataclass(slots=True)
class _Sent:
    """How many tokens of a request have been reported."""

    request_id: int
    tokens: int = 0


class LLMEngine:
    """See the module docstring.

    regions: descriptors of the memory through which blocks of prompts arrive; if `sends`, the descriptor of the memory
    through which this engine hands them over.
    """

    def __init__(self, llm: LLM, regions: Seq[int] = (), sends: bool = False) -> None:
        self._llm = llm
        if llm.adapters and (regions or sends):
            raise EngineError(
                "lora: adapters where engines compute prompts for others (--prefill-replicas) are not implemented"
            )
        shared = [SharedBlocks(llm, descriptor) for descriptor in regions]
        self._sender = BlockSender(llm, shared[0]) if sends else None
        self._receiver = BlockReceiver(llm, shared)
        loaded = llm.loaded
        self.model = ServedModel(
            TextSide(
                loaded.checkpoint,
                llm.tokenizer,
                llm.chat_template,
                llm.constraints,
                llm.config.chat_template,
            ),
            llm.ctx_size,
            loaded.notes,
            str(loaded.device),
            llm.config.cache_type,
            loaded.nbytes,
            "" if llm.images is None else llm.images.marker,
            str(loaded.projector or ""),
            loaded.adapters,
        )
        self.capacity = llm.config.parallel
        self._requests: dict[int, LLMSequence] = {}
        self._sent: dict[LLMSequence, _Sent] = {}
        self._slots = EngineSlots(llm)
        self._prompts: dict[int, Prompt] = {}  # those with images, from when these are encoded
        self._progress: dict[int, int] = {}  # tokens processed of prompts whose progress is reported
        self._kept_at = time.monotonic()

    silent_seconds = 0.0

    def add(self, request: EngineWork) -> None:
        if isinstance(request, SlotAction):
            self._slots.begin(request)
            return
        if isinstance(request, TakeBlocks):
            self._receiver.take(request)
            return
        if isinstance(request, Prefill):
            assert self._sender is not None
            self._start(request.id, self._sender.sequence(request))
            return
        if request.pooling is not None:
            ids, lora = list(request.prompt), request.params.lora
            sequence = self._llm.embedding_sequence(ids, request.pooling, request.task, lora)
        else:
            if request.images and request.id not in self._prompts:
                self.prepare_images(request)
            prompt = self._prompts.pop(request.id, request.prompt)
            sequence = self._llm.stream(
                prompt, request.params, index=request.index, show_special=request.show_special
            ).sequence
        sequence.arrived = request.arrived
        if request.score_prompt and request.params.logprobs is not None:
            sequence.scores = PromptScores(request.prompt, request.params.logprobs)
        self._start(request.id, sequence, request.slot)
        if request.progress:
            self._progress[request.id] = -1

    def prepare_images(self, request: GenerationRequest) -> None:
        """Encodes the images of a request before it is added. May run in any thread, beside steps.

        Raises:
            PromptTooLongError: the prompt has more than `most_tokens` tokens with its images.
            EngineError: an image cannot be read, or the request wants log-probabilities or an embedding of the prompt.
        """
        if request.score_prompt or request.pooling is not None:
            raise EngineError("a prompt with images has no log-probabilities and no embedding")
        prompt = self._llm.with_images(request.prompt, request.images)
        tokens = len(prompt.ids) if isinstance(prompt, ImagePrompt) else len(request.prompt)
        if request.most_tokens and tokens > request.most_tokens:
            raise PromptTooLongError(tokens, request.most_tokens)
        self._prompts[request.id] = prompt

    def _start(self, request_id: int, sequence: LLMSequence, slot: int = -1) -> None:
        self._llm.scheduler.add(sequence)
        self._requests[request_id] = sequence
        self._sent[sequence] = _Sent(request_id)
        self._slots.begun(sequence, slot)

    def cancel(self, request_id: int) -> None:
        self._progress.pop(request_id, None)
        self._prompts.pop(request_id, None)
        if self._sender is not None:
            self._sender.cancel(request_id)
        if request_id in self._requests:  # false for an action on a slot
            self._llm.scheduler.cancel(self._requests[request_id])
            self._ended(request_id)

    def _ended(self, request_id: int) -> None:
        sequence = self._requests.pop(request_id)
        del self._sent[sequence]
        self._slots.ended(sequence)

    def step(self) -> list[Event]:
        alone = not self._requests
        events = self._slots.finished(alone) + self._receiver.events(alone) + self._step()
        self._keep_uses()
        return events if self._sender is None else self._sender.after_step(events)

    def _keep_uses(self) -> None:
        """Keeps uses of experts now and then, since the process ends with the server, without `close`."""
        now = time.monotonic()
        if now - self._kept_at >= (KEPT_WITHIN if self._requests else KEPT_WITHIN_IDLE):
            self._kept_at = now
            self._llm.loaded.keep_uses()

    def _step(self) -> list[Event]:
        try:
            advanced = self._llm.step()
        except Exception as error:
            return self._step_failed(error)
        events, sent_of = list[Event](), self._sent
        for sequence, text in advanced:
            sent, generated = sent_of[sequence], sequence.generated
            start, sent.tokens = sent.tokens, len(generated)
            # Nearly always this is all. In steps of many sequences each line here costs host time.
            if start and sent.tokens == start + 1 and sequence.plain and not sequence.finish_reason:
                events.append(Piece(sent.request_id, (generated[start],), text))
            else:
                events += self._events(sent.request_id, sequence, start, text)
        return events

    def _events(self, request_id: int, sequence: LLMSequence, start: int, text: str) -> list[Event]:
        """The events of a step for one sequence, whose generated tokens from `start` on are new."""
        if sequence.error is not None:
            self._check_device()
            self._progress.pop(request_id, None)
            self._ended(request_id)
            fault: Literal["request", "engine"]
            fault = "request" if isinstance(sequence.error, ConstraintError) else "engine"
            return [failed(request_id, sequence.error, fault)]
        scores: tuple[TokenLogprobs, ...] = ()
        if sequence.scores is not None and not start and sequence.first_token:  # once, with the first token
            scores = tuple(sequence.scores.logprobs)
        events: list[Event] = []
        tokens = tuple(sequence.generated[start:])
        progress = self._progressed(request_id, sequence) if request_id in self._progress else ()
        if tokens or text or scores or progress:
            logprobs = tuple(sequence.logprobs[start:]) if sequence.logprobs else ()
            events.append(Piece(request_id, tokens, text, logprobs, scores, progress))
        if sequence.finish_reason is not None:
            self._ended(request_id)
            timings = self._llm.completion(sequence).timings
            stop_text, seed = sequence.stream.stopped, sequence.sampler.seed
            embedding = None if sequence.pool is None else tuple(sequence.pool.embedding())
            events.append(Finished(request_id, sequence.finish_reason, stop_text, timings, seed, embedding))
        return events

    def _progressed(self, request_id: int, sequence: LLMSequence) -> tuple[PromptProgress, ...]:
        """The unreported progress of a prompt: first the tokens from the cache, in the end all tokens."""
        total, cached = sequence.num_prompt_tokens, sequence.reused_tokens
        done = total if sequence.first_token else min(sequence.num_cached_tokens, total)
        took = 1e3 * (time.perf_counter() - sequence.started)
        reported = self._progress[request_id]
        new = [each for each in sorted({cached, done}) if each > reported]  # a prompt may begin again
        if done == total:
            del self._progress[request_id]
        elif new:
            self._progress[request_id] = new[-1]
        return tuple(PromptProgress(total, cached, each, took if each > cached else 0.0) for each in new)

    def prepare_next(self) -> bool:
        """Prepares one more step that later requests may need; False where none is left. For idle times."""
        return self._llm.warm_up_next()

    def stats(self) -> EngineStats:
        slots = tuple(
            SlotStats(i, s.num_prompt_tokens, s.num_cached_tokens, len(s.generated))
            for i, s in self._requests.items()
        )
        scheduler = self._llm.scheduler
        checkpoints = scheduler.blocks.checkpoints if scheduler.blocks.has_states else None
        images = None if self._llm.images is None else self._llm.images.counts
        placed = self._llm.runner.decoder.host_experts
        return EngineStats(
            *(slots, scheduler.cache_used, scheduler.cache_size),
            checkpoints=checkpoints,
            images=images,
            experts=None if placed is None else placed.counts,
        )

    def kill(self) -> None:
        """Does nothing, since the engine runs in this process."""

    def close(self) -> None:
        self._slots.close()
        self._llm.close()

    def _step_failed(self, error: Exception) -> list[Event]:
        """Fails the sequence whose step failed. If there are several, each is computed alone to find out which it is.

        Raises `error` again where no step can work any more.
        """
        scheduler = self._llm.scheduler
        batch = scheduler.current
        if batch is None:
            raise error
        self._check_device()
        if len(batch.sequences) > 1:
            logger.warning("a step of %d sequences failed; each is tried alone", len(batch.sequences))
            scheduler.retry_alone()
            return []
        (sequence,) = batch.sequences
        sequence.fail(error)
        scheduler.release()
        (request_id,) = (number for number, each in self._requests.items() if each is sequence)
        return self._events(request_id, sequence, 0, "")

    def _check_device(self) -> None:
        """Raises where the device has failed, or one of the ranks that share the model."""
        if self._llm.loaded.ranks is not None:
            self._llm.loaded.ranks.check()
        if self._llm.loaded.device.type == "cuda":
            torch.cuda.synchronize(self._llm.loaded.device)
