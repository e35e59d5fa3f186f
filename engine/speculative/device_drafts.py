"""Drafting on a device that samples by itself: all decode steps of a draft, and the step of the model that verifies it,
are launched before its tokens are read."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.device_rows import DeviceRows, Drafted
from quengine.runners.graph_keys import SamplingKind
from quengine.sampler import Sampler
from quengine.slot import Slot
from quengine.speculative.draft_model import DraftJob
from quengine.step_plan import SequenceRows

_Read: TypeAlias = Callable[[], list[int]]
"""Waits for the tokens of a step, row by row, and returns them; once read, they do not change."""


class DeviceDraftSteps:
    """`draft_model.DraftSteps` on a device, whose graphs allow as many pending steps as a draft has tokens.

    Each sequence has a sampler, which keeps its slot from draft to draft.

    target: the graphs of the model that verifies; they read drafts in the device's memory. None: the host reads the
    drafts and passes them on.
    """

    def __init__(self, graphs: CudaGraphs, target: CudaGraphs | None = None) -> None:
        self._graphs, self._rows = graphs, DeviceRows(graphs)
        self._stays = target is not None
        if target is not None:
            target.drafted = graphs.history
        self._unread: list[_Read] = []
        self._groups, self._most = graphs.inputs.groups, graphs.inputs.slots
        self._slots: dict[Sampler, tuple[Slot, list[int]]] = {}

    def draft(self, jobs: Seq[DraftJob]) -> list[Seq[int]]:
        for read in self._unread:  # new steps overwrite these tokens
            read()
        slots = self._slots_of(jobs)
        settings = [_without_penalties(job.sampler.params) for job in jobs]
        self._rows.choose_kind(slots, {SamplingKind.of(each) for each in settings})
        newest = [end - 1 for end in accumulate(len(job.tokens) for job in jobs)]
        given = dict[int, SequenceRows]()
        for number, (job, slot, params) in enumerate(zip(jobs, slots, settings, strict=True)):
            self._rows.send_tables(slot, [job.block_table] * self._groups)
            if slot.kind != self._rows.kind:
                self._rows.configure(slot, params, job.sampler, [])
            given[number] = SequenceRows(job.tokens, job.start, [job.block_table])
        steps = [(self._launch(slots, given), dict(enumerate(newest)))]
        for made in range(1, max(job.count for job in jobs)):
            going_on = [number for number, job in enumerate(jobs) if job.count > made]
            step = self._launch([slots[number] for number in going_on], {})
            steps.append((step, {number: row for row, number in enumerate(going_on)}))
        self._unread = [step for step, _ in steps]
        reads = [partial(_read, steps, number) for number in range(len(jobs))]
        if self._stays:
            pairs = zip(jobs, slots, reads, strict=True)
            return [Drafted(slot.index, job.count, partial(_inputs, read)) for job, slot, read in pairs]
        return [_until_none(read()) for read in reads]

    def _launch(self, slots: list[Slot], given: dict[int, SequenceRows]) -> _Read:
        tokens, arrived, _ = self._graphs.launch(slots, given, self._rows.kind)
        return cache(partial(_tokens_after, arrived, tokens))

    def _slots_of(self, jobs: Seq[DraftJob]) -> list[Slot]:
        """The slot of each job. When all are taken, those without a job are freed."""
        for job in jobs:
            held = self._slots.get(job.sampler)
            if held is not None and held[1] is not job.block_table:
                held = self._slots[job.sampler] = (Slot(held[0].index), job.block_table)
            if held is None:
                self._slots[job.sampler] = (Slot(self._free_index(jobs)), job.block_table)
        return [self._slots[job.sampler][0] for job in jobs]

    def _free_index(self, jobs: Seq[DraftJob]) -> int:
        if len(self._slots) == self._most:
            drafting = {job.sampler for job in jobs}
            self._slots = {each: held for each, held in self._slots.items() if each in drafting}
        used = {slot.index for slot, _ in self._slots.values()}
        return next(index for index in range(self._most) if index not in used)


def _tokens_after(arrived: torch.cuda.Event, tokens: Tensor) -> list[int]:
    arrived.synchronize()
    return list(map(int, tokens.tolist()))


def _read(steps: Seq[tuple[_Read, dict[int, int]]], number: int) -> list[int]:
    """The tokens of one job, from steps that each have the row of every job in them."""
    return [read()[rows[number]] for read, rows in steps if number in rows]


def _without_penalties(params: SamplingParams) -> SamplingParams:
    """The parameters without penalties, which would count tokens that only the host has."""
    return replace(params, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)


def _inputs(read: Callable[[], list[int]]) -> list[int]:
    """A draft's tokens as inputs of a step on the device: 0 where none could be sampled."""
    return [max(0, token) for token in read()]


def _until_none(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
