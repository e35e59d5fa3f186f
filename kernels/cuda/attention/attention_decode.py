"""Decode attention on CUDA: one launch rotates q and k, writes the cache, attends and combines the KV splits.

A program serves one key/value head and one KV split, so the query heads of a group share each read of K and V. The
number and size of splits follow from the sequence's length and the model alone, never from the batch (batches choose
`coarse` splits explicitly), and the program that finishes last combines them in a fixed order, so a result does not
depend on the other sequences. Positions are read from device memory, so one captured launch serves every length. There
is no mask: the first split begins at the first key within the window, and table entries before it are not read.

There are two kernels: attention_warps.py wins on a GPU for heads of 64 and 128, some of 256, and groups of up to 8;
attention_tiles.py serves all others.
"""

from typing import TypeVar

import torch
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cuda.attention.attention_arguments import (
    DecodeArguments,
    DecodeOutputs,
    DecodeWorkspace,
)
from quengine.kernels.cuda.attention.attention_tiles import launch_tiles
from quengine.kernels.cuda.attention.attention_warps import launch_warps, takes
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemv.activations import GROUP as QUANTIZED_GROUP
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations

Out = TypeVar("Out", Tensor, QuantizedActivations, Fp16Operand)


def attention_decode(
    qkv: Tensor,
    spec: AttentionSpec,
    layer: KVLayer,
    positions: Tensor,
    block_tables: Tensor,
    workspace: DecodeWorkspace,
    out: Out,
    coarse: bool = False,
    pdl: bool = False,
    angle_rows: Tensor | None = None,
) -> Out:
    """Rotates one new token of each of B sequences, stores its key and value, and attends to all keys up to its own.

    qkv: [B, (heads + 2 * kv_heads) * head_dim], or for a gated or shared layer [B, qkv_width(spec)], fp32 or fp16, unit
    inner stride. positions: int32 [B] on the device. block_tables: int32 [B, blocks] on the device, contiguous.
    `coarse`: few KV splits, for batches. angle_rows: as in ForwardBatch.

    `out` is [B, heads * head_dim], written and returned: fp32; quantized activations, int16 per group of 32 for q-dot
    (a head that is not a multiple of 32 takes a second launch); or an fp16 operand, whose row scales must be ones, as
    weighted means of cached values stay in fp16's range.

    With `pdl` (sm_90 and later) the launch overlaps the one before it: only `qkv` may come from that launch;
    `positions`, `block_tables` and earlier cache rows must be complete before the step begins.
    Sources: Dao et al. 2023 (Flash-Decoding), Ainslie et al. 2023 (grouped queries).
    """
    shape = (qkv.shape[0], spec.heads * spec.head_dim)
    sequences, heads, _, head_dim = workspace.acc.shape
    assert sequences >= shape[0] and (heads, head_dim) == (spec.heads, spec.head_dim)
    assert workspace.arrivals.shape[1] == spec.kv_heads
    quantize, form, stride = False, None, 0
    if isinstance(out, QuantizedActivations):
        assert out.high.shape == shape
        if spec.head_dim % QUANTIZED_GROUP:
            rows = torch.empty(shape, dtype=torch.float32, device=qkv.device)
            attention_decode(
                qkv, spec, layer, positions, block_tables, workspace, rows, coarse, pdl, angle_rows
            )
            quantize_activations(rows, out, pdl)
            return out
        outputs, quantize = DecodeOutputs(out.high, out.low, out.scale, out.sums), True
    elif isinstance(out, Fp16Operand):
        assert out.rows == shape[0] and out.fits(shape[1])
        outputs, form, stride = DecodeOutputs.unquantized(out.values), out.layout, out.stride
    else:
        assert out.shape == shape and out.dtype == torch.float32 and out.is_contiguous()
        outputs = DecodeOutputs.unquantized(out)
    given = DecodeArguments(
        qkv, spec, layer, positions, block_tables, workspace, outputs, coarse, pdl, quantize, form, stride,
        angle_rows,
    )  # fmt: skip
    if takes(qkv, spec, layer, coarse):
        launch_warps(given)
    else:
        launch_tiles(given)
    return out
