"""Perplexity of a text, counted as llama-perplexity counts it.

The text's tokens are cut into chunks of `ctx`. A chunk begins with the beginning-of-text token, in place of its first
one, where the model has it, and its second half is scored: tokens ctx // 2 + 1 .. ctx - 1, each after all tokens of the
chunk in front of it. With a stride, windows of ctx + stride // 2 tokens begin every `stride` tokens. Their tokens are
those of the text, and the last `stride` of each window are scored.
"""

import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quengine.errors import EngineError
from quengine.scoring.prompt_logits import PromptEngine, ScoredTokens, TargetLogprobs, compute

DEFAULT_CTX = 512


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error."""

    value: float
    error: float

    @property
    def exponential(self) -> "Estimate":
        """e to this power: a perplexity of a mean negative log-probability; infinite beyond what fp64 holds."""
        try:
            value = math.exp(self.value)
        except OverflowError:
            return Estimate(math.inf, math.inf)
        return Estimate(value, value * self.error)


class Mean:
    """A mean of values that come part by part."""

    def __init__(self) -> None:
        self.count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, values: Seq[float]) -> None:
        self.count += len(values)
        self._sum += math.fsum(values)
        self._squares += math.fsum(value * value for value in values)

    @property
    def estimate(self) -> Estimate:
        """The mean so far, and its error if the values were independent: 0 where there are fewer than two."""
        mean = self._sum / self.count
        variance = max(0.0, self._squares / self.count - mean * mean)
        return Estimate(mean, math.sqrt(variance / (self.count - 1)) if self.count > 1 else 0.0)


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text, or of as much of it as was computed so far.

    Attributes:
        perplexity: e to the mean negative log-probability of the scored tokens, and its standard error.
        nll: that mean, natural logarithm.
        running: the perplexity after each chunk.
        scored_tokens: tokens that were scored.
        computed_tokens: tokens that the model computed.
        chunks: chunks that were computed.
        total_chunks: chunks of the text.
        ctx: tokens of a chunk.
        stride: distance of overlapping windows in tokens; 0: chunks that do not overlap.
        seconds: time of the computation, without loading.
    """

    perplexity: Estimate
    nll: Estimate
    running: list[float]
    scored_tokens: int
    computed_tokens: int
    chunks: int
    total_chunks: int
    ctx: int
    stride: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Computed tokens per second."""
        return self.computed_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        """Time that the remaining chunks take at this speed."""
        return self.seconds * (self.total_chunks - self.chunks) / self.chunks


Progress = Callable[[Perplexity], None]


def chunks_of(ids: Seq[int], ctx: int, bos: int | None) -> list[ScoredTokens]:
    """The chunks of a text without a stride. bos: what each begins with; None: its own first token.

    Raises:
        EngineError: the context is too small, or the text shorter than two chunks.
    """
    if ctx < 4:
        raise EngineError(f"a context of {ctx} tokens: must be at least 4")
    if len(ids) < 2 * ctx:
        raise EngineError(
            f"the text has {len(ids)} tokens, and must have at least {2 * ctx}, two chunks of {ctx}: "
            "give a longer text, or a smaller context (-c)"
        )
    parts = [list(ids[start : start + ctx]) for start in range(0, len(ids) // ctx * ctx, ctx)]
    heads = [part[:1] if bos is None else [bos] for part in parts]
    return [ScoredTokens(head + part[1:], ctx // 2 + 1) for head, part in zip(heads, parts, strict=True)]


def windows_of(ids: Seq[int], ctx: int, stride: int) -> list[ScoredTokens]:
    """The windows of a text with a stride.

    Raises:
        EngineError: the stride is longer than a window, or the text not longer than one.
    """
    size = ctx + stride // 2
    if stride >= size:
        raise EngineError(f"a stride of {stride} tokens: must be less than {2 * ctx}, twice the context")
    if len(ids) < max(2 * ctx, size + 1):
        raise EngineError(
            f"the text has {len(ids)} tokens, and must have at least {max(2 * ctx, size + 1)}: "
            "give a longer text, or a smaller context (-c)"
        )
    count = -(-(len(ids) - size) // stride)
    starts = [number * stride for number in range(count)]
    return [ScoredTokens(list(ids[start : start + size]), size - stride) for start in starts]


def whole_text(ids: Seq[int], ctx: int) -> list[ScoredTokens]:
    """Chunks of at most `ctx` tokens that score every token but the first, once. After the first chunk, at least
    ctx // 2 tokens of the chunk are in front of each scored one.

    Raises:
        EngineError: there are fewer than two tokens, or the context is too small.
    """
    if len(ids) < 2:
        raise EngineError(f"the text has {len(ids)} tokens: the first one is not scored, give at least two")
    if ctx < 4:
        raise EngineError(f"a context of {ctx} tokens: must be at least 4")
    kept, chunks = ctx // 2, [ScoredTokens(list(ids[:ctx]), 1)]
    for start in range(ctx - kept, len(ids) - kept, ctx - kept):
        chunks.append(ScoredTokens(list(ids[start : start + ctx]), kept))
    return chunks


def text_chunks(llm: PromptEngine, text: str, ctx: int, stride: int = 0) -> list[ScoredTokens]:
    """The chunks of a text, which is encoded without control tokens. Raises EngineError as `chunks_of` and `windows_of`
    do."""
    ids = llm.encode(text)
    tokenizer = llm.tokenizer
    if stride:
        return windows_of(ids, ctx, stride)
    return chunks_of(ids, ctx, tokenizer.bos_id if tokenizer.add_bos else None)


def measure(llm: PromptEngine, chunks: Seq[ScoredTokens], ctx: int, stride: int = 0) -> Iterator[Perplexity]:
    """The perplexity after each of the chunks.

    Raises:
        EngineError: a chunk does not fit the model's context, or a log-probability is not finite.
    """
    began, mean, running = time.perf_counter(), Mean(), list[float]()
    scores = [TargetLogprobs(*chunk) for chunk in chunks]
    finished, computed = compute(llm, (score.prompt for score in scores)), 0
    for done, (chunk, score) in enumerate(zip(chunks, scores, strict=True), 1):
        next(finished)
        mean.add([-value for value in score.values()])
        computed += len(chunk.ids)
        nll = mean.estimate
        running.append(nll.exponential.value)
        seconds = time.perf_counter() - began
        yield Perplexity(
            *(nll.exponential, nll, list(running), mean.count, computed, done, len(chunks)),
            *(ctx, stride, seconds),
        )


def last(
    llm: PromptEngine, chunks: Seq[ScoredTokens], ctx: int, stride: int = 0, progress: Progress | None = None
) -> Perplexity:
    """The perplexity after all of the chunks; `progress` is called after each. Raises EngineError as `measure` does."""
    if not chunks:
        raise EngineError("no chunk to compute: chunks must be at least 1")
    for found in measure(llm, chunks, ctx, stride):
        if progress is not None:
            progress(found)
    return found
