"""What a launch of decode attention is given: one record, whichever kernel serves it, and the room for its slices.

Knows the arguments that the kernels share, in the order in which both take them; not what a kernel does.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.kv_store import KVStore
from quengine.kernels.cuda.attention.rope import rotation_arguments, rotation_constants, table_arguments
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.kv.cache_types import BLOCK_SIZE

_TARGET_BLOCKS = 128
"""Blocks wanted for one sequence: a constant, not this GPU's count of multiprocessors, so that the slices,
and with them the last bits of a result, are the same on every GPU."""

_LOG2_E = 1.4426950408889634
"""Scores are in base 2: exp2 is one instruction."""


def slice_count(kv_heads: int) -> int:
    """How many slices a sequence's cache is cut into at most: a power of two, 2 to 64."""
    return int(min(64, max(2, triton.next_power_of_2(_TARGET_BLOCKS // kv_heads))))


@dataclass(frozen=True)
class DecodeWorkspace:
    """What the slices of one launch leave for the combination; reused by every layer.

    mixed: fp32 [sequences, heads, slices, head_dim], unnormalised; state: fp32 [sequences, heads, slices,
    2], a slice's largest score (base 2) and sum; arrived: int32 [sequences, kv_heads], zero between
    launches; out: fp32 [sequences, heads * head_dim], for a result that another launch rounds.
    """

    mixed: Tensor
    state: Tensor
    arrived: Tensor
    out: Tensor

    @classmethod
    def allocate(
        cls, sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> "DecodeWorkspace":
        slices = slice_count(kv_heads)
        return cls(
            torch.empty(sequences, heads, slices, head_dim, dtype=torch.float32, device=device),
            torch.empty(sequences, heads, slices, 2, dtype=torch.float32, device=device),
            torch.zeros(sequences, kv_heads, dtype=torch.int32, device=device),
            torch.empty(sequences, heads * head_dim, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class DecodeArguments:
    """A launch: arguments as those of `attention_decode.attention_decode`.

    `outputs`: where the result goes; with `rounds`, the planes of rounded activations, else the first of the four,
    which is `half`'s values where that is given.
    """

    qkv: Tensor
    spec: AttentionSpec
    cache: KVStore
    positions: Tensor
    workspace: DecodeWorkspace
    outputs: tuple[Tensor, Tensor, Tensor, Tensor]
    rounds: bool
    pdl: bool
    block_tables: Tensor | None
    coarse: bool = False
    half: Fp16Operand | None = None

    def __post_init__(self) -> None:
        spec, batch = self.spec, self.qkv.shape[0]
        kv_heads, head_dim = self.cache.k.shape[1], self.cache.k.shape[3]
        mixed = self.workspace.mixed
        assert self.qkv.stride(1) == 1 and self.qkv.shape[1] == (spec.heads + 2 * kv_heads) * head_dim
        assert self.positions.shape == (batch,) and self.positions.dtype == torch.int32
        assert batch <= (self.cache.k if self.block_tables is None else self.block_tables).shape[0]
        assert spec.heads % kv_heads == 0 and spec.cos.is_contiguous() and spec.sin.is_contiguous()
        assert mixed.shape[1:] == (spec.heads, slice_count(kv_heads), head_dim) and batch <= mixed.shape[0]

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.spec.heads // self.cache.k.shape[1]

    @property
    def slices(self) -> int:
        return self.workspace.mixed.shape[2]

    def grid(self, least: int, more: int = 0) -> tuple[int, int, int]:
        """Programs: key-value heads, slices, sequences. Slices have `least` keys or more, and there may be `more` of
        them than the longest sequence has such.

        None for slices that no sequence has here: each would take its turn to find that out.
        """
        kv_heads, context = self.cache.k.shape[1:3]
        room = context if self.block_tables is None else self.block_tables.shape[1] * BLOCK_SIZE
        return kv_heads, min(self.slices, -(-room // least) + more), self.qkv.shape[0]

    def leading(self) -> tuple[Tensor, ...]:
        """Where a kernel reads from, but for the cache."""
        table, _ = table_arguments(self.cache, self.block_tables, self.positions)
        return self.qkv, *rotation_arguments(self.spec), self.positions, table

    def trailing(self) -> tuple[Tensor | int | float, ...]:
        """Where it writes, and the numbers: norm's eps, scale of the scores, and strides."""
        room, half = self.workspace, self.half
        _, blocks = table_arguments(self.cache, self.block_tables, self.positions)
        return (
            room.mixed,
            room.state,
            room.arrived,
            *self.outputs,
            self.spec.eps,
            self.spec.scale * _LOG2_E,
            self.cache.k.shape[2],
            blocks,
            self.qkv.stride(0),
            0 if half is None else half.stride,
        )

    def constants(self) -> dict[str, int | bool]:
        """What both kernels are compiled for."""
        return {
            "KV_HEADS": self.cache.k.shape[1],
            "GROUP": self.group,
            "HEAD_DIM": self.cache.k.shape[3],
            **rotation_constants(self.spec),
            "WINDOW": self.spec.window or 0,
            "PAGED": self.block_tables is not None,
            "SLICES": self.slices,
            "ROUND": self.rounds,
            "FORM": -1 if self.half is None else int(self.half.layout),
            "PDL": self.pdl,
        }
