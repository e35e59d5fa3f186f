"""Steps that draft on a device, over the reference backend: what `DraftGraphs` computes, by the definitions."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from quengine import LLM, SamplingParams
from quengine.kernels.draft_rows import Drafting, Newest, accept, enter, rows_of
from quengine.kernels.forward_batch import ForwardBatch, PendingStates
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.draft_graphs import MOST_PAUSE, DraftedSequence
from quengine.slot import Slot
from quengine.speculative.draft_model import DraftModel
from tests.engine.test_steps_ahead import Device, End


class DraftDevice:
    """`draft_graphs.DraftGraphs` beside a `Device`, whose log it writes to. drafted: the drafts of all steps. oracle:
    the token that a slot's draft has at a position in place of the layer's; None: the layer's."""

    def __init__(self, llm: LLM, device: Device, most: int, rows: int) -> None:
        assert isinstance(llm.loaded.draft, DraftModel)
        self._target, self._layer = llm.runner, llm.loaded.draft._runner
        self._device, self.most, self._rows = device, most, rows
        self._unused = device.inputs.slots
        held = slice(self._unused + 1)
        of_slots = device.inputs.of_slots
        history = torch.zeros(self._unused + 1, llm.ctx_size, dtype=torch.int32)
        self._newest = Newest(of_slots.tokens[held], of_slots.positions[held], history)
        self._tables = of_slots.tables[:, held]
        self._drafted = torch.zeros_like(history)
        self._configured: set[Slot] = set()
        self.drafted: list[list[int]] = []
        self.oracle: Callable[[int, int], int | None] = lambda _slot, _position: None

    @property
    def window(self) -> int:
        return self.most + 1 + MOST_PAUSE

    def goes_on(self, slot: Slot) -> bool:
        return 0 < slot.undrafted <= self.window

    def most_drafted(self, sequences: int) -> int:
        return max(0, min(self.most, self._rows // sequences - 1))

    def configure(self, slot: Slot, *_settings: Any) -> None:
        self._configured.add(slot)

    def warm_up(self, *settings: SamplingParams) -> None: ...

    def capture_next(self) -> bool:
        return False

    @torch.no_grad()
    def launch(self, _kind: Any, sequences: Seq[DraftedSequence], count: int) -> tuple[Tensor, End]:
        """Sequences of a padded step, in which others of no consequence stand."""
        self._device.inputs.send()
        padding = DraftedSequence(self._unused, count, 64)
        parts = [*sequences, *[padding] * (len(sequences) % 2)]
        recent = torch.zeros(len(parts), self.window, dtype=torch.int32)
        for number, part in enumerate(parts):
            if part.position >= 0:
                known = torch.tensor(part.recent, dtype=torch.int32)
                recent[number, self.window - len(known) :] = known
        columns = [
            torch.tensor(column, dtype=torch.int32) for column in zip(*(p[:4] for p in parts), strict=True)
        ]
        drafting = Drafting(*columns, recent)
        enter(drafting, self._newest)
        self._draft(drafting, count)
        placed = rows_of(drafting, self._newest, self._drafted, self._tables, 0, count + 1)
        pending = list[PendingStates]()
        batch = ForwardBatch("decode", *placed[:3], shares_sequences=True, pending=pending)
        logits = self._target.decoder.forward(batch, self._target.cache.layers).float()
        rows = zip(placed.slots.tolist(), logits, (placed.positions + 1).tolist(), strict=True)
        sampled = torch.tensor([self._sampled(*row) for row in rows])
        accepted, results = accept(drafting, self._newest, self._drafted, sampled)
        for states in pending:
            states.advance(accepted)
        self._device.log.append(f"drafts {len(sequences)}")
        end = End(self._device.log)
        self.drafted += [draft for n in range(len(sequences)) if (draft := self._of(results, n, count))]
        return results.flatten(), end

    def _of(self, results: Tensor, number: int, count: int) -> list[int]:
        return [token for token in results[number, count + 1 :].tolist() if token >= 0]

    def _draft(self, drafting: Drafting, count: int) -> None:
        for made in range(count):
            known = self._drafted if made else self._newest.history
            first, rows = (made, 1) if made else (1 - self.window, self.window)
            placed = rows_of(drafting, self._newest, known, self._tables[:1], first, rows)
            last = torch.arange(rows - 1, len(placed.slots), rows)
            batch = ForwardBatch("decode", *placed[:3], logits_rows=last, shares_sequences=not made)
            logits = self._layer.decoder.forward(batch, self._layer.cache.layers).float()
            self._note(drafting, logits, placed.last)

    def _note(self, drafting: Drafting, logits: Tensor, last: Tensor) -> None:
        """Writes the drafted tokens after rows at positions `last`."""
        for slot, row, at in zip(drafting.slots.tolist(), logits, (last + 1).tolist(), strict=True):
            if at < self._drafted.shape[1]:
                other = self.oracle(slot, at)
                self._drafted[slot, at] = self._sampled(slot, row, at) if other is None else other

    def _sampled(self, slot: int, logits: Tensor, position: int) -> int:
        return self._device._sampled(slot, logits, position) if slot != self._unused else 0


def drafts_on_device(
    llm: LLM, most: int, rows: int = 32, kind: type[DraftDevice] = DraftDevice
) -> tuple[Device, DraftDevice]:
    """Have a device choose a model's tokens, and draft by the model's own layer, or as `kind` does."""
    device = Device(llm)
    decoder = DeviceDecoder(device)  # type: ignore[arg-type]
    drafting = kind(llm, device, most, rows)
    decoder.drafting = drafting  # type: ignore[assignment]
    llm.runner.device_decoder = decoder
    assert isinstance(llm.loaded.draft, DraftModel)
    llm.loaded.draft._on_device = drafting
    schedule_anew(llm)
    assert llm.speculation is not None
    llm.speculation.clock = lambda: 0.0  # lengths do not depend on this machine
    return device, drafting


def schedule_anew(llm: LLM) -> None:
    """Have a new scheduler plan the steps, as its runner and its cache are by now."""
    assert llm.speculation is not None
    llm.scheduler = llm._make_scheduler()
    llm.speculation._scheduler = llm.scheduler
    llm.scheduler.holds_back = llm.speculation.may_draft
