"""The computation of one step, as the scheduler creates it."""

from dataclasses import dataclass, field

from quengine.kernels.forward_batch import Phase
from quengine.request.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """A chunk of one sequence's prompt: the tokens `ids` at positions start .. start + len(ids) - 1."""

    sequence: Sequence
    ids: list[int]
    start: int

    @property
    def end(self) -> int:
        """The position after the chunk's last token."""
        return self.start + len(self.ids)

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the sequence's newest token, from whose logits the next token is sampled."""
        return self.end == len(self.sequence.token_ids)

    @property
    def scored_rows(self) -> range:
        """The rows of the chunk whose logits are needed for the log-probabilities of the prompt."""
        if self.sequence.scores is None:
            return range(0)
        missing = self.sequence.scores.missing_rows
        return range(max(0, missing.start - self.start), min(len(self.ids), missing.stop - self.start))


@dataclass(frozen=True)
class Batch:
    """One step: prompt chunks (prefill), or one row per sequence, its first token not yet cached (decode)."""

    phase: Phase
    sequences: list[Sequence]
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def cancelled(self) -> bool:
        """Whether no sequence of the batch is running any more, so that its results are not needed."""
        return not any(sequence.block_tables for sequence in self.sequences)

    @classmethod
    def prefill(cls, chunks: list[Chunk]) -> "Batch":
        return cls("prefill", [chunk.sequence for chunk in chunks], chunks)

    @classmethod
    def decode(cls, sequences: list[Sequence]) -> "Batch":
        return cls("decode", sequences)
