"""Drafts by the model's own layer for it (multi-token prediction, models/draft_layer.py).

It is a draft model over the target's block tables, which also reads the hidden rows that the target's steps keep there:
of a position once the target has computed the one before. After the first token of a draft it reads its own rows, which
it writes where the target's will be. What the target has accepted of a draft is computed again, from the target's rows.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from quengine.model_runner import ModelRunner
from quengine.request.sequence import Sequence
from quengine.speculative.draft_model import DraftModel, DraftSteps


class MtpDrafts(DraftModel):
    """A `DraftModel` whose runner has a `DraftDecoder`. most: maximum number of tokens of a draft."""

    def __init__(self, runner: ModelRunner, steps: DraftSteps, most: int) -> None:
        super().__init__(runner, steps)
        self._most = most

    def room(self, sequence: Sequence) -> int:
        return min(self._most, super().room(sequence))

    def follow(self, sequence: Sequence, end: int) -> None:
        """As DraftModel, as far as the target has computed the positions before."""
        super().follow(sequence, min(end, sequence.num_cached_tokens + 1))

    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, Seq[int]]:
        drafts = super().draft(counts)
        for sequence in counts:
            self._progresses[sequence].ahead = ()
        return drafts
