"""Drafts by the model's own layer for it (multi-token prediction, models/draft_layer.py).

It is a draft model over the target's block tables that also reads the hidden rows which the target's steps keep: for
each position, the row of the position before. After the first token of a draft it reads its own rows, and writes them
where the target's will be. Accepted tokens of a draft are computed again, from the target's rows.

Where the device samples, one step drafts, verifies and accepts (runners/draft_graphs.py). The layer then first computes
the rows up to the newest token that it may lack: those of the last draft, and of a few steps without one.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from quengine.model_runner import ModelRunner
from quengine.request.sequence import Sequence
from quengine.speculative.draft_model import DraftModel, DraftSteps, StepsOnDevice


class MtpDrafts(DraftModel):
    """A `DraftModel` whose runner has a `DraftDecoder`. most: maximum number of tokens of a draft."""

    def __init__(
        self, runner: ModelRunner, steps: DraftSteps, most: int, on_device: StepsOnDevice | None = None
    ) -> None:
        super().__init__(runner, steps, on_device)
        self._most = most

    def begin_on_device(self, ends: Mapping[Sequence, int]) -> None:
        """As DraftModel. For sequences whose last step had no draft, first computes the rows that the layer lacks."""
        assert self._on_device is not None
        window = self._on_device.window
        self.follow_all({each: len(each.token_ids) - window for each in ends if not self.goes_on(each)})
        for sequence, end in ends.items():
            progress, slot = self._progress(sequence), sequence.slot
            most = min(end, sequence.num_cached_tokens + slot.launched + slot.drafted)
            if most > progress.cached:
                self._wrote(progress, progress.cached, most - progress.cached)

    def computed(self, sequence: Sequence, count: int) -> None:
        progress = self._progress(sequence)
        self._confirm(progress, sequence, max(0, count - progress.cached))

    def room(self, sequence: Sequence) -> int:
        return min(self._most, super().room(sequence))

    def follow_all(self, ends: Mapping[Sequence, int]) -> None:
        """As DraftModel, up to the position after the last that the target has computed."""
        super().follow_all({each: min(end, each.num_cached_tokens + 1) for each, end in ends.items()})

    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, Seq[int]]:
        drafts = super().draft(counts)
        for sequence in counts:
            self._progresses[sequence].ahead = ()
        return drafts
