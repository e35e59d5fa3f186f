"""Drafts by an EAGLE-3 draft model (models/eagle.py): like the model's own layer, it reads rows that the target keeps.

It begins with the second token, since it reads the row of the token before.
"""

from quengine.request.sequence import Sequence
from quengine.scheduler import PENDING
from quengine.speculative.draft_model import Progress
from quengine.speculative.draft_mtp import MtpDrafts


class EagleDrafts(MtpDrafts):
    """`MtpDrafts` whose runner has an `EagleDecoder`."""

    def fits_device(self, sequence: Sequence) -> bool:
        """As DraftModel: if the rows that a step computes do not begin with the first token, and the draft model's
        context does not end within steps that are launched ahead."""
        if self._on_device is None:
            return False
        window, tokens = self._on_device.window, len(sequence.token_ids)
        return window < tokens < self._runner.cache.ctx_size - PENDING * window

    def room(self, sequence: Sequence) -> int:
        return super().room(sequence) if len(sequence.token_ids) > 1 else 0

    def _progress(self, sequence: Sequence) -> Progress:
        progress = super()._progress(sequence)
        progress.cached = max(1, progress.cached)
        return progress
