"""Drafting on a device that samples by itself: all decode steps of a draft are launched before its tokens are read."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.device_rows import DeviceRows
from quengine.runners.graph_keys import SamplingKind
from quengine.sampler import Sampler
from quengine.slot import Slot
from quengine.speculative.draft_model import DraftJob


class DeviceDraftSteps:
    """`draft_model.DraftSteps` on a device, whose graphs allow as many pending steps as a draft has tokens.

    A sampler, which is that of one sequence, keeps its slot from draft to draft.
    """

    def __init__(self, graphs: CudaGraphs) -> None:
        self._rows = DeviceRows(graphs)
        self._groups, self._most = graphs.inputs.groups, graphs.inputs.slots
        self._slots: dict[Sampler, tuple[Slot, list[int]]] = {}

    def draft(self, jobs: Seq[DraftJob]) -> list[list[int]]:
        slots = self._slots_of(jobs)
        settings = [_without_penalties(job.sampler.params) for job in jobs]
        self._rows.choose_kind(slots, {SamplingKind.of(each) for each in settings})
        rows, newest = [], []
        for job, slot, params in zip(jobs, slots, settings, strict=True):
            self._rows.send_tables(slot, [job.block_table] * self._groups)
            if slot.kind != self._rows.kind:
                self._rows.configure(slot, params, job.sampler, [])
            rows += self._rows.given(slot, job.tokens, job.start)
            newest.append(len(rows) - 1)
        drafts: list[list[int]] = [[] for _ in jobs]
        steps = [(self._rows.launch(rows), dict(enumerate(newest)))]
        for made in range(1, max(job.count for job in jobs)):
            going_on = [number for number, job in enumerate(jobs) if job.count > made]
            step = self._rows.launch([slots[number].row for number in going_on])
            steps.append((step, {number: row for row, number in enumerate(going_on)}))
        for step, places in steps:
            tokens = step.wait()
            for number, row in places.items():
                drafts[number].append(tokens[row])
        return [_until_none(draft) for draft in drafts]

    def _slots_of(self, jobs: Seq[DraftJob]) -> list[Slot]:
        """The slot of each job; those without a job are free again where all are taken."""
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


def _without_penalties(params: SamplingParams) -> SamplingParams:
    """Penalties count tokens that only the host has."""
    return replace(params, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)


def _until_none(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
