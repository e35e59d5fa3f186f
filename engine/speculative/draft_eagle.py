"""Drafts by an EAGLE-3 draft model (models/eagle.py): as by the model's own layer, of rows that the target keeps.

No row precedes the first token's, so that the second is the first that is computed.
"""

from quengine.request.sequence import Sequence
from quengine.speculative.draft_model import Progress
from quengine.speculative.draft_mtp import MtpDrafts


class EagleDrafts(MtpDrafts):
    """`MtpDrafts` whose runner has an `EagleDecoder`."""

    def room(self, sequence: Sequence) -> int:
        return super().room(sequence) if len(sequence.token_ids) > 1 else 0

    def _progress(self, sequence: Sequence) -> Progress:
        progress = super()._progress(sequence)
        progress.cached = max(1, progress.cached)
        return progress
