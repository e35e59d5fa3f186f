"""Decode attention on CUDA: one launch rotates q and k, writes the cache, attends and combines.

A program serves one key-value head and one slice of the cache, so the query heads of a group share each read
of K and V. Slice count and size follow the sequence's length and the model alone, never the batch (`coarse`
slices, for batches, are a choice of their own), and the slices are combined in a fixed order by whichever program
finishes last, so a result does not depend on what runs beside it. Positions are read from device memory: one
captured launch serves every length. There is no mask: a query sees all keys that the window leaves. Where
sequences lie in blocks of a pool, a block table says which; the slices, and the arithmetic, are the same.

This file says what a launch does, and which kernel it takes: that of attention_warps.py for the common kinds of heads
in fp16 caches, that of attention_tiles.py for all.
"""

import torch

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_arguments import DecodeArguments, DecodeWorkspace
from quengine.kernels.cuda.attention.attention_tiles import launch_tiles
from quengine.kernels.cuda.attention.attention_warps import launch_warps, takes
from quengine.kernels.cuda.attention.kv_store import KVStore
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemv.activations import GROUP as ROUND_GROUP
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations


def attention_decode(
    qkv: torch.Tensor,
    spec: AttentionSpec,
    cache: KVStore,
    positions: torch.Tensor,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    pdl: bool = False,
    block_tables: torch.Tensor | None = None,
    coarse: bool = False,
) -> torch.Tensor:
    """One new token of each of B sequences: rotate, write its key and value, attend to all keys up to itself.

    qkv: [B, (heads + 2 * kv_heads) * head_dim] fp32 or fp16, unit inner stride; row b belongs to sequence b
    of `cache`. positions: int32 [B] on the device. out: fp32 [B, heads * head_dim], written and returned.
    block_tables: int32 [B, blocks] on the device, contiguous; `cache` is then one pool, and position p of sequence b
    its row `block_tables[b, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE`. `coarse`: in few slices, for batches.

    With `pdl` (sm_90 and later) the launch overlaps the one before it: then only `qkv` may come from that
    launch; `positions`, `block_tables` and the rows already in the cache must be complete before the step began.
    Sources: Dao et al. 2023 (Flash-Decoding), Ainslie et al. 2023 (grouped queries).
    """
    assert out.shape == (qkv.shape[0], spec.heads * spec.head_dim)
    assert out.dtype == torch.float32 and out.is_contiguous()
    outputs = (out, out, out, out)
    _launch(
        DecodeArguments(
            qkv, spec, cache, positions, workspace, outputs, False, pdl, block_tables, coarse
        )
    )  # fmt: skip
    return out


def attention_decode_half(
    qkv: torch.Tensor,
    spec: AttentionSpec,
    cache: KVStore,
    positions: torch.Tensor,
    workspace: DecodeWorkspace,
    out: Fp16Operand,
    pdl: bool = False,
    block_tables: torch.Tensor | None = None,
) -> Fp16Operand:
    """As `attention_decode` in coarse slices, to fp16 rows that need no scale, being means of what the cache holds:
    `out.row_scale` is ones, and stays so."""
    assert out.rows == qkv.shape[0] and out.fits(spec.heads * spec.head_dim)
    outputs = (out.values, out.values, out.values, out.values)
    _launch(
        DecodeArguments(
            qkv, spec, cache, positions, workspace, outputs, False, pdl, block_tables, True, out
        )
    )  # fmt: skip
    return out


def attention_decode_round(
    qkv: torch.Tensor,
    spec: AttentionSpec,
    cache: KVStore,
    positions: torch.Tensor,
    workspace: DecodeWorkspace,
    out: QuantizedActivations,
    pdl: bool = False,
    block_tables: torch.Tensor | None = None,
) -> QuantizedActivations:
    """As `attention_decode`, with the result rounded to int16 per group of 32 as the q-dot takes it.

    A head that is no whole number of groups takes a second launch for the rounding.
    """
    batch = qkv.shape[0]
    assert out.high.shape == (batch, spec.heads * spec.head_dim)
    if spec.head_dim % ROUND_GROUP:
        attention_decode(qkv, spec, cache, positions, workspace, workspace.out[:batch], pdl, block_tables)
        return quantize_activations(workspace.out[:batch], out, pdl)
    planes = (out.high, out.low, out.scale, out.sums)
    _launch(DecodeArguments(qkv, spec, cache, positions, workspace, planes, True, pdl, block_tables))
    return out


def _launch(given: DecodeArguments) -> None:
    if takes(given.qkv, given.spec, given.cache.q8_0):
        launch_warps(given)
    else:
        launch_tiles(given)
