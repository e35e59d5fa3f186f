"""One step: the rows that the scheduler plans and a runner launches, and then their results."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from quengine.kernels.embedded_rows import EmbeddedRows, joined
from quengine.kernels.forward_batch import BlockTables, ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.phase import Phase
from quengine.request.adapter_scales import Scales
from quengine.request.prompt_images import PromptImages
from quengine.request.sequence import Sequence
from quengine.sampler import NO_CHOICE, Result, Sample, Verified
from quengine.slot import Slot


class SequenceRows(NamedTuple):
    """Rows of one sequence: `ids` at positions `start`, ..., with the sequence's block tables.

    angles: the positions that the rows are rotated by (`PromptImages.angles`); None: their positions.
    adapters: scales of the model's LoRA adapters; None: the rows have none.
    """

    ids: Seq[int]
    start: int
    block_tables: BlockTables
    angles: Seq[int] | None = None
    adapters: Scales | None = None

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.ids)


class GivenRows(NamedTuple):
    """Rows of a prefill step that are given as embeddings.

    Attributes:
        numbers: the numbers of the n rows in the step.
        values: [n, (1 + layers) * embedding length] on any device: each row, and what is added to it after each of the
            first `layers` layers; None: another rank has them.
        spans: as `EmbeddedRows` has them.
        places: each row's position in time, down and across, in models whose image rows have three.
        later: `layers`, where `values` is None.
    """

    numbers: Seq[int] = ()
    values: Tensor | None = None
    spans: Seq[tuple[int, int, int]] = ()
    places: Seq[tuple[int, int, int]] = ()
    later: int = 0


TOKENS_ALONE = GivenRows()
"""No row is given as an embedding."""


class DraftRoom(NamedTuple):
    """The limits of a sequence's draft in a step that drafts on the device: at most `most` tokens, at positions before
    `end`."""

    most: int
    end: int


@dataclass(eq=False)
class StepPlan:
    """One step: a chunk of each sequence's prompt (prefill), or its next token (decode). The scheduler plans it, a
    runner launches it, and the engine then takes its results.

    Attributes:
        slots: the slot of each sequence when the step was planned. A sequence with another slot by now was preempted or
            cancelled meanwhile, and its result is dropped.
        starts: the position of each sequence's first row; -1: the device alone knows it.
        changed: the indices of the sequences of which the device may lack something: blocks, an input, or settings.
        chunks: in prefill, the rows of each sequence. In decode `rows` gives them.
        drafting: in a decode step that drafts on the device, the limits of each sequence's draft; else empty.

    The runner that launches the step sets where its results come from:
        sampled: the `sampled_rows`; None: each sequence has one row, after which the device samples.
        tokens: int64, in pinned memory: the token that the device samples after each row; negative: it found none. A
            step that drafts on the device has 2 * most + 1 entries a sequence: the tokens sampled after its newest
            token and after each of `most` drafted ones, then the drafted tokens. None: the host samples.
        arrived: the event after these tokens, and after `logits`.
        logits: fp32 [vocab] on the host, by the number of each row after which the host samples.
        outcome: the results, where prompts are pooled or scored.
    """

    phase: Phase
    sequences: list[Sequence]
    slots: list[Slot]
    starts: list[int]
    changed: Seq[int] = ()
    chunks: list[SequenceRows] = field(default_factory=list)
    drafting: list[DraftRoom] = field(default_factory=list)
    sampled: Seq[int | None] | None = None
    tokens: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    logits: Mapping[int, Tensor] = field(default_factory=dict)
    outcome: list[Result] | None = None

    @classmethod
    def prefill(cls, sequences: list[Sequence], chunks: list[SequenceRows]) -> "StepPlan":
        slots, starts = [sequence.slot for sequence in sequences], [chunk.start for chunk in chunks]
        return cls("prefill", sequences, slots, starts, chunks=chunks)

    @classmethod
    def decode(cls, sequences: list[Sequence], changed: Seq[int] | None = None) -> "StepPlan":
        """The next decode step of these sequences. The rows of each are the tokens that its states lack, and its first
        token that is neither in the cache nor in a step in flight. changed: None: all sequences."""
        slots, starts = list[Slot](), list[int]()
        for sequence in sequences:
            slot = sequence.slot
            slots.append(slot)
            known = sequence.num_cached_tokens + slot.launched - sequence.replay
            starts.append(-1 if slot.drafted else known)
            slot.launched += 1
        return cls("decode", sequences, slots, starts, range(len(slots)) if changed is None else changed)

    @property
    def rows(self) -> list[SequenceRows]:
        """The rows of each sequence, where the host knows their tokens."""
        if self.phase == "prefill":
            return self.chunks
        found = list[SequenceRows]()
        for sequence, start in zip(self.sequences, self.starts, strict=True):
            ids = [*known_ids(sequence), *sequence.draft]
            angles = angles_of(sequence, start, start + len(ids))
            found.append(SequenceRows(ids, start, sequence.block_tables, angles, sequence.adapters))
        return found

    @property
    def sampled_rows(self) -> list[int | None]:
        """For each sequence the row of its newest token, from whose logits the next one is sampled; None: the newest
        token is not in the step. In prefill each sequence has one row of logits, and the number is that row's."""
        if self.phase == "prefill":
            ends = [
                chunk.end == len(s.token_ids) for s, chunk in zip(self.sequences, self.chunks, strict=True)
            ]
            return [row if is_newest else None for row, is_newest in enumerate(ends)]
        found, first = list[int | None](), 0
        for sequence in self.sequences:
            found.append(first + sequence.replay if sequence.next_is_newest else None)
            first += sequence.replay + 1 + len(sequence.draft)
        return found

    @property
    def given(self) -> GivenRows:
        """The rows of images, which are given as embeddings; none in decode."""
        if self.phase == "decode":
            return TOKENS_ALONE
        parts, first = list[GivenRows](), 0
        for sequence, chunk in zip(self.sequences, self.chunks, strict=True):
            parts.append(given_rows(sequence.images, chunk.ids, chunk.start, first))
            first += len(chunk.ids)
        values = [part.values for part in parts if part.values is not None]
        numbers = [number for part in parts for number in part.numbers]
        spans = [span for part in parts for span in part.spans]
        places = [place for part in parts for place in part.places]
        return GivenRows(numbers, joined(values), spans, places) if values else TOKENS_ALONE

    @property
    def drafted(self) -> Iterable[int]:
        """For each sequence the most tokens that its draft on the device adds."""
        return (room.most for room in self.drafting) if self.drafting else repeat(0, len(self.sequences))

    @property
    def launched(self) -> bool:
        return self.outcome is not None or self.tokens is not None or bool(self.logits)

    @property
    def may_follow(self) -> bool:
        """Whether another step may be launched before the results are taken."""
        return self.tokens is not None

    def results(self) -> list[Result]:
        """Waits for the step; returns the result of each sequence, in order.

        None: no token was due, or the sequence was cancelled meanwhile. NO_CHOICE: the device found no token
        (`ModelRunner.explain`). Call it after the launch and, unless `may_follow`, before the next one.
        """
        if self.outcome is not None:
            return self.outcome
        tokens = list[int]()
        if self.tokens is not None and self.arrived is not None:
            self.arrived.synchronize()
            tokens = self.tokens.tolist()
        if self.drafting:
            width = 2 * max(self.drafted) + 1
            return [verified(tokens[number * width :][:width]) for number in range(len(self.sequences))]
        if self.sampled is None:
            return [*map(_SAMPLES.__getitem__, tokens[: len(self.sequences)])]
        found = list[Result]()
        for sequence, slot, row in zip(self.sequences, self.slots, self.sampled, strict=True):
            result: Result = None
            if row is not None and sequence.slot is slot:
                result = sequence.sampled_after(row, self.logits, tokens)
                if sequence.draft and isinstance(result, Sample):  # the rows of a draft come after it
                    later = partial(_after_draft, sequence, row, self.logits, tokens)
                    result = Verified(result, later)
            found.append(result)
        return found

    @property
    def cancelled(self) -> bool:
        """Whether every sequence has lost its slot, so that no result is needed."""
        return not any(
            sequence.slot is slot for sequence, slot in zip(self.sequences, self.slots, strict=True)
        )

    def running(self) -> Iterator[tuple[Sequence, SequenceRows]]:
        """In prefill, the sequences that still have their slots, each with its chunk."""
        for sequence, slot, chunk in zip(self.sequences, self.slots, self.chunks, strict=False):
            if sequence.slot is slot:
                yield sequence, chunk


def given_rows(images: PromptImages | None, ids: Seq[int], start: int, first: int = 0) -> GivenRows:
    """The image rows of a chunk `ids` at position `start`. first: the number of the chunk's first row in its step."""
    numbers, values = list[int](), list[Tensor]()
    for rows, features in () if images is None else images.within(start, start + len(ids)):
        numbers += range(first + rows.start, first + rows.stop)
        values.append(features)
    runs = () if images is None else images.spans(start, start + len(ids))
    spans = [(first + low, first + high, before) for low, high, before in runs]
    places = () if images is None else images.places(start, start + len(ids))
    return GivenRows(numbers, joined(values), spans, places) if values else TOKENS_ALONE


class _Samples(dict[int, Result]):
    """The result for each token that a device returns, made once: a step of many sequences needs one for each."""

    def __missing__(self, token: int) -> Result:
        self[token] = found = Sample(token) if token >= 0 else NO_CHOICE
        return found


_SAMPLES = _Samples()


def _after_draft(
    sequence: Sequence, newest: int, logits: Mapping[int, Tensor], tokens: Seq[int], accepted: int
) -> Result:
    """The result after `accepted` tokens of a draft. newest: the row of the newest token."""
    return sequence.sampled_after(newest + accepted, logits, tokens)


def verified(found: Seq[int]) -> Result:
    """The result of a sequence in a step that drafts on the device. found: its 2 * most + 1 entries of
    `StepPlan.tokens`."""
    most = len(found) // 2
    drafted = found[most + 1 :]
    length = next((place for place, token in enumerate(drafted) if token < 0), most)
    results: list[Result] = [Sample(token) if token >= 0 else NO_CHOICE for token in found[: length + 1]]
    first = results[0]
    if not length or not isinstance(first, Sample):
        return first
    return Verified(first, results.__getitem__, drafted[:length])


def angles_of(sequence: Sequence, start: int, end: int) -> Seq[int] | None:
    """`SequenceRows.angles` of a sequence's positions start .. end - 1."""
    return None if sequence.images is None else sequence.images.angles(start, end)


def angle_rows(rows: Seq[SequenceRows], context: int, given: GivenRows = TOKENS_ALONE) -> list[int] | None:
    """The row of the rotary tables for each row of a step; None: its position. Image row i of the step has row
    `context` + i, which `Decoder.turn_images` writes."""
    if all(part.angles is None for part in rows):
        return None
    found = [at for part in rows for at in part.angles or range(part.start, part.end)]
    for number, row in enumerate(given.numbers if given.places else ()):
        found[row] = context + number
    return found


def scored_rows(sequence: Sequence, chunk: SequenceRows) -> range:
    """The rows of a chunk whose logits are needed for the log-probabilities of the prompt."""
    if sequence.scores is None:
        return range(0)
    missing = sequence.scores.missing_rows
    return range(max(0, missing.start - chunk.start), min(len(chunk.ids), missing.stop - chunk.start))


def known_ids(sequence: Sequence) -> list[int]:
    """The tokens of a sequence's rows in a decode step, without its draft: those that its states lack, then the first
    one that is not in the cache."""
    return sequence.token_ids[sequence.num_cached_tokens - sequence.replay : sequence.num_cached_tokens + 1]


def forward_batch(
    phase: Phase,
    rows: Seq[SequenceRows],
    device: torch.device,
    all_logits: bool = False,
    embeds: EmbeddedRows | None = None,
    angles: Seq[int] | None = None,
) -> ForwardBatch:
    """The batch of these rows. In prefill, logits are computed for each sequence's last row, or for all rows, and
    some rows may be given as embeddings; in decode, logits are computed for all. angles: `angle_rows` of them.
    """
    ids, starts, tables, _, _ = zip(*rows, strict=True)
    scales = adapter_scales(rows)
    adapters = None if scales is None else torch.tensor(scales, dtype=torch.float32, device=device)
    if phase == "prefill":
        batch = prefill_batch(ids, starts, tables, device, all_logits, embeds, angles)
        return batch if adapters is None else replace(batch, adapters=adapters)
    batch = decode_batch(
        [token for part in ids for token in part],
        [start + n for part, start in zip(ids, starts, strict=True) for n in range(len(part))],
        [table for part, table in zip(ids, tables, strict=True) for _ in part],
        device,
        shares_sequences=any(len(part) > 1 for part in ids),
        angle_rows=angles,
    )
    return batch if adapters is None else replace(batch, adapters=adapters)


def adapter_scales(rows: Seq[SequenceRows]) -> list[list[float]] | None:
    """The scales of each adapter for all rows of a step: [M][T]. None: no row has an adapter."""
    count = max((len(part.adapters) for part in rows if part.adapters is not None), default=0)
    if not count:
        return None
    none = (0.0,) * count
    of_rows = [part.adapters or none for part in rows for _ in part.ids]
    return [list(scales) for scales in zip(*of_rows, strict=True)]
