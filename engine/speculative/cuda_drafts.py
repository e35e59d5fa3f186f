"""Drafts on a device: steps of which a sequence has several rows, to check a draft, and steps in a row, to make one.

A row is one token of a sequence at its place. Whoever had a row keeps it from step to step where that is possible, so
that its block table and its settings need not be sent again; tokens and places are sent for every step that checks a
draft. A draft is made without waiting for the device: it moves each row on by itself, and the tokens are read together.
No step is launched ahead of the host, which must see what a draft came to.

Knows rows; nothing of graphs, kernels or text.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from torch import Tensor

from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.runner import Result, Verified
from quengine.runners.cuda_batch import BatchDevice, StepTokens, bucket_of, entries_of
from quengine.runners.graph_sampling import GREEDY, GraphKey, Sampled
from quengine.sampler import Sample, Sampler
from quengine.speculative.draft_model import DraftJob


@dataclass(frozen=True)
class Seat:
    """A row wanted: `token` at `position` of the sequence with this block table, sampled as `sampled` says.

    `owner` and `number` tell it from others, and are the same in the next step for the same use. A step reads up to
    `entries` of the block table. `key` is None where the device does not sample the row.
    """

    owner: object
    number: int
    token: int
    position: int
    block_table: list[int]
    entries: int
    sampled: Sampled
    key: GraphKey | None


@dataclass
class _Taken:
    """What a row of the device was sent."""

    row: int
    block_table: list[int]
    written: int
    key: GraphKey | None = None


class Seats:
    """Who sits in which row of a device.

    `most` entries of a block table are its rows' whole.
    """

    def __init__(self, device: BatchDevice, most: int) -> None:
        self._device = device
        self._most = most
        self._taken: dict[tuple[object, int], _Taken] = {}
        self._key = GREEDY

    def launch(self, wanted: Seq[Seat]) -> tuple[StepTokens, list[int]]:
        """Start a step of just these rows; also says which row of it each has. Newcomers sit in order."""
        bucket, key = bucket_of(len(wanted)), GREEDY
        for seat in wanted:
            key = key if seat.key is None else key.union(seat.key)
        self._leave_others(wanted, bucket)
        used = {taken.row for taken in self._taken.values()}
        free = (row for row in range(bucket) if row not in used)
        rows = []
        for seat in wanted:
            taken = self._taken.get((seat.owner, seat.number))
            if taken is None:
                taken = self._seat(seat, next(free))
            self._update(seat, taken, key)
            rows.append(taken.row)
        self._key = key
        return self._device.launch(bucket, key), rows

    def launch_on(self, owners: Seq[tuple[object, int]]) -> StepTokens:
        """Start the step behind the last one, in which the device has moved these rows on; the others leave."""
        going_on = set(owners)
        for place in [place for place in self._taken if place not in going_on]:
            self._leave(place)
        last = max(taken.row for taken in self._taken.values())
        return self._device.launch(bucket_of(last + 1), self._key)

    def _leave_others(self, wanted: Seq[Seat], bucket: int) -> None:
        tables = {(seat.owner, seat.number): seat.block_table for seat in wanted}
        for place, taken in list(self._taken.items()):
            if tables.get(place) is not taken.block_table or taken.row >= bucket:
                self._leave(place)

    def _leave(self, place: tuple[object, int]) -> None:
        self._device.clear(self._taken.pop(place).row)

    def _seat(self, seat: Seat, row: int) -> _Taken:
        blocks = seat.block_table[: self._most]
        self._device.seat(row, blocks, min(seat.entries, self._most))
        taken = _Taken(row, seat.block_table, len(blocks))
        self._taken[seat.owner, seat.number] = taken
        return taken

    def _update(self, seat: Seat, taken: _Taken, key: GraphKey) -> None:
        blocks = seat.block_table[taken.written : self._most]
        if blocks:
            self._device.extend(taken.row, taken.written, blocks)
            taken.written += len(blocks)
        self._device.place(taken.row, seat.token, seat.position)
        if seat.key is not None and taken.key != key:
            self._device.configure(taken.row, key, seat.sampled, [])
            taken.key = key


class DraftedDecoder:
    """Steps of sequences with drafts, and without.

    `most` as for Seats; `alone` computes one sequence's token eagerly, and says what is wrong with its logits;
    `sample_row` samples a row on the host.
    """

    def __init__(
        self,
        device: BatchDevice,
        most: int,
        alone: Callable[[Sequence], Result],
        sample_row: Callable[[Sequence, Tensor], Result],
    ) -> None:
        self._seats = Seats(device, most)
        self._alone = alone
        self._sample_row = sample_row

    def step(self, sequences: Seq[Sequence]) -> list[Result]:
        """`Runner.decode`."""
        wanted = [seat for sequence in sequences for seat in _seats_of(sequence)]
        step, rows = self._seats.launch(wanted)
        results, start = [], 0
        for sequence in sequences:
            end = start + 1 + len(sequence.draft)
            results.append(self._result(sequence, step, rows[start:end]))
            start = end
        return results

    def _result(self, sequence: Sequence, step: StepTokens, rows: list[int]) -> Result:
        if not sequence.next_is_newest:
            return None
        first = self._token(sequence, step, rows[0])
        if first is None:
            sequence.draft = []
            return self._alone(sequence)
        if not sequence.draft or not isinstance(first, Sample):
            return first
        return Verified(first, lambda number: self._token(sequence, step, rows[number]))

    def _token(self, sequence: Sequence, step: StepTokens, row: int) -> Result:
        """The token behind a row's; None where the device found none."""
        if _key_of(sequence.params) is None:
            return self._sample_row(sequence, step.logits(row))
        token = step.wait()[row]
        return None if token == NO_TOKEN else Sample(token)


def _seats_of(sequence: Sequence) -> list[Seat]:
    start, table = sequence.num_cached_tokens, sequence.block_tables[0]
    key, entries = _key_of(sequence.params), entries_of(sequence)
    return [
        Seat(sequence, number, token, start + number, table, entries, sequence, key)
        for number, token in enumerate([sequence.token_ids[start], *sequence.draft])
    ]


def _key_of(params: SamplingParams) -> GraphKey | None:
    """None where the host samples: penalties look at the tokens before a row, which on the device are others."""
    return None if params.penalizes else GraphKey.of(params)


@dataclass(frozen=True)
class _Drafting:
    """How drafts are sampled on the device: without penalties, which need the tokens before them on the host."""

    params: SamplingParams
    sampler: Sampler

    @classmethod
    def of(cls, sampler: Sampler) -> "_Drafting":
        neutral = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return cls(replace(sampler.params, **neutral), sampler)  # type: ignore[arg-type]


class DeviceDraftSteps:
    """`draft_model.DraftSteps` on a device, of which as many steps may be pending as a draft has tokens."""

    def __init__(self, device: BatchDevice, most: int) -> None:
        self._seats = Seats(device, most)

    def draft(self, jobs: Seq[DraftJob]) -> list[list[int]]:
        # Those that go on sit in front: the steps behind the first one are smaller.
        wanted = sorted((seat for job in jobs for seat in _job_seats(job)), key=lambda seat: seat.number > 0)
        step, rows = self._seats.launch(wanted)
        newest = rows[: len(jobs)]
        steps = [step]
        for made in range(1, max(job.count for job in jobs)):
            steps.append(self._seats.launch_on([(job.sampler, 0) for job in jobs if job.count > made]))
        return [
            _until_none([step.wait()[row] for step in steps[: job.count]])
            for job, row in zip(jobs, newest, strict=True)
        ]


def _job_seats(job: DraftJob) -> list[Seat]:
    """A row for each token that is to be computed; the newest has number 0."""
    sampled = _Drafting.of(job.sampler)
    key = GraphKey.of(sampled.params)
    entries = (job.start + len(job.tokens) + job.count) // BLOCK_SIZE + 1
    last = len(job.tokens) - 1
    return [
        Seat(job.sampler, last - n, token, job.start + n, job.block_table, entries, sampled, key)
        for n, token in enumerate(job.tokens)
    ]


def _until_none(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
