"""What a step computes, as the scheduler hands it out."""

from dataclasses import dataclass, field

from quengine.kernels.forward_batch import Phase
from quengine.request.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """A part of one sequence's prompt: `ids` at positions start .. start + len(ids) - 1."""

    sequence: Sequence
    ids: list[int]
    start: int

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.ids)

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the sequence's newest, so that a token follows from its logits."""
        return self.end == len(self.sequence.token_ids)

    @property
    def scored_rows(self) -> range:
        """Which of these tokens' logits are wanted for the log-probabilities of the prompt."""
        if self.sequence.scores is None:
            return range(0)
        missing = self.sequence.scores.missing_rows
        return range(max(0, missing.start - self.start), min(len(self.ids), missing.stop - self.start))


@dataclass(frozen=True)
class Batch:
    """One step: a chunk of each of several prompts (prefill), or of each of several sequences the first token that is
    not in the cache (decode)."""

    phase: Phase
    sequences: list[Sequence]
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def cancelled(self) -> bool:
        """Whether no result of it is wanted any more."""
        return not any(sequence.block_tables for sequence in self.sequences)

    @classmethod
    def prefill(cls, chunks: list[Chunk]) -> "Batch":
        return cls("prefill", [chunk.sequence for chunk in chunks], chunks)

    @classmethod
    def decode(cls, sequences: list[Sequence]) -> "Batch":
        return cls("decode", sequences)
