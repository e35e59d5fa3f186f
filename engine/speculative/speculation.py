"""Speculative decoding: tokens are drafted cheaply, and one step of the model verifies them.

A step computes a sequence's newest token and its drafted ones as rows of their own. In each row the model's token is
sampled with the random number of that position; as long as it equals the drafted one, the next row is valid, and the
first mismatch ends the draft. So the text is exactly that without drafts, greedy or sampled. (Leviathan et al. 2023
accept drafts by rejection sampling instead, which preserves the distribution, not the text.) Drafts come from the
sequence itself (draft_ngram.py), or, if it gives none, from a draft model (draft_model.py).

Where the device samples, a model's own layer drafts in the step that also verifies and accepts (draft_mtp.py); the host
then takes the accepted tokens like sampled ones. If the host samples a sequence of a step, all sequences of that step
get their drafts from the host.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from quengine.config import EngineConfig
from quengine.request.sequence import Sequence
from quengine.runners.graph_keys import DECODE_ROWS, SamplingKind, padded_rows
from quengine.sampler import Sample, Verified
from quengine.scheduler import Scheduler
from quengine.slot import Slot
from quengine.speculative.draft_length import (
    SHARED_MEMORY,
    AcceptRate,
    DraftLength,
    TimedLength,
    divide,
    draft_rows,
    draft_tokens,
)
from quengine.speculative.draft_model import DraftModel
from quengine.speculative.draft_ngram import NgramIndex
from quengine.step_plan import StepPlan


@dataclass
class _Drafting:
    """The drafting state of one sequence since its last context shift (`shifts`: their number)."""

    index: NgramIndex | None
    lookup: DraftLength
    model: DraftLength
    shifts: int
    rate: AcceptRate

    def wait(self) -> None:
        """Counts a step without a draft towards the pauses of both lengths."""
        for length in (self.lookup, self.model):
            length.next()


@dataclass(frozen=True)
class _Proposal:
    """A possible draft of a sequence: `tokens` found by look-up, or `count` tokens for the draft model to make."""

    sequence: Sequence
    length: DraftLength
    count: int
    tokens: list[int] | None = None


class Speculation:
    """Gives sequences their drafts before a step, and accepts the verified tokens after it.

    Args:
        scheduler: owns the blocks.
        longest: length of the longest n-gram that is looked up; 0: no look-up.
        model: the draft model, for sequences without a look-up; None: there is none.
        most: maximum length of a draft.
        rows: maximum number of rows of a step with drafts, one per sequence and one per drafted token.
        on_host: the host has drafts made where a step does not make its own; else such a step is a plain one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        longest: int,
        model: DraftModel | None,
        most: int,
        rows: int,
        on_host: bool = True,
    ) -> None:
        self._scheduler = scheduler
        scheduler.holds_back = self.may_draft
        self._longest = longest
        self._model = model
        self._most = most
        self._rows = rows
        self._on_host = on_host
        self._draftings: WeakKeyDictionary[Sequence, _Drafting] = WeakKeyDictionary()
        # of the drafts in flight
        self._lengths: WeakKeyDictionary[Sequence, DraftLength] = WeakKeyDictionary()
        # by number of sequences; of steps that draft on the device
        self._timed_lengths: dict[int, TimedLength] = {}
        self._rate = AcceptRate(memory=SHARED_MEMORY)
        self._new = 0  # sequences since pauses were last shortened for them
        # whether the device could draft for all sequences that decoded in the last due step
        self._may_join = True
        self._timed: tuple[tuple[int, int] | None, float] = None, 0.0
        self.clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(
        cls, config: EngineConfig, scheduler: Scheduler, model: DraftModel | None, kind: str
    ) -> "Speculation | None":
        """The speculation that the options request, on a device of this kind; None: they request no drafts."""
        if not config.speculates:
            return None
        most, rows = draft_tokens(config, kind), draft_rows(config, kind)
        return cls(scheduler, config.draft_ngram, model, most, rows, config.drafts_on_host)

    def propose(self, plan: StepPlan) -> None:
        """Sets the drafts of a decode step's sequences. In prefill, the draft model computes the chunks too, unless a
        draft is unlikely soon."""
        if plan.phase == "decode":
            if not self._draft_on_device(plan) and self._on_host:
                self._draft(plan.sequences)
            return
        if self._model is None or not (self._on_host or self._will_draft()):
            return
        self._model.follow_all(
            {
                sequence: chunk.end
                for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True)
                if sequence.pool is None and (self._on_host or self._leaves_to_device(sequence))
            }
        )

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether a sequence is likely to have a draft once the results in flight are known, because it would have one
        after the tokens known now. Its next step is then not launched ahead, since the draft depends on those results,
        unless the device drafts."""
        drafting = self._drafting(sequence)
        if drafting.index is not None and drafting.lookup.due:
            return bool(drafting.index.draft(sequence.token_ids, 1))
        if self._model is None or self._model.room(sequence) <= 0:
            return False
        if self._may_join and self._leaves_to_device(sequence):
            sequences = len(self._scheduler.decoding)
            can = self._model.most_on_device(sequences) and self._timed_length(sequences).due
            return bool(can) and not self._model.goes_on(sequence)
        return self._on_host and drafting.model.due

    def committed(self, plan: StepPlan) -> None:
        """Times successive steps of one kind: a step's time is counted from the end of the one before it."""
        kind = (len(plan.sequences), max(plan.drafted, default=0)) if plan.phase == "decode" else None
        (before, began), now = self._timed, self.clock()
        if kind is not None and kind == before:
            self._timed_length(kind[0]).note(kind[1], now - began)
        self._timed = kind, now

    def take(self, sequence: Sequence, verified: Verified) -> str:
        """Appends the verified tokens of a sequence's draft; returns the text that becomes visible."""
        if verified.draft is not None:
            return self._take_of_device(sequence, verified, verified.draft)
        draft, sequence.draft = sequence.draft, ()
        before = sequence.num_cached_tokens - 1 - sequence.replay  # tokens in the states before the step
        text, accepted, _ = self._accept(sequence, verified, draft)
        if before + sequence.replay + 1 + len(draft) == sequence.num_cached_tokens:
            sequence.replay = 0
        else:
            self._scheduler.states.roll_back(sequence, before)
        self._lengths.pop(sequence).update(len(draft), accepted)
        return text

    def _take_of_device(self, sequence: Sequence, verified: Verified, draft: Seq[int]) -> str:
        assert self._model is not None
        self._model.computed(sequence, sequence.num_cached_tokens)
        text, accepted, is_whole = self._accept(sequence, verified, draft)
        if not is_whole:  # the device has gone on from no token
            sequence.slot = Slot(sequence.slot.index, sequence.slot.end)
        for rate in (self._drafting(sequence).rate, self._rate):
            rate.update(len(draft), accepted)
        sequence.draft_bytes += len(draft) * self._model.bytes_per_token
        return text

    def _accept(self, sequence: Sequence, verified: Verified, draft: Seq[int]) -> tuple[str, int, bool]:
        """Appends the verified tokens of a draft; returns the text that becomes visible, the number of accepted tokens,
        and whether the token after them could be sampled."""
        accepted, sample, is_whole = 0, verified.first, True
        text = sequence.advance(sample)
        while accepted < len(draft) and sample.token == draft[accepted]:
            accepted += 1
            if sequence.finished:
                break
            later = verified.later(accepted)
            if not isinstance(later, Sample):
                is_whole = False  # the step of this token alone will report the error
                break
            self._scheduler.accepted(sequence)
            sample = later
            text += sequence.advance(sample)
        sequence.drafts_by_length[len(draft)] += 1
        sequence.accepted_tokens += accepted
        return text, accepted, is_whole

    def _draft_on_device(self, plan: StepPlan) -> bool:
        """Leaves the drafts of a step to the device and returns True, if it can draft for all sequences of the step.
        While drafts pause, the step is plain."""
        model, sequences = self._model, plan.sequences
        most = 0 if model is None else min(self._most, model.most_on_device(len(sequences)))
        if model is None or not most:
            return False
        timed = self._timed_length(len(sequences))
        if not timed.due and not self._on_host:
            timed.skip()
            return False
        self._may_join = all(map(self._leaves_to_device, sequences))
        if not all(map(self._drafts_on_device if timed.due else self._leaves_to_device, sequences)):
            return False
        count = timed.next([self._drafting(each).rate.value for each in sequences], most)
        for sequence in sequences:
            sequence.draft = ()
        if count:
            plan.drafting.extend(self._scheduler.device_draft(sequence, count) for sequence in sequences)
            model.begin_on_device(
                {each: room.end for each, room in zip(sequences, plan.drafting, strict=True)}
            )
        return True

    def _will_draft(self) -> bool:
        """Whether the device is likely to draft in steps of the present sequences."""
        scheduler = self._scheduler
        sequences = min(scheduler.parallel, len(scheduler.sequences))
        most = 0 if self._model is None else self._model.most_on_device(sequences)
        return bool(most) and self._timed_length(sequences).pays

    def _leaves_to_device(self, sequence: Sequence) -> bool:
        """Whether the device samples a sequence's tokens, and drafts them."""
        if self._model is None or self._longest or not self._model.most_on_device(1):
            return False
        kind = SamplingKind.of(sequence.params)
        return kind is not None and not kind.penalties and self._model.fits_device(sequence)

    def _timed_length(self, sequences: int) -> TimedLength:
        size = padded_rows(min(sequences, DECODE_ROWS[-1]))
        return self._timed_lengths.setdefault(size, TimedLength(self._most))

    def _drafts_on_device(self, sequence: Sequence) -> bool:
        """Whether the device can draft after a sequence's newest token, which it has or is given in this step."""
        assert self._model is not None
        if not self._leaves_to_device(sequence) or sequence.replay:
            return False
        if self._model.goes_on(sequence):
            return True
        return sequence.next_is_newest and sequence.slot.launched == 1  # this step

    def _draft(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.draft = ()
        room = self._rows - sum(1 + sequence.replay for sequence in sequences)
        if room <= 0:
            return
        proposals = [p for sequence in sequences if (p := self._proposal(sequence)) is not None]
        counts = divide(room, [proposal.count for proposal in proposals])
        for_model: dict[Sequence, int] = {}
        for proposal, count in zip(proposals, counts, strict=True):
            self._lengths[proposal.sequence] = proposal.length
            if proposal.tokens is not None:
                proposal.sequence.draft = proposal.tokens[:count]
            elif count:
                for_model[proposal.sequence] = count
        if self._model is not None and for_model:
            for sequence, draft in self._model.draft(for_model).items():
                sequence.draft = draft
                sequence.draft_bytes += len(draft) * self._model.bytes_per_token

    def _proposal(self, sequence: Sequence) -> _Proposal | None:
        """The longest draft that is worth a try; None if there is none, or while a token is still in flight."""
        if sequence.num_cached_tokens + sequence.slot.launched > len(sequence.token_ids):
            self._drafting(sequence).wait()
            return None
        most = min(self._most - sequence.replay, sequence.max_positions - len(sequence.token_ids) - 1)
        if most < 1 or not sequence.next_is_newest:
            return None
        drafting = self._drafting(sequence)
        if drafting.index is not None and (length := min(most, drafting.lookup.next())):
            found = drafting.index.draft(sequence.token_ids, length)
            if found and (room := self._scheduler.draft_room(sequence, length)):
                return _Proposal(sequence, drafting.lookup, room, found[:room])
        if self._model is not None:
            most = min(most, self._model.room(sequence))
            if most > 0 and (length := min(most, drafting.model.next())):
                room = self._scheduler.draft_room(sequence, length)
                return _Proposal(sequence, drafting.model, room) if room else None
        return None

    def _drafting(self, sequence: Sequence) -> _Drafting:
        drafting = self._draftings.get(sequence)
        if drafting is None or drafting.shifts != sequence.shifts:
            index = NgramIndex(self._longest) if self._longest else None
            lookup, model = DraftLength(self._most), DraftLength(self._most)
            rate = AcceptRate(self._rate.value)
            drafting = self._draftings[sequence] = _Drafting(index, lookup, model, sequence.shifts, rate)
            self._new += 1
            if self._new >= (sequences := max(1, len(self._scheduler.decoding))):
                self._timed_length(sequences).retry(sequences)
                self._new = 0
        return drafting
