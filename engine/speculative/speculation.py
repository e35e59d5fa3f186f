"""Speculative decoding: tokens are drafted cheaply, and one step of the model says which of them it would have chosen.

A step computes a sequence's newest token and its drafted ones as rows of their own. In each row the model's own token
is chosen with the random number of that place; while it is the drafted one the row behind it holds, and the first that
is not ends the draft. So a text is the very text that it is without drafts, greedy or sampled (Leviathan et al. 2023
accept drafts by chance instead, which keeps the distribution, not the text). Drafts come from the text itself
(draft_ngram.py), or, where it has none to give, from a second model (draft_model.py).

Knows sequences and who drafts for them; neither logits nor blocks, and not how a row is computed.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from quengine.batch import Batch
from quengine.request.sequence import Sequence
from quengine.runner import Verified
from quengine.sampler import Sample
from quengine.scheduler import Scheduler
from quengine.speculative.draft_model import DraftModel
from quengine.speculative.draft_ngram import NgramIndex
from quengine.speculative.draft_pace import Pace, shares


@dataclass
class _Drafting:
    """Of one sequence: its index, if there is look-up, and how the drafts of either kind have gone."""

    index: NgramIndex | None
    lookup: Pace
    model: Pace


@dataclass(frozen=True)
class _Wish:
    """A draft that a sequence could have: `found` in its text, or `count` tokens that the model is to draft."""

    sequence: Sequence
    pace: Pace
    count: int
    found: list[int] | None = None


class Speculation:
    """Gives sequences their drafts before a step, and the tokens that were right after it.

    Args:
        scheduler: who has the blocks.
        longest: tokens of the longest run that is looked up; 0: none are.
        model: drafts where nothing was found; None: nobody does.
        most: tokens of a draft at most.
        rows: rows of a step, a row a sequence and one a drafted token, up to which there are drafts.
    """

    def __init__(
        self, scheduler: Scheduler, longest: int, model: DraftModel | None, most: int, rows: int
    ) -> None:
        self._scheduler = scheduler
        self._longest = longest
        self._model = model
        self._most = most
        self._rows = rows
        self._texts: WeakKeyDictionary[Sequence, _Drafting] = WeakKeyDictionary()
        self._paces: WeakKeyDictionary[Sequence, Pace] = WeakKeyDictionary()  # of the drafts under way

    def prepare(self, batch: Batch) -> None:
        """Set the drafts of a step's sequences; of prompts' chunks, let the draft model compute them too."""
        if batch.phase == "decode":
            self._draft(batch.sequences)
            return
        for chunk in batch.chunks:
            if self._model is not None and chunk.sequence.pool is None:
                self._model.follow(chunk.sequence, chunk.start + len(chunk.ids))

    def take(self, sequence: Sequence, verified: Verified) -> str:
        """Let a sequence take what its draft came to; returns the text that it makes visible."""
        draft, sequence.draft = sequence.draft, []
        accepted, sample = 0, verified.first
        text = sequence.advance(sample)
        while accepted < len(draft) and sample.token == draft[accepted]:
            accepted += 1
            if sequence.finished:
                break
            later = verified.later(accepted)
            if not isinstance(later, Sample):
                break  # the step of this token alone will say why
            self._scheduler.accepted(sequence)
            sample = later
            text += sequence.advance(sample)
        sequence.drafts += 1
        sequence.drafted_tokens += len(draft)
        sequence.accepted_tokens += accepted
        self._paces.pop(sequence).saw(len(draft), accepted)
        return text

    def _draft(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.draft = []
        room = self._rows - len(sequences)
        if room <= 0:
            return
        wishes = [wish for sequence in sequences if (wish := self._wish(sequence)) is not None]
        granted = shares([wish.count for wish in wishes], room)
        asked: dict[Sequence, int] = {}
        for wish, count in zip(wishes, granted, strict=True):
            self._paces[wish.sequence] = wish.pace
            if wish.found is not None:
                wish.sequence.draft = wish.found[:count]
            elif count:
                asked[wish.sequence] = count
        if self._model is not None and asked:
            for sequence, draft in self._model.draft(asked).items():
                sequence.draft = draft
                sequence.draft_bytes += len(draft) * self._model.bytes_per_token

    def _wish(self, sequence: Sequence) -> _Wish | None:
        """The draft that is worth a try, as long as it can be."""
        most = min(self._most, sequence.max_positions - len(sequence.token_ids) - 1)
        if most < 1 or not sequence.next_is_newest:
            return None
        text = self._text(sequence)
        if text.index is not None and (length := min(most, text.lookup.next())):
            found = text.index.draft(sequence.token_ids, length)
            if found and (room := self._scheduler.draft_room(sequence, length)):
                return _Wish(sequence, text.lookup, room, found[:room])
        if self._model is not None:
            most = min(most, self._model.room(sequence))
            if most > 0 and (length := min(most, text.model.next())):
                room = self._scheduler.draft_room(sequence, length)
                return _Wish(sequence, text.model, room) if room else None
        return None

    def _text(self, sequence: Sequence) -> _Drafting:
        if sequence not in self._texts:
            index = NgramIndex(self._longest) if self._longest else None
            self._texts[sequence] = _Drafting(index, Pace(self._most), Pace(self._most))
        return self._texts[sequence]
