"""What a compiled step, or an operation, reads beside weights and caches: tokens, positions, cache rows, slots."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cpu.attention.attention import Seen, Visible
from quengine.kernels.cpu.moe.router import checked_experts
from quengine.kernels.cpu.ops.rope_store import checked_angles, checked_slots
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.moe.router import Router


class StepInputs(Protocol):
    """The inputs of operations, at addresses that kernels read when they run; `group`: a cache group."""

    def tokens(self, vocabulary: int) -> Tensor:
        """The token ids: int64 [rows], below `vocabulary`."""
        ...

    def tokens_within(self, rows: int) -> Tensor:
        """The token ids: int64 [rows], with 0 in place of ids from `rows` on."""
        ...

    def cache_rows(self, group: int, context: int, layer: KVLayer) -> tuple[Tensor, Tensor]:
        """Positions, below `context`, and the rows of `layer` that they are stored in: int64 [rows] both."""
        ...

    def angle_rows(self, spec: AttentionSpec) -> Tensor | None:
        """The rows of the rotary tables: int64 [rows]; None: the positions."""
        ...

    def visible(self, group: int, context: int, seen: Seen) -> Visible:
        """The positions that each row sees."""
        ...

    def states(self, group: int) -> tuple[Tensor, Tensor]:
        """Positions int64 [rows], and int64 [rows, ...] with the slots in the first column."""
        ...

    def chosen(self, experts: Tensor | None, router: Router) -> Tensor | None:
        """Experts that rows are to use, int32 [rows, k]."""
        ...


class BatchInputs:
    """The inputs of one batch, checked: an operation outside the cache or the embedding raises ValueError.

    `first`: the first row of an operation that continues from states.
    """

    def __init__(self, batch: ForwardBatch, first: int = 0) -> None:
        self._batch, self._first = batch, first

    def tokens(self, vocabulary: int) -> Tensor:
        ids = self._batch.token_ids
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(f"the embedding has rows 0 to {vocabulary - 1}, not {ids.tolist()}")
        return ids.contiguous()

    def tokens_within(self, rows: int) -> Tensor:
        ids = self._batch.token_ids
        return ids.where(ids < rows, 0).contiguous()

    def cache_rows(self, group: int, context: int, layer: KVLayer) -> tuple[Tensor, Tensor]:
        return checked_slots(self._batch, group, context, layer)

    def angle_rows(self, spec: AttentionSpec) -> Tensor | None:
        return checked_angles(self._batch, spec)

    def visible(self, group: int, context: int, seen: Seen) -> Visible:
        lengths = (self._batch.positions + 1).tolist()
        visible = Visible(min(max(lengths), seen.most(context)), self._batch.block_tables_of(group).long())
        visible.set(lengths, seen)
        return visible

    def states(self, group: int) -> tuple[Tensor, Tensor]:
        batch = self._batch
        slots = batch.slots_of(group).to(torch.int64).view(-1, 1)
        if batch.phase == "prefill":
            if len(batch.query_lens) == 1:
                slots = slots.expand(len(batch), 1)
            else:
                slots = slots.repeat_interleave(torch.tensor(batch.query_lens), 0)
        return batch.positions.to(torch.int64)[self._first :], slots[self._first :]

    def chosen(self, experts: Tensor | None, router: Router) -> Tensor | None:
        return None if experts is None else checked_experts(experts, router)


class RunInputs:
    """The inputs of a step that is run again and again, which each run fills in and checks (step.py).

    ids, positions, angles: int64 [rows]; slots: int64 [groups, rows], the cache rows for the tokens' keys and values;
    tables: int64 [groups, rows, blocks]. `vocabulary`, `context`: what recorded operations allow.
    """

    def __init__(self, rows: int, blocks: int, groups: int) -> None:
        self.ids = torch.zeros(rows, dtype=torch.int64)
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.angles = torch.zeros(rows, dtype=torch.int64)
        self.slots = torch.zeros(groups, rows, dtype=torch.int64)
        self.tables = torch.zeros(groups, rows, blocks, dtype=torch.int64)
        self.vocabulary, self.context = 0, blocks * BLOCK_SIZE
        self.within: dict[int, Tensor] = {}
        """Number of a table's rows -> the tokens, with 0 for those past its end."""
        self._visible: dict[tuple[int, int, Seen], Visible] = {}

    def tokens(self, vocabulary: int) -> Tensor:
        self.vocabulary = vocabulary
        return self.ids

    def tokens_within(self, rows: int) -> Tensor:
        return self.within.setdefault(rows, torch.zeros_like(self.ids))

    def cache_rows(self, group: int, context: int, _layer: KVLayer) -> tuple[Tensor, Tensor]:
        self.context = min(self.context, context)
        return self.positions, self.slots[group]

    def angle_rows(self, _spec: AttentionSpec) -> Tensor:
        return self.angles

    def visible(self, group: int, context: int, seen: Seen) -> Visible:
        """One `Visible` for all layers with the same arguments."""
        context = min(context, self.tables.shape[2] * BLOCK_SIZE)
        if (group, context, seen) not in self._visible:
            self._visible[group, context, seen] = Visible(seen.most(context), self.tables[group])
        return self._visible[group, context, seen]

    def states(self, group: int) -> tuple[Tensor, Tensor]:
        return self.positions, self.tables[group]

    def chosen(self, experts: Tensor | None, _router: Router) -> Tensor | None:
        return experts
