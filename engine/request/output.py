"""What a finished request gives back: the text, how it ended, and what it cost."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from quengine.sampler import TokenLogprobs
from quengine.structured.tool_calls import ToolCall


@dataclass(frozen=True)
class LikelyToken:
    """A token, its text (control tokens by name, bytes that are no UTF-8 as U+FFFD), and its log-probability."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True)
class TokenScore(LikelyToken):
    """A token of a prompt or a text, with the likeliest tokens in its place.

    Attributes:
        token: its id.
        text: its text; control tokens by name, bytes that are no UTF-8 as U+FFFD.
        logprob: the natural logarithm of its probability.
        top: the likeliest tokens there as `LikelyToken`, best first; the token itself may be among them.
    """

    top: tuple[LikelyToken, ...] = ()


def with_texts(entries: Iterable[TokenLogprobs], text: Callable[[int], str]) -> list[TokenScore]:
    """Log-probabilities with the texts of their tokens."""
    return [
        TokenScore(
            *(entry.token, text(entry.token), entry.logprob),
            tuple(LikelyToken(token, text(token), value) for token, value in entry.top),
        )
        for entry in entries
    ]


@dataclass(frozen=True)
class BatchProgress:
    """How far a batch is.

    Attributes:
        done: completions that have ended.
        total: completions of the batch.
        tokens: tokens that were generated so far.
        seconds: time since its start.
    """

    done: int
    total: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the completions that have ended; None before the first."""
        return self.seconds * (self.total - self.done) / self.done if self.done else None


ShowProgress: TypeAlias = Callable[[BatchProgress], None]


def show_progress(progress: BatchProgress) -> None:
    """Writes a batch's progress over the last line of standard error."""
    left = progress.seconds_left
    rest = "" if not left else f", {left:.0f} s left"
    end = "\n" if progress.done == progress.total else ""
    line = f"{progress.done}/{progress.total} done, {progress.tokens_per_second:.0f} tokens/s{rest}"
    print(f"\r{line:60}", end=end, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class DraftCounts:
    """Steps that checked a draft, tokens drafted, and those of them that sequences accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            self.steps + other.steps, self.drafted + other.drafted, self.accepted + other.accepted
        )

    @property
    def accept_rate(self) -> float | None:
        """Accepted tokens per drafted token; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accept_length(self) -> float | None:
        """Mean number of tokens of a step with a draft: the accepted ones, and the model's own token after them."""
        return 1 + self.accepted / self.steps if self.steps else None


@dataclass(frozen=True)
class Timings:
    """Times in seconds, rates in tokens per second (0 for a phase that did not happen), sizes in bytes.

    Attributes:
        compile_s: the wait for kernels to be compiled; no rate counts it.
        prompt_tokens: tokens of the prompt; a context shift adds none.
        prompt_s: the time to compute the prompt's tokens that were not cached.
        ttft_s: the time from the request to its first token.
        generated_tokens: tokens that were chosen. If the last one ended the text, `end_tokens` is 1, and the completion
            does not contain that token.
        decode_s: the time of the tokens after the first.
        bytes_per_token: weights and, on average, cache read for a decoded token. `gb_s`: the same in 1e9 bytes/s.
        drafts: decode steps that also computed drafted tokens.
        drafted_tokens, accepted_tokens: the drafted tokens, and the ones among them that the sequence accepted.
        shifts, discarded_tokens: context shifts, and the tokens that they discarded.
    """

    load_s: float = 0.0
    compile_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_s: float = 0.0
    ttft_s: float = 0.0
    generated_tokens: int = 0
    end_tokens: int = 0
    decode_s: float = 0.0
    bytes_per_token: int = 0
    peak_bytes: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    shifts: int = 0
    discarded_tokens: int = 0

    @property
    def prompt_tok_s(self) -> float:
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        return max(0, self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def gb_s(self) -> float:
        return self.bytes_per_token * self.decode_tok_s / 1e9

    @property
    def draft_counts(self) -> DraftCounts:
        return DraftCounts(self.drafts, self.drafted_tokens, self.accepted_tokens)

    @property
    def accept_rate(self) -> float:
        """As `DraftCounts` has it; 0 without drafts."""
        return self.draft_counts.accept_rate or 0.0

    @property
    def accept_length(self) -> float:
        """As `DraftCounts` has it; 0 without drafts."""
        return self.draft_counts.accept_length or 0.0


@dataclass(frozen=True)
class Completion:
    """One generated text.

    Attributes:
        text: what the user sees; without the end token and without the stop string.
        tokens: the ids that were generated, without the model's end token.
        finish_reason: "stop" (end token, stop token or stop string) or "length" (max_tokens, or a full context where
            it is not shifted).
        logprobs: one entry a token where requested, else None.
        prompt_logprobs: one entry a token of the prompt from its second one on, where requested, else None.
        timings: see Timings.
        seed: the seed that was used; the same one gives the same text.
        reasoning: what the model thought before the text, in an answer of a conversation.
        tool_calls: the tools that the answer of a conversation calls.
        schema_violation: one line on why a text that ended by itself violates the JSON schema of its constraint; None:
            it is valid, or there is no schema.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    timings: Timings
    seed: int
    prompt_tokens: int
    logprobs: list[TokenScore] | None = None
    prompt_logprobs: list[TokenScore] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    schema_violation: str | None = None
