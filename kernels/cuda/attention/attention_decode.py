"""Decode attention on CUDA: one launch rotates q and k, writes the cache, attends and combines.

A program serves one key-value head and one KV split, so the query heads of a group share each read of K and V. Number
and size of splits follow from the sequence's length and the model alone, never the batch (`coarse` splits, for batches,
are a choice of their own), and the program that finishes last combines them in a fixed order, so a result does not
depend on what runs beside it. Positions are read from device memory: one captured launch serves every length. There is
no mask: a split begins at the first key that the window leaves visible, and table entries before it are not read.

Two kernels: attention_warps.py wins for fp16 caches with heads of 64 or 128 and groups of up to 8, on a GPU;
attention_tiles.py takes every other head and cache.
"""

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
from quengine.kernels.cuda.gemm.half import HalfRows
from quengine.kernels.cuda.gemv.activations import GROUP as QUANTIZED_GROUP
from quengine.kernels.cuda.gemv.activations import RoundedActivations, round_activations


def attention_decode(
    qkv: Tensor,
    spec: AttentionSpec,
    layer: KVLayer,
    positions: Tensor,
    workspace: DecodeWorkspace,
    out: Tensor,
    pdl: bool,
    block_tables: Tensor,
    coarse: bool = False,
) -> Tensor:
    """One new token of each of B sequences: rotate, write its key and value, attend to all keys up to itself.

    qkv: [B, (heads + 2 * kv_heads) * head_dim] fp32 or fp16, unit inner stride. positions: int32 [B] on the device.
    block_tables: int32 [B, blocks] on the device, contiguous. out: fp32 [B, heads * head_dim], written and returned.
    `coarse`: in few splits, for batches.

    With `pdl` (sm_90 and later) the launch overlaps the one before it: then only `qkv` may come from that
    launch; `positions`, `block_tables` and the rows already in the cache must be complete before the step began.
    Sources: Dao et al. 2023 (Flash-Decoding), Ainslie et al. 2023 (grouped queries).
    """
    assert out.shape == (qkv.shape[0], spec.heads * spec.head_dim)
    assert out.dtype == torch.float32 and out.is_contiguous()
    outputs = DecodeOutputs(out, out, out, out)
    _launch(DecodeArguments(qkv, spec, layer, positions, block_tables, workspace, outputs, coarse, pdl))
    return out


def attention_decode_half(
    qkv: Tensor,
    spec: AttentionSpec,
    layer: KVLayer,
    positions: Tensor,
    workspace: DecodeWorkspace,
    out: HalfRows,
    pdl: bool,
    block_tables: Tensor,
) -> HalfRows:
    """As `attention_decode` in coarse splits, to an fp16 operand whose rows need no scale, being means of what the
    cache holds: its row scales must be ones."""
    assert out.rows == qkv.shape[0] and out.fits(spec.heads * spec.head_dim)
    outputs = DecodeOutputs(out.values, out.values, out.values, out.values)
    _launch(
        DecodeArguments(
            qkv, spec, layer, positions, block_tables, workspace, outputs, True, pdl,
            form=out.form, out_stride=out.stride,
        )
    )  # fmt: skip
    return out


def attention_decode_round(
    qkv: Tensor,
    spec: AttentionSpec,
    layer: KVLayer,
    positions: Tensor,
    workspace: DecodeWorkspace,
    out: RoundedActivations,
    pdl: bool,
    block_tables: Tensor,
) -> RoundedActivations:
    """As `attention_decode`, with the result quantized to int16 per group of 32 as the q-dot takes it.

    A head that is no whole number of groups takes a second launch for the quantization.
    """
    shape = (qkv.shape[0], spec.heads * spec.head_dim)
    assert out.high.shape == shape
    if spec.head_dim % QUANTIZED_GROUP:
        rows = torch.empty(shape, dtype=torch.float32, device=qkv.device)
        attention_decode(qkv, spec, layer, positions, workspace, rows, pdl, block_tables)
        return round_activations(rows, out, pdl)
    planes = DecodeOutputs(out.high, out.low, out.scale, out.sums)
    _launch(
        DecodeArguments(
            qkv, spec, layer, positions, block_tables, workspace, planes, False, pdl, quantize=True
        )
    )
    return out


def _launch(given: DecodeArguments) -> None:
    if takes(given.qkv, given.spec, given.layer.k_scale is not None):
        launch_warps(given)
    else:
        launch_tiles(given)
