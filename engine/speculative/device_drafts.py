"""Drafting on a device that samples by itself: all decode steps of a draft are launched before its tokens are read."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.decode_slots import DecodeRow, DecodeSlots, Slot
from quengine.runners.graph_keys import SamplingKind
from quengine.speculative.draft_model import DraftJob


class DeviceDraftSteps:
    """`draft_model.DraftSteps` on a device, whose graphs allow as many pending steps as a draft has tokens."""

    def __init__(self, graphs: CudaGraphs) -> None:
        self._slots = DecodeSlots(graphs)
        self._groups = graphs.inputs.groups

    def draft(self, jobs: Seq[DraftJob]) -> list[list[int]]:
        # Jobs whose drafts go on come first, so that the steps after the first one are smaller.
        rows = sorted(
            (row for job in jobs for row in _rows_of(job, self._groups)), key=lambda row: row.number > 0
        )
        slots, _ = self._slots.place(rows)
        self._slots.launch(slots)
        going_on = list(zip(jobs, slots, strict=False))
        for made in range(1, max(job.count for job in jobs)):
            going_on = [(job, slot) for job, slot in going_on if job.count > made]
            kept = [slot for _, slot in going_on]
            self._slots.keep(kept)
            self._slots.launch(kept)
        newest = slots[: len(jobs)]
        drafts = [_until_none(slot.chosen()) for slot in newest]
        for slot in slots:
            _take_all(slot)
        return drafts


def _rows_of(job: DraftJob, groups: int) -> list[DecodeRow]:
    """One row for each token of the job; the newest has number 0. All cache groups keep all positions."""
    sampler, last = job.sampler, len(job.tokens) - 1
    # Without penalties, as they count tokens that only the host has.
    params = replace(sampler.params, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    kind, tables = SamplingKind.of(params), (job.block_table,) * groups
    entries = (job.start + len(job.tokens) + job.count) // BLOCK_SIZE + 1
    return [
        DecodeRow(sampler, last - n, token, job.start + n, tables, entries, params, sampler, kind, [])
        for n, token in enumerate(job.tokens)
    ]


def _take_all(slot: Slot) -> None:
    while slot.ready:
        slot.take()


def _until_none(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
