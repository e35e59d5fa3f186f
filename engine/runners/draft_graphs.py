"""Captured steps in which a model's own layer drafts and the model verifies and accepts, all of it on a CUDA device.

A step is one graph. It computes the layer's rows, a decode step of the layer for each drafted token but the first, and
the model's step over the newest token and the drafted ones. It then accepts tokens (kernels/draft_rows.py), and
advances recurrent states over them. It reads and writes the same tables by slot as plain decode steps (`CudaGraphs`),
so it can be launched before the results of the step ahead are read, and either kind may follow the other.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quengine.kernels.backend import LayerState
from quengine.kernels.cuda.backend import has_dependent_launch
from quengine.kernels.cuda.sampling.batch_rows import ChosenTokens
from quengine.kernels.cuda.sampling.draft_rows import accept, enter, place
from quengine.kernels.cuda.sampling.sampling import DecodeState, SamplingBuffers, sample_step
from quengine.kernels.draft_rows import Drafting, Newest, PlacedRows
from quengine.kernels.forward_batch import ForwardBatch, PendingStates
from quengine.models.decoder import Decoder
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_graphs import PENDING, CudaGraphs, settings_of
from quengine.runners.graph_capture import CapturedStep, capture_step
from quengine.runners.graph_keys import (
    DECODE_ROWS,
    GREEDY,
    UNMOVED_ROWS,
    SamplingKind,
    aligned,
    padded_rows,
)
from quengine.sampler import Sampler
from quengine.slot import Slot

MOST_PAUSE = 2
"""Steps of a sequence without a draft after which the device drafts again without the host."""


class DraftKey(NamedTuple):
    """The key of a captured step: padded number of sequences, drafted tokens of each, and the sampling."""

    sequences: int
    drafted: int
    sampling: SamplingKind


class DraftedSequence(NamedTuple):
    """A sequence's part of a step.

    Attributes:
        slot: its number.
        most: drafted tokens at most.
        end: the first position that has no block, or is not to be computed.
        position: of the newest token, where the host gives it; -1: the device has it.
        recent: with `position`, tokens up to the newest: the last `window` ones, or all.
    """

    slot: int
    most: int
    end: int
    position: int = -1
    recent: Seq[int] = ()


class DraftGraphs:
    """See the module docstring.

    Args:
        target: the graphs of the model, whose tables by slot are read and written.
        decoder, cache: the layer, and its keys and values, over the target's block tables of the first cache group.
        most: most drafted tokens of a sequence.
        rows: most rows of the model in a step.
        capture: `graph_capture.capture_step`.
    """

    def __init__(
        self,
        target: CudaGraphs,
        decoder: Decoder,
        cache: Seq[LayerState],
        most: int,
        rows: int,
        capture: Callable[[Callable[[], Tensor], Callable[[], Tensor], Any], CapturedStep] = capture_step,
    ) -> None:
        self._target, self._decoder, self._cache, self.most = target, decoder, cache, most
        self._rows = min(rows, target.rows, UNMOVED_ROWS)
        self._unused = target.inputs.slots
        held, of_slots = slice(self._unused + 1), target.inputs.of_slots
        self._newest = Newest(of_slots.tokens[held], of_slots.positions[held], target.history[held])
        self._tables = of_slots.tables[:, held]
        self._device = device = target.history.device
        self._sequences = max(size for size in DECODE_ROWS if self._fits(size, 1) or size == 1)
        self._inputs = torch.zeros((4 + self.window) * self._sequences, dtype=torch.int32, device=device)
        self._sent: list[int] = []
        # The layer's newest tokens. Sampling also writes the model's, which `accept` then overwrites.
        self._drafted = Newest(*(torch.zeros_like(part) for part in self._newest))
        self._nowhere = torch.full((self._rows,), self._unused, dtype=torch.int32, device=device)
        ring = ChosenTokens.allocate(PENDING, self._sequences * (2 * most + 1), device)
        self._results, self._turn = ring.tokens, ring.turn
        turn = torch.zeros(1, dtype=torch.int32, device=device)
        sampled = torch.zeros(1, self._rows, dtype=torch.int64, device=device)
        self._sampled = ChosenTokens(sampled, turn)
        self._unread = ChosenTokens(torch.zeros_like(sampled), turn)
        events = range(0 if device.type == "meta" else PENDING)
        self._events = [torch.cuda.Event() for _ in events]  # type: ignore[no-untyped-call]
        self._launched = 0
        self._lasts: dict[int, Tensor] = {}
        self._buffers: dict[SamplingKind, SamplingBuffers] = {}
        self._kinds: WeakKeyDictionary[Slot, SamplingKind] = WeakKeyDictionary()
        self._steps: dict[DraftKey, CapturedStep] = {}
        self._capture_step = capture
        self._pool: Any = None

    @property
    def window(self) -> int:
        """Rows, up to the newest token, that the layer computes for each sequence: those that its last draft may have
        added, one more, and those of a pause."""
        return self.most + 1 + MOST_PAUSE

    def goes_on(self, slot: Slot) -> bool:
        """Whether a step drafts after a slot's newest token without the host: the device has it, and the rows that the
        layer lacks are within the window."""
        return 0 < slot.undrafted <= self.window

    def most_drafted(self, sequences: int) -> int:
        """Most drafted tokens of each of `sequences` sequences in a step; 0: they take too many rows."""
        sizes = range(self.most, 0, -1) if sequences <= DECODE_ROWS[-1] else ()
        return next((count for count in sizes if self._fits(padded_rows(sequences), count)), 0)

    def _fits(self, sequences: int, count: int) -> bool:
        return sequences * (count + 1) <= self._rows and sequences * self.window <= UNMOVED_ROWS

    def configure(self, slot: Slot, kind: SamplingKind, params: SamplingParams, sampler: Sampler) -> None:
        """Sets the sampling of a slot's drafts in steps of `kind`, unless it is set: like its tokens', without
        penalties."""
        if self._kinds.get(slot) == kind:
            return
        vocab = self._decoder.config.vocab_size
        plain = replace(params, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab}
        history = self._drafted.history[slot.index, :0]
        self._draft_buffers(kind).set(slot.index, settings_of(plain, sampler), history, bias)
        self._kinds[slot] = kind

    @torch.no_grad()
    def launch(
        self, kind: SamplingKind, sequences: Seq[DraftedSequence], count: int
    ) -> tuple[Tensor, torch.cuda.Event]:
        """Starts a step of these sequences, with drafts of up to `count` tokens. Returns its `tokens` and `arrived`, as
        in `StepPlan`, without waiting. The caller has set the sequences' block tables in the target's inputs, and their
        sampling by `configure` of both graphs."""
        key = DraftKey(padded_rows(len(sequences)), count, kind)
        assert 1 <= count <= self.most_drafted(len(sequences))
        step = self.capture(key)
        self._target.inputs.send()
        self._send(sequences)
        step.graph.replay()
        number = self._launched % PENDING
        self._launched += 1
        self._events[number].record()
        return self._results[number], self._events[number]

    @torch.no_grad()
    def capture(self, key: DraftKey) -> CapturedStep:
        """The captured step of a key, captured now if missing."""
        step = self._steps.get(key)
        if step is None:
            if self._pool is None and self._device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            self._draft_buffers(key.sampling), self._target.sampling_buffers(key.sampling)
            self._send([])
            step = self._capture_step(lambda: self.run(key), lambda: self.run(key), self._pool)
            self._turn.fill_((self._launched - 1) % PENDING)
            self._steps[key] = step
        return step

    def warm_up(self, *settings: SamplingParams) -> None:
        """Captures the steps of one sequence with these settings."""
        for kind in dict.fromkeys(SamplingKind.of(params) or GREEDY for params in settings):
            if not kind.penalties:
                for count in range(self.most_drafted(1), 0, -1):
                    self.capture(DraftKey(1, count, kind))

    def capture_next(self) -> bool:
        """Captures one more step of ordinary requests; False if none is left."""
        key = next((each for each in self.ordinary if each not in self._steps), None)
        if key is not None:
            self.capture(key)
        return key is not None

    def run_ordinary(self) -> None:
        """Runs the steps of ordinary requests of all sizes on padding, uncaptured, to compile their kernels."""
        for key in self.ordinary:
            self.run(key)

    @property
    def ordinary(self) -> list[DraftKey]:
        """The keys of the steps of ordinary requests: greedy and with default settings."""
        settings = SamplingParams(temperature=0), SamplingParams()
        return [
            DraftKey(size, count, SamplingKind.of(params) or GREEDY)
            for params in settings
            for size in DECODE_ROWS
            for count in range(self.most_drafted(size), 0, -1)
            if size <= padded_rows(min(self._unused, DECODE_ROWS[-1]))
        ]

    @torch.no_grad()
    def run(self, key: DraftKey) -> Tensor:
        """Runs a step, uncaptured, on the sequences that were sent; returns where its results are stored.

        The model's logits are not kept, so that captured steps share their memory.
        """
        drafting, pdl = self._drafting(key), has_dependent_launch(self._device)
        enter(drafting, self._newest, self._turn, len(self._results), pdl)
        self._draft(key, drafting, pdl)
        rows = self._place(drafting, self._drafted.history, self._tables, 0, key.drafted + 1, pdl)
        pending = list[PendingStates]()
        batch = ForwardBatch("decode", *rows[:3], shares_sequences=True, pending=pending)
        logits = self._target.decoder.forward(batch, self._target.cache.layers)
        taking = rows.slots, self._nowhere, rows.positions
        state = DecodeState(*self._newest, *taking, self._sampled)
        sample_step(logits, state, self._target.sampling_buffers(key.sampling), pdl)
        accepted = torch.empty(key.sequences, dtype=torch.int32, device=self._device)
        sampled = self._sampled.tokens[0, : len(rows.slots)]
        drafted = self._drafted.history
        accept(drafting, self._newest, drafted, sampled, accepted, self._results, self._turn, pdl)
        for states in pending:
            states.advance(accepted)
        return self._results

    def _draft(self, key: DraftKey, drafting: Drafting, pdl: bool) -> None:
        """Runs the layer's steps: one over the newest tokens, whose rows of the model are complete by now, then one for
        each further drafted token."""
        buffers, count = self._draft_buffers(key.sampling), key.drafted
        for made in range(count):
            first, rows = (made, 1) if made else (1 - self.window, self.window)
            known = self._drafted.history if made else self._newest.history
            placed = self._place(drafting, known, self._tables[:1], first, rows, pdl)
            last = None if made else self._last_rows(key.sequences)
            batch = ForwardBatch("decode", *placed[:3], logits_rows=last, shares_sequences=not made)
            logits = self._decoder.forward(batch, self._cache)
            taking = drafting.slots, drafting.slots, placed.last
            sample_step(logits, DecodeState(*self._drafted, *taking, self._unread), buffers, pdl)

    def _place(
        self, drafting: Drafting, known: Tensor, tables: Tensor, first: int, count: int, pdl: bool
    ) -> PlacedRows:
        sequences, device = len(drafting.slots), self._device
        rows = sequences * count
        positions, slots, last = (
            torch.empty(size, dtype=torch.int32, device=device) for size in (rows, rows, sequences)
        )
        # Each group's tables start where a kernel may load 16 bytes at a time.
        held = torch.empty(len(tables), aligned(rows), tables.shape[2], dtype=torch.int32, device=device)
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        placed = PlacedRows(tokens, positions, held[:, :rows], slots, last)
        place(drafting, self._newest, known, tables, first, count, placed, pdl)
        return placed

    def _drafting(self, key: DraftKey) -> Drafting:
        """The inputs of a step of this size."""
        most, size = self._sequences, key.sequences
        slots, counts, ends, positions = self._inputs[: 4 * most].view(4, most)[:, :size]
        recent = self._inputs[4 * most : 4 * most + size * self.window]
        return Drafting(slots, counts, ends, positions, recent.view(size, self.window))

    def _last_rows(self, sequences: int) -> Tensor:
        """The last row of each sequence in the layer's first step: int64 [sequences]."""
        if sequences not in self._lasts:
            made = torch.arange(1, sequences + 1, device=self._device) * self.window - 1
            self._lasts[sequences] = made
        return self._lasts[sequences]

    def _send(self, sequences: Seq[DraftedSequence]) -> None:
        """Makes these the sequences of the next step, in stream order, without waiting for the device."""
        most, width = self._sequences, self.window
        entries = (
            [self._unused] * most + [0] * (2 * most) + [-1] * most + [0] * (len(self._inputs) - 4 * most)
        )
        for number, each in enumerate(sequences):
            entries[number : 4 * most : most] = each[:4]
            if each.position >= 0:
                end = 4 * most + (number + 1) * width
                recent = each.recent[-width:]
                entries[end - len(recent) : end] = recent
        if entries != self._sent:
            made = torch.tensor(entries, dtype=torch.int32)
            self._inputs.copy_(made.pin_memory() if self._inputs.is_cuda else made, non_blocking=True)
            self._sent = entries

    def _draft_buffers(self, kind: SamplingKind) -> SamplingBuffers:
        if kind not in self._buffers:
            vocab, rows = self._decoder.config.vocab_size, max(self._unused + 1, self._sequences)
            made = SamplingBuffers.allocate(rows, vocab, kind.top_k, self._device, kind.bias, kind.penalties)
            self._buffers[kind] = made
        return self._buffers[kind]
