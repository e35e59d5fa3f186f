"""Steps on a device that samples the tokens itself, so that a step can be launched before the tokens of the one before
it are read: the host's work on them (text, stop strings, output) overlaps with the device. A prompt's first token is
sampled there too, and the decode step after it is launched before that token is read.

Rows with settings that the device cannot sample (log-probabilities, a constraint, penalties beside drafts) are sampled
on the host from a copy of their logits. Their sequences, and those with drafts of the host, have no row in a step that
is launched ahead (`Slot.waits`); all others have. Steps that draft on the device (draft_graphs.py) go on from the same
slots, and are launched ahead too.

In steps of many rows every row costs the host Python time: nearly all are continued as they are.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from quengine.kernels.kv.cache_types import blocks_for
from quengine.request.sequence import Sequence
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.device_rows import DeviceRows, Drafted
from quengine.runners.draft_graphs import DraftedSequence, DraftGraphs
from quengine.runners.graph_keys import GREEDY, SamplingKind
from quengine.slot import Slot
from quengine.step_plan import TOKENS_ALONE, GivenRows, SequenceRows, StepPlan, known_ids


class DeviceDecoder:
    """See the module docstring. With `graphs.shares_sequences` sequences may have drafts.

    drafting: launches steps that draft on the device; None: there are none.
    """

    def __init__(self, graphs: CudaGraphs) -> None:
        self.drafting: DraftGraphs | None = None
        self.most_rows = graphs.rows
        self._drafts = graphs.shares_sequences
        self._graphs, self._rows = graphs, DeviceRows(graphs)
        self._decoding = list[Slot]()

    def launch(self, plan: StepPlan) -> bool:
        """Launches a decode step without waiting; returns False for one of too many rows, which is not launched."""
        if plan.drafting:
            self._launch_drafting(plan)
            return True
        count = len(plan.sequences)
        if self._drafts:
            count += sum(len(sequence.draft) + sequence.replay for sequence in plan.sequences)
        if count > self.most_rows:
            for slot in plan.slots:
                slot.has_token, slot.undrafted, slot.reach = False, 0, 0
            return False
        self._decoding = plan.slots
        for slot in plan.slots if self.drafting is not None else ():
            slot.undrafted += slot.undrafted > 0
        if changed := self._update(plan):
            self._launch_changed(plan, changed)
        else:
            plan.tokens, plan.arrived, _ = self._graphs.launch(plan.slots, {}, self._rows.kind)
        return True

    def logits(self, rows: Seq[SequenceRows]) -> Tensor:
        """Logits fp32 [T, vocab] on the host after T rows that belong to no sequence, computed one after the other by
        the captured step of a single greedy sequence. The rows take the first slot, so no sequence may be running.

        rows: of one token each, with the same block tables and adapters."""
        slot = Slot(index=0, adapted=rows[0].adapters is not None)
        self._graphs.inputs.set_lag(slot.index, 0)
        self._graphs.set_adapters(slot.index, rows[0].adapters)
        found = list[Tensor]()
        for row in rows:
            self._rows.send_tables(slot, [table[: blocks_for(row.end)] for table in row.block_tables])
            _, arrived, logits = self._graphs.launch([slot], {0: row}, GREEDY, on_host=[0])
            arrived.synchronize()
            found.append(logits[0])
        return torch.stack(found)

    def _launch_drafting(self, plan: StepPlan) -> None:
        """Launches a step that drafts on the device, where the host gives what it knows of sequences that join."""
        assert self.drafting is not None
        self._decoding = plan.slots
        for sequence, slot in zip(plan.sequences, plan.slots, strict=True):
            self._send_tables(sequence, slot)
        self._rows.leave_penalties()
        self._rows.choose_kind(plan.slots, [slot.wanted for slot in plan.slots])
        parts, kind, window = list[DraftedSequence](), self._rows.kind, self.drafting.window
        for sequence, slot, room in zip(plan.sequences, plan.slots, plan.drafting, strict=True):
            if slot.kind != kind:
                self._rows.configure(slot, sequence.params, sequence.sampler, sequence.token_ids)
            self.drafting.configure(slot, kind, sequence.params, sequence.sampler)
            if self.drafting.goes_on(slot):
                parts.append(DraftedSequence(slot.index, *room))
            else:
                ids = sequence.token_ids
                parts.append(DraftedSequence(slot.index, *room, len(ids) - 1, ids[-window:]))
            slot.has_token, slot.waits, slot.undrafted = True, False, room.most + 1
        plan.tokens, plan.arrived = self.drafting.launch(kind, parts, max(plan.drafted))

    def launch_prompts(self, plan: StepPlan, given: GivenRows = TOKENS_ALONE) -> None:
        """Launches a step of prompts without waiting. Where it can, the device samples after the chunks that end with
        their sequence's newest token. given: rows that images give."""
        kinds, rows = dict[int, SamplingKind | None](), plan.sampled_rows
        for number in (row for row in rows if row is not None):
            sequence, slot = plan.sequences[number], plan.slots[number]
            self._send_tables(sequence, slot)
            kinds[number] = self._kind_of(sequence, slot)
        taking = [self._graphs.inputs.slots] * len(plan.slots)  # none
        if any(kind is not None for kind in kinds.values()):
            self._rows.choose_kind(self._decoding, kinds.values())
        on_device = [number for number, kind in kinds.items() if kind is not None]
        for number in on_device:
            taking[number] = plan.slots[number].index

        def configure() -> None:
            for number in on_device:
                sequence, slot = plan.sequences[number], plan.slots[number]
                self._rows.configure(slot, sequence.params, sequence.sampler, sequence.token_ids)

        on_host = [number for number, kind in kinds.items() if kind is None]
        launched = self._graphs.prefill(plan.chunks, taking, self._rows.kind, on_host, given, configure)
        for number, kind in kinds.items():
            plan.slots[number].has_token = kind is not None
        plan.sampled, (plan.tokens, plan.arrived, plan.logits) = rows, launched

    def _update(self, plan: StepPlan) -> dict[int, SamplingKind | None]:
        """Sends the device what it lacks of the sequences. Returns the numbers of the sequences whose next input the
        device does not have, with the kinds of sampling that they want (None: no sampling, or on the host)."""
        given, unset = dict[int, SamplingKind | None](), list[int]()
        kind = self._rows.kind
        # The others go on from a decode step in flight, the newest launch: what they have is of this kind.
        drafts = self._drafts or self.drafting is not None
        for number in range(len(plan.slots)) if drafts else plan.changed:
            sequence, slot = plan.sequences[number], plan.slots[number]
            tables = sequence.block_tables
            if not slot.written or len(tables) > 1 or len(tables[0]) != slot.written[0]:
                self._send_tables(sequence, slot)
            if not slot.has_token or sequence.draft:
                given[number] = self._kind_now(sequence, slot)
            if slot.kind is not kind:
                unset.append(number)
        if unset:
            self._set_sampling(plan, unset, given)
        return given

    def _send_tables(self, sequence: Sequence, slot: Slot) -> None:
        if not slot.written:
            slot.wanted = SamplingKind.of(sequence.params)
            self._graphs.inputs.set_lag(slot.index, 0 if sequence.images is None else sequence.images.lag)
            self._graphs.set_adapters(slot.index, sequence.adapters)
            slot.adapted = sequence.adapters is not None
        self._rows.send_tables(slot, sequence.block_tables)

    def _set_sampling(self, plan: StepPlan, unset: list[int], given: dict[int, SamplingKind | None]) -> None:
        """Sends the settings of the sequences that the device samples and that have none for the step's kind."""
        slots, before = plan.slots, self._rows.kind
        self._rows.choose_kind(slots, {given.get(n, slots[n].wanted) for n in unset})
        for number in range(len(slots)) if self._rows.kind != before else unset:
            sequence, slot = plan.sequences[number], slots[number]
            if given.get(number, slot.wanted) is not None and slot.kind != self._rows.kind:
                in_flight = sequence.num_cached_tokens + slot.launched - len(sequence.token_ids)
                self._rows.configure(slot, sequence.params, sequence.sampler, sequence.token_ids, in_flight)

    def _kind_now(self, sequence: Sequence, slot: Slot) -> SamplingKind | None:
        """The kind of sampling after the next row of a sequence; None: nothing is sampled, or the host samples."""
        return self._kind_of(sequence, slot) if sequence.next_is_newest else None

    def _kind_of(self, sequence: Sequence, slot: Slot) -> SamplingKind | None:
        """The kind of sampling of a sequence's tokens; None: the host does it."""
        # Penalties count the tokens before a row, which after a drafted token may differ from the device's.
        return None if self._drafts and sequence.params.penalizes else slot.wanted

    def _launch_changed(self, plan: StepPlan, kinds: dict[int, SamplingKind | None]) -> None:
        """Launches a step in which the host gives the inputs of some sequences, whose tokens are sampled as `kinds`."""
        given = dict[int, SequenceRows]()
        for number, kind in kinds.items():
            sequence, slot = plan.sequences[number], plan.slots[number]
            draft = sequence.draft
            ids = [*known_ids(sequence), *(draft.inputs if isinstance(draft, Drafted) else draft)]
            given[number] = SequenceRows(ids, plan.starts[number], sequence.block_tables)
            slot.waits = kind is None or len(ids) > 1
            slot.has_token = kind is not None and not draft
            slot.undrafted = 0
            if slot.waits:
                slot.reach = 0
        sampled, on_host, first = list[int | None](), list[int](), 0
        for number, sequence in enumerate(plan.sequences):
            if number not in given:
                sampled.append(first)
                first += 1
                continue
            rows, is_sampled = range(first, first + len(given[number].ids)), sequence.next_is_newest
            sampled.append(first + sequence.replay if is_sampled else None)
            on_host += rows if is_sampled and kinds[number] is None else ()
            first = rows.stop
        launched = self._graphs.launch(plan.slots, given, self._rows.kind, on_host)
        plan.sampled, (plan.tokens, plan.arrived, plan.logits) = sampled, launched
