"""The arguments of a decode attention launch, for either kernel, and the workspace of its KV splits."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cuda.attention.kv_store import check_block_tables
from quengine.kernels.cuda.attention.output_gate import qkv_width
from quengine.kernels.cuda.attention.rope import rope_variant, rotation_pointers
from quengine.kernels.cuda.gemm.fp16_operand import OperandLayout
from quengine.kernels.kv.cache_types import BLOCK_SIZE

_TARGET_PROGRAMS = 128
"""Programs per sequence to aim for. A constant, not this GPU's number of multiprocessors, so that the KV
splits, and with them the last bits of a result, are the same on every GPU.
"""

LOG2_E = 1.4426950408889634
"""Scores are in base 2: exp2 is one instruction."""


def split_count(kv_heads: int) -> int:
    """The most KV splits of a sequence: a power of two, 2 to 64."""
    return int(min(64, max(2, triton.next_power_of_2(_TARGET_PROGRAMS // kv_heads))))


def checked_sinks(spec: AttentionSpec) -> Tensor | None:
    """A layer's sinks in the kernels' format: fp32 [heads], contiguous."""
    sinks = spec.sinks
    assert sinks is None or (sinks.shape == (spec.heads,) and sinks.dtype == torch.float32)
    assert sinks is None or sinks.is_contiguous()
    return sinks


class DecodeWorkspace(NamedTuple):
    """Partial results of the KV splits of one launch, for the program that combines them; reused by every layer.

    acc: fp32 [sequences, heads, splits, head_dim], unnormalized; state: fp32 [sequences, heads, splits, 2], a split's
    row_max (base 2) and row_sum; arrivals: int32 [sequences, kv_heads], counters that are zero between launches.
    """

    acc: Tensor
    state: Tensor
    arrivals: Tensor

    @classmethod
    def allocate(
        cls, sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> "DecodeWorkspace":
        splits = split_count(kv_heads)
        return cls(
            torch.empty(sequences, heads, splits, head_dim, dtype=torch.float32, device=device),
            torch.empty(sequences, heads, splits, 2, dtype=torch.float32, device=device),
            torch.zeros(sequences, kv_heads, dtype=torch.int32, device=device),
        )


class DecodeOutputs(NamedTuple):
    """The output buffers: `data` alone, fp32 or the values of an fp16 operand; or the planes of quantized
    activations, whose high bytes are `data`. Unused fields repeat `data`.
    """

    data: Tensor
    low: Tensor
    scale: Tensor
    sums: Tensor

    @classmethod
    def unquantized(cls, data: Tensor) -> "DecodeOutputs":
        return cls(data, data, data, data)


class HeadShape(NamedTuple):
    """What a kernel is compiled for: key/value heads, query heads of each, elements of a head, whether each query head
    has gates, whether the newest key and value are in the cache already."""

    kv_heads: int
    group: int
    head_dim: int
    gated: bool
    shared: bool = False


@dataclass(frozen=True)
class DecodeArguments:
    """One launch: arguments as in `attention_decode.attention_decode`.

    `quantize`: the outputs are planes of quantized activations. `form`, `out_stride`: the layout and stride of an fp16
    operand; None: fp32 rows.
    """

    qkv: Tensor
    spec: AttentionSpec
    layer: KVLayer
    positions: Tensor
    block_tables: Tensor
    workspace: DecodeWorkspace
    outputs: DecodeOutputs
    coarse: bool
    pdl: bool
    quantize: bool
    form: OperandLayout | None
    out_stride: int
    angle_rows: Tensor | None = None

    def __post_init__(self) -> None:
        spec, batch, acc = self.spec, self.qkv.shape[0], self.workspace.acc
        kv_heads, head_dim = self.layer.k.shape[1], self.layer.head_dim
        assert (kv_heads, head_dim) == (spec.kv_heads, spec.head_dim)
        assert self.qkv.stride(1) == 1 and self.qkv.shape[1] == qkv_width(spec)
        assert self.positions.shape == (batch,) and self.positions.dtype == torch.int32
        check_block_tables(self.block_tables)
        assert batch <= self.block_tables.shape[0] and spec.heads % kv_heads == 0
        assert acc.shape[1:] == (spec.heads, split_count(kv_heads), head_dim) and batch <= acc.shape[0]

    @property
    def shape(self) -> HeadShape:
        kv_heads, head_dim = self.layer.k.shape[1], self.layer.head_dim
        return HeadShape(kv_heads, self.spec.heads // kv_heads, head_dim, self.spec.gated, self.spec.shared)

    @property
    def splits(self) -> int:
        return self.workspace.acc.shape[2]

    def grid(self, least: int, more: int = 0) -> tuple[int, int, int]:
        """Programs: key/value heads, KV splits, sequences. A split has `least` keys or more; `more` is added to the
        number of such splits that the longest sequence can have.

        Splits that no sequence can have here are left out: each would cost a program that returns at once.
        """
        room = self.block_tables.shape[1] * BLOCK_SIZE
        return self.layer.k.shape[1], min(self.splits, -(-room // least) + more), self.qkv.shape[0]

    def inputs(self) -> tuple[object, ...]:
        """Inputs of both kernels, without the cache."""
        rotation = rotation_pointers(self.spec, self.angle_rows)
        return self.qkv, rotation, self.positions, self.block_tables, checked_sinks(self.spec)

    def results(self) -> tuple[object, ...]:
        """Outputs and numbers of both kernels: eps of the norms, scale of the scores (in base 2 unless scores are
        soft-capped), rows, blocks, strides.
        """
        spec = self.spec
        scale = spec.scale if spec.softcap else spec.scale * LOG2_E
        return (
            self.workspace, self.outputs, spec.eps, scale,
            self.layer.k.shape[0], self.block_tables.shape[1], self.qkv.stride(0), self.out_stride,
        )  # fmt: skip

    def constants(self) -> dict[str, object]:
        """Compile-time constants of both kernels."""
        return {
            "SHAPE": self.shape,
            "ROPE": rope_variant(self.spec, self.angle_rows),
            "WINDOW": self.spec.window or 0,
            "SPLITS": self.splits,
            "QUANTIZE": self.quantize,
            "FORM": -1 if self.form is None else int(self.form),
            "PDL": self.pdl,
        }
