"""The state of sampling on the device: the sequences' tokens, their settings, and workspace."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from quengine.errors import EngineError
from quengine.kernels.cuda.sampling.batch_rows import ChosenTokens
from quengine.kernels.sampling import sharpness

MAX_CAPACITY = 128
"""Largest top-k of the two-launch path; above it, or without top-k, every token is a candidate."""

FULL_BLOCK = 1024
"""Logits per block in the first two of the three launches."""

BINS = 2048
"""Buckets into which one pass sorts the candidates of a row."""

NOTES = 5
"""Numbers that the third launch keeps per row: the length of its list, and the four bounds of the tokens in play."""

PLANES = 5
"""Sums per bucket: tokens, masses at temperature 1, masses at the row's temperature, moments, and scratch."""


@dataclass(frozen=True)
class DecodeState:
    """The slots that a decode step of B rows samples for, and advances.

    tokens: int64 [S], each slot's newest token; positions: int32 [S], its position; history: int32 [S, context], the
    tokens by position. slots, targets: int32 [B], see `batch_rows.StepRows`. row_positions: int32 [B], the positions of
    the rows. chosen: takes the tokens of rows for the host.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    history: torch.Tensor
    slots: torch.Tensor
    targets: torch.Tensor
    row_positions: torch.Tensor
    chosen: ChosenTokens

    @classmethod
    def allocate(cls, batch: int, context: int, device: torch.device) -> "DecodeState":
        """The state of `batch` rows; row i has slot i in every step."""
        positions = torch.zeros(batch, dtype=torch.int32, device=device)
        slots = torch.arange(batch, dtype=torch.int32, device=device)
        return cls(
            torch.zeros(batch, dtype=torch.int64, device=device),
            positions,
            torch.zeros(batch, context, dtype=torch.int32, device=device),
            slots,
            slots,
            positions,
            ChosenTokens(
                ChosenTokens.allocate(1, batch, device).tokens,
                torch.zeros(1, dtype=torch.int32, device=device),
            ),
        )


@dataclass(frozen=True)
class SamplingSettings:
    """The sampling settings of one sequence; names and ranges as in `quengine.kernels.sampling.sample`."""

    temperature: float = 0.8
    top_k: int = 40
    typical_p: float = 1.0
    top_p: float = 0.95
    min_p: float = 0.05
    repeat: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    repeat_last_n: int = 64
    seed: int = 0
    stream: int = 0

    @property
    def penalizes(self) -> bool:
        return self.repeat != 1.0 or self.presence != 0.0 or self.frequency != 0.0

    def floats(self) -> list[float]:
        """The row of SamplingBuffers.floats."""
        sharp = 0.0 if self.temperature == 0 else sharpness(self.temperature)
        least = math.log(self.min_p) if self.min_p > 0 else -math.inf
        penalties = [self.repeat, self.presence, self.frequency]
        return [sharp, self.typical_p, self.top_p, least, *penalties]

    def ints(self) -> list[int]:
        """The row of SamplingBuffers.ints."""
        seed = self.seed - (1 << 64) if self.seed >= 1 << 63 else self.seed
        return [max(0, self.top_k), seed, self.stream, self.repeat_last_n]


@dataclass(frozen=True)
class FullRoom:
    """Workspace to sample B rows with every token a candidate.

    edges: int64 [B, 2, blocks], the best and the worst key of each block; planes: int64 [B, PLANES, BINS]; ids: int32
    [B, V], a bucket's tokens; notes: int64 [B, NOTES], their number, and the bounds of the tokens in play; adjusted:
    fp32 [B, V], the logits after bias and penalties, or None without them.
    """

    edges: torch.Tensor
    planes: torch.Tensor
    ids: torch.Tensor
    notes: torch.Tensor
    adjusted: torch.Tensor | None

    @classmethod
    def allocate(cls, batch: int, vocab: int, device: torch.device, adjusts: bool) -> "FullRoom":
        blocks = triton.cdiv(vocab, FULL_BLOCK)
        return cls(
            torch.empty(batch, 2, blocks, dtype=torch.int64, device=device),
            torch.zeros(batch, PLANES, BINS, dtype=torch.int64, device=device),
            torch.empty(batch, vocab, dtype=torch.int32, device=device),
            torch.zeros(batch, NOTES, dtype=torch.int64, device=device),
            torch.empty(batch, vocab, dtype=torch.float32, device=device) if adjusts else None,
        )


@dataclass(frozen=True)
class SamplingBuffers:
    """Settings of B slots on the device, and workspace for sampling B rows.

    floats: fp64 [B, 7] (sharpness or 0 for greedy, typical_p, top_p, log of min_p, repeat, presence, frequency); ints:
    int64 [B, 4] (top_k or 0, seed, stream, repeat_last_n); bias: fp64 [B, V] or None; counts: int32 [B, V],
    occurrences of each token in the penalties' window, or None without penalties. `capacity`: 1 if all rows are greedy;
    0 if some row has no top-k or one above MAX_CAPACITY; else a power of two, 64 or more, that holds the largest top-k.
    keys: int64 [B, blocks, capacity], or None where capacity is 0; then, and only then, `full` is given.
    """

    capacity: int
    vocab: int
    floats: torch.Tensor
    ints: torch.Tensor
    keys: torch.Tensor | None
    full: FullRoom | None
    bias: torch.Tensor | None
    counts: torch.Tensor | None

    @property
    def bias_plane(self) -> torch.Tensor:
        """The kernel's argument for `bias`; without one, a tensor that is not read."""
        return self.floats if self.bias is None else self.bias

    @property
    def count_plane(self) -> torch.Tensor:
        """As `bias_plane`, for `counts`."""
        return self.ints if self.counts is None else self.counts

    def check(self, logits: torch.Tensor, state: DecodeState) -> None:
        """Asserts that these buffers can sample logits [B, V] with `state`."""
        batch, vocab = logits.shape
        assert logits.dtype == torch.float32 and logits.is_contiguous() and vocab == self.vocab
        assert min(len(state.slots), len(state.row_positions)) >= batch
        assert self.floats.shape[0] >= max(batch, len(state.tokens))

    @classmethod
    def allocate(
        cls, batch: int, vocab: int, top_k: int, device: torch.device, bias: bool, penalties: bool
    ) -> "SamplingBuffers":
        """Buffers for settings with a top-k of up to `top_k`. 1: greedy settings; 0 or above MAX_CAPACITY: any
        settings.
        """
        if not 1 <= top_k <= MAX_CAPACITY:
            capacity = 0
        else:
            capacity = 1 if top_k == 1 else max(64, triton.next_power_of_2(top_k))
        blocks = triton.cdiv(vocab, block_size(vocab))
        return cls(
            capacity,
            vocab,
            torch.zeros(batch, 7, dtype=torch.float64, device=device),
            torch.zeros(batch, 4, dtype=torch.int64, device=device),
            torch.empty(batch, blocks, capacity, dtype=torch.int64, device=device) if capacity else None,
            None if capacity else FullRoom.allocate(batch, vocab, device, bias or penalties),
            torch.zeros(batch, vocab, dtype=torch.float64, device=device) if bias else None,
            torch.zeros(batch, vocab, dtype=torch.int32, device=device) if penalties else None,
        )

    def set(
        self, slot: int, settings: SamplingSettings, history: torch.Tensor, bias: dict[int, float]
    ) -> None:
        """Sets the settings of a slot. history: int32 on the device, its tokens so far. Penalties count the tokens
        within their window and those that steps in flight append; no wait is needed.

        Raises EngineError if the buffers were allocated without room for these settings.
        """
        s = settings
        if s.temperature > 0 and self.capacity and not 1 <= s.top_k <= self.capacity:
            raise EngineError(f"top-k {s.top_k} does not fit the {self.capacity} candidates allocated for it")
        if bias and self.bias is None:
            raise EngineError("logit bias was given to buffers allocated without it")
        if s.penalizes and self.counts is None:
            raise EngineError("penalties were given to buffers allocated without them")
        send(s.floats(), self.floats[slot])
        send(s.ints(), self.ints[slot])
        if self.bias is not None:
            of_slot = self.bias[slot].zero_()
            if bias:
                ids = send(list(bias), self.ints.new_empty(len(bias)))
                of_slot.index_copy_(0, ids, send(list(bias.values()), of_slot.new_empty(len(bias))))
        if self.counts is not None:
            window = history if s.repeat_last_n < 0 else history[max(0, len(history) - s.repeat_last_n) :]
            counts = self.counts[slot].zero_()
            counts.index_add_(0, window.clamp(min=0), torch.ones_like(window))


def send(values: Sequence[float], to: torch.Tensor) -> torch.Tensor:
    """Copies numbers to `to` in stream order, without waiting for the device; returns it."""
    made = torch.tensor(values, dtype=to.dtype)
    return to.copy_(made.pin_memory() if to.is_cuda else made, non_blocking=True)


def block_size(vocab: int) -> int:
    """Logits per block in the first launch: more for a large vocabulary, so that the second has few to merge."""
    return 1024 if vocab <= 65536 else 4096
