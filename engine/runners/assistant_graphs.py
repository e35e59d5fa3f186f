"""Captured steps in which an assistant drafts (models/assistant_decoder.py), and the model verifies and accepts.

An assistant keeps no rows of a sequence, so that it lacks none: a draft begins with the model's hidden row of the
position before the newest token, and all of its steps are computed at that position.
"""

from dataclasses import replace

from torch import Tensor

from quengine.kernels.cuda.sampling.sampling import DecodeState, sample_step
from quengine.kernels.draft_rows import Drafting
from quengine.kernels.forward_batch import ForwardBatch
from quengine.models.assistant_decoder import AssistantDecoder
from quengine.runners.draft_graphs import DraftGraphs, DraftKey
from quengine.slot import Slot


class AssistantGraphs(DraftGraphs):
    """`DraftGraphs` whose drafts are of an assistant, over the model's own keys and values of all cache groups.

    decoder, cache: an `AssistantDecoder`, and the model's keys and values.
    """

    @property
    def window(self) -> int:
        """The newest token alone."""
        return 1

    def goes_on(self, slot: Slot) -> bool:
        return slot.undrafted > 0

    def _draft(self, key: DraftKey, drafting: Drafting, pdl: bool) -> None:
        buffers, kept = self._draft_buffers(key.sampling), self._target.cache.hidden
        hidden: Tensor | None = None
        assert kept is not None and isinstance(self._decoder, AssistantDecoder)
        for made in range(key.drafted):
            known = self._drafted.history if made else self._newest.history
            placed = self._place(drafting, known, self._tables, made, 1, pdl)
            batch = ForwardBatch("decode", *placed[:3])
            if hidden is None:
                hidden = self._decoder.backend.hidden_before(batch, kept, None)
            before = replace(batch, positions=(batch.positions - made - 1).clamp_(min=0))
            logits, hidden = self._decoder.step(before, hidden, self._cache)
            taking = drafting.slots, drafting.slots, placed.last
            sample_step(logits, DecodeState(*self._drafted, *taking, self._unread), buffers, pdl)
