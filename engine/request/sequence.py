"""One request on its way from prompt to text: its tokens, what is cached of them, and when it ends."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quengine.context.context_shift import ContextShift
from quengine.kernels import compile_clock
from quengine.kernels.compile_clock import Moment
from quengine.platform.ranges import ProfilerRange
from quengine.request.adapter_scales import Scales, keyed
from quengine.request.output import Completion, Timings, with_texts
from quengine.request.pooling import Pool
from quengine.request.prompt_images import PromptImages
from quengine.request.prompt_scores import PromptScores
from quengine.request.sampling_params import SamplingParams
from quengine.request.text_stream import TextStream
from quengine.sampler import NO_CHOICE, Result, Sample, Sampler, TokenLogprobs
from quengine.slot import Slot

if TYPE_CHECKING:
    from torch import Tensor


_NEVER = Moment(0.0, 0.0)


class BegunCheckpoint(NamedTuple):
    """One block per cache group, to which a step writes the states of a sequence after its first `end` tokens."""

    end: int
    blocks: list[int]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """A prompt and what has been generated after it. The sequence decides itself when it is finished.

    Attributes:
        token_ids: prompt and generated ids; the first `num_cached_tokens` of them are in the cache.
        end_ids: tokens that end the text and are not part of it. A constraint that allows no further token ends it too;
            the sampler holds the constraint, and `advance` advances it.
        slot: its place in a device's tables while it is running.
        block_tables: for each cache group the list of its blocks. A list only grows; blocks that the group's window has
            passed become the padding block. A preemption ends in new lists.
        block_keys: identify the contents of its full blocks (block_manager.extend_keys).
        opening: number of tokens of a chat's first message, which other chats may begin with as well; 0: not known.
        checkpoints_at: the numbers of first tokens after which the states, if the model keeps any, are copied.
        checkpoints_begun: the checkpoints that its next chunk, or its newest one in flight, writes before its end.
        state_copy_at: number of first tokens after which its own copy of its states was made; 0: there is no copy.
        replay: number of newest cached tokens that its states do not include; the next step computes them again.
        error: why the sequence could not go on.
        thread: the one that made the sequence.
        end_tokens: 1 once a token of `end_ids` has ended it, which counts as generated.
        pool: pools the hidden rows of the prompt; such a sequence ends with its prompt.
        scores: collects the log-probabilities of the prompt's tokens, where they are wanted.
        draft: tokens that may follow the newest one, to be computed with it in the next step.
        drafts_by_length: number of its steps for each length of a draft, in tokens.
        accepted_tokens: drafted tokens that the sequence accepted.
        draft_bytes: bytes read for drafts.
        shift: what it discards when its context is full; None: a full context ends it.
        shifts, discarded_tokens: number of context shifts, and of the tokens that they discarded.
        discarded_late: sum, over the discarded tokens, of the tokens generated before each was discarded.
        compiled: `compile_clock` at its start and at its first token.
        last: when its last token came.
        images: the prompt's images, whose rows are given as embeddings; None: there are none.
        adapters: the scales of the model's LoRA adapters for its rows; None: it has none.
        num_prefill_tokens: tokens that were not generated token by token: the prompt, or what the last shift has left.
        plain: only a token of `end_ids`, `max_tokens` or a full context ends it, and no log-probabilities are wanted.
    """

    token_ids: list[int]
    params: SamplingParams
    sampler: Sampler
    stream: TextStream
    end_ids: frozenset[int]
    ctx_size: int
    num_cached_tokens: int = 0
    reused_tokens: int = 0
    slot: Slot = field(default_factory=Slot)
    block_tables: tuple[list[int], ...] = ()
    block_keys: list[bytes] = field(default_factory=list)
    opening: int = 0
    checkpoints_at: list[int] = field(default_factory=list)
    checkpoints_begun: list[BegunCheckpoint] = field(default_factory=list)
    state_copy_at: int = 0
    replay: int = 0
    finish_reason: str | None = None
    error: Exception | None = None
    generated: list[int] = field(default_factory=list)
    end_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    last: Moment = _NEVER
    compiled: list[float] = field(default_factory=lambda: [0.0] * 2)
    pool: Pool | None = None
    scores: PromptScores | None = None
    draft: Seq[int] = ()
    drafts_by_length: Counter[int] = field(default_factory=Counter)
    accepted_tokens: int = 0
    draft_bytes: int = 0
    shift: ContextShift | None = None
    shifts: int = 0
    discarded_tokens: int = 0
    discarded_late: int = 0
    images: PromptImages | None = None
    adapters: Scales | None = None
    num_prompt_tokens: int = field(init=False)
    num_prefill_tokens: int = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prefill_tokens = len(self.token_ids)
        limited = self.sampler.constraint is not None or self.params.t_max_predict_ms > 0
        self.plain = self.stream.is_plain and not limited and self.params.logprobs is None

    @property
    def key_ids(self) -> list[int]:
        """What identifies the contents of its blocks: its tokens, but for the rows of images, and its adapters."""
        ids = self.token_ids if self.images is None else self.images.keyed(self.token_ids)
        return keyed(ids, self.adapters)

    @property
    def max_positions(self) -> int:
        """Positions of the cache that it may come to need, with its newest token."""
        if self.params.max_tokens is None and self.pool is None:
            return self.ctx_size
        most = 0 if self.pool is not None else max(1, self.params.max_tokens or 0)
        return min(self.ctx_size, self.num_prompt_tokens + most)

    @property
    def next_is_newest(self) -> bool:
        """Whether the first token that is not in the cache is the newest one, so that its logits give another."""
        return self.num_cached_tokens + 1 == len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def context_full(self) -> bool:
        """Whether there is no position for a further token."""
        return len(self.token_ids) >= self.ctx_size

    @property
    def pooled(self) -> bool:
        """Whether the prompt is to be pooled, and all its rows have been."""
        return self.pool is not None and self.num_cached_tokens == self.num_prompt_tokens

    def start(self) -> None:
        """Notes that its first step is about to run."""
        self.started = time.perf_counter()
        self.compiled = [compile_clock.seconds()] * 2
        self.last = Moment(0.0, self.compiled[0])

    def end_pooled(self) -> None:
        """Ends a pooled sequence after its prompt."""
        self.last = compile_clock.moment()
        self.first_token, self.compiled[1] = self.last
        self.finish_reason = "stop"

    def embedding(self) -> list[float]:
        """The vector of a pooled prompt that has ended. Raises what the sequence failed with."""
        if self.error is not None:
            raise self.error
        assert self.pool is not None
        return self.pool.embedding()

    def sampled_after(self, row: int, logits: "Mapping[int, Tensor]", tokens: Seq[int]) -> Result:
        """The result of row `row` of a step: the token after it, or why there is none.

        If the row has `logits` [vocab_size], the host samples from them; otherwise the device has sampled
        `tokens[row]`.
        """
        if row not in logits:
            return Sample(tokens[row]) if tokens[row] >= 0 else NO_CHOICE
        try:
            with ProfilerRange("sample"):
                return self.sampler.sample(logits[row], self.token_ids, len(self.token_ids))
        except Exception as error:
            return error

    def advance(self, sample: Sample, moment: Moment | None = None) -> str:
        """Takes the chosen token; returns the text that it makes visible, and sets finish_reason at the end.

        moment: when it came; None: now. In a step of many sequences every line here costs the host time.
        """
        self.last = moment = moment or compile_clock.moment()
        if not self.first_token:
            self.first_token, self.compiled[1] = moment
        most = self.params.max_tokens
        if most == 0:  # the prompt's logits give a token all the same
            return self._finish("length")
        ids, generated, (token, logprobs) = self.token_ids, self.generated, sample
        if token in self.end_ids:
            self.end_tokens = 1
            return self._finish("stop")
        ids.append(token)
        generated.append(token)
        text = self.stream.push(token)
        if self.plain and len(generated) != most and len(ids) < self.ctx_size:
            return text
        if logprobs is not None:
            self.logprobs.append(logprobs)
        return self._ended(token, text)

    def _ended(self, token: int, text: str) -> str:
        """Ends the sequence if its newest token, `token`, is its last. Returns `text`, at the end followed by the text
        that was held back."""
        most, stream = self.params.max_tokens, self.stream
        constraint = self.sampler.constraint
        if constraint is not None:
            constraint.advance(token)
        if stream.stopped is not None:
            self.finish_reason = "stop"
        elif constraint is not None and constraint.finished:
            text += self._finish("stop")
        elif (
            len(self.generated) == most
            or (self.context_full and not self._discarded)
            or stream.dedented
            or ("\n" in text and self._late)
        ):
            text += self._finish("length")
        return text

    @property
    def _late(self) -> bool:
        """Whether `t_max_predict_ms` have passed: the text then ends with its line."""
        allowed = self.params.t_max_predict_ms
        return allowed > 0 and 1e3 * (self.last.now - self.first_token) > allowed

    @property
    def _discarded(self) -> range:
        return range(0) if self.shift is None else self.shift.discarded(len(self.token_ids))

    def shift_context(self) -> None:
        """Discard tokens of a full context. The remaining ones have to be computed again.

        The sampler changes to another stream of random numbers, since positions occur a second time.
        """
        gone = self._discarded
        self.token_ids = self.token_ids[: gone.start] + self.token_ids[gone.stop :]
        if self.images is not None:
            self.images = self.images.without(gone)
        self.num_prefill_tokens = len(self.token_ids)
        self.num_cached_tokens = 0
        self.block_keys = []
        self.sampler.change_stream()
        self.shifts += 1
        self.discarded_tokens += len(gone)
        self.discarded_late += len(gone) * len(self.generated)

    def fail(self, error: Exception) -> None:
        """End here, without a further token."""
        self.error = error
        self.finish_reason = "error"

    def _finish(self, reason: str) -> str:
        self.finish_reason = reason
        return self.stream.finish()

    def completion(
        self,
        load_s: float,
        step_bytes: Callable[[int], int],
        cache_bytes: Callable[[int], int],
        peak: int,
        text: Callable[[int], str],
    ) -> Completion:
        """The finished (or interrupted) request. Sizes are in bytes and only reported, never decided on.

        step_bytes(n): of the weights that a step of n rows reads. cache_bytes(n): of the cache that the last of n
        tokens reads. text: the text of a token.
        """
        scores, params = self.scores, self.params
        count = len(self.generated) + self.end_tokens
        (compiled_before, compiled_prompt), compiled = self.compiled, self.last.compiled
        timings = Timings(
            load_s=load_s,
            compile_s=max(0.0, compiled - compiled_before),
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.reused_tokens,
            prompt_s=max(0.0, self.first_token - self.started - (compiled_prompt - compiled_before)),
            ttft_s=max(0.0, self.first_token - self.arrived),
            generated_tokens=count,
            end_tokens=self.end_tokens,
            decode_s=max(0.0, self.last.now - self.first_token - (compiled - compiled_prompt)),
            bytes_per_token=self._weight_bytes(step_bytes, count) // max(1, count)
            + cache_bytes(self._mean_context(count)),
            peak_bytes=peak,
            drafts=self.drafts_by_length.total(),
            drafted_tokens=sum(length * steps for length, steps in self.drafts_by_length.items()),
            accepted_tokens=self.accepted_tokens,
            shifts=self.shifts,
            discarded_tokens=self.discarded_tokens,
        )
        return Completion(
            text=self.stream.text,
            tokens=list(self.generated),
            finish_reason=self.finish_reason or "abort",
            timings=timings,
            seed=self.sampler.seed,
            prompt_tokens=self.num_prompt_tokens,
            logprobs=None if params.logprobs is None else with_texts(self.logprobs, text),
            prompt_logprobs=(
                None
                if params.prompt_logprobs is None or scores is None
                else with_texts(scores.logprobs, text)
            ),
        )

    def _mean_context(self, count: int) -> int:
        """The mean context length over the `count` generated tokens, each of them included; 0 without any."""
        gone = count * self.discarded_tokens - self.discarded_late
        tokens = count * self.num_prompt_tokens + count * (count + 1) // 2 - gone
        return tokens // count if count else 0

    def _weight_bytes(self, step_bytes: Callable[[int], int], count: int) -> int:
        """Bytes of weights that its steps for `count` tokens and its drafts read. The rows of a step (the newest token
        and the drafted ones) share one pass over the weights; in a mixture of experts more rows read more.
        """
        alone = step_bytes(1)
        more = sum(
            steps * (step_bytes(1 + length) - alone) for length, steps in self.drafts_by_length.items()
        )
        return alone * max(1, count - self.accepted_tokens) + more + self.draft_bytes
