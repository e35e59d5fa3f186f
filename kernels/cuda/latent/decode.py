"""Latent attention of single tokens: the query heads of a program share each read of a row, keys are cut into splits.

Query heads are the rows of the matrix units, 16 per program. A row is read once for the score; its first elements are
the value. The number and size of splits follow from the sequence's length alone (batches choose `coarse` splits), and a
second launch combines them in order. Positions are read from device memory, so that one captured launch serves every
length. An fp32 operand is split into two fp16 terms (value and remainder, 22 bits), as in attention_tiles.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cuda.attention.attention_arguments import LOG2_E
from quengine.kernels.cuda.attention.kv_store import check_block_tables, dequantize_codes, table_rows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, store_operand
from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_group, store_quantized
from quengine.kernels.cuda.latent.shapes import HeadPlaces, LatentShape, latent_pointers
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.latent_spec import LatentSpec

HEADS_AT_ONCE = 16
"""Query heads of a program: the rows of the smallest matrix instruction."""

LEAST, COARSE = 64, 512
"""Least keys of a split, and of a coarse one."""

_MOST_SPLITS = 64
_PART = tl.constexpr(64)
"""Elements of a q8_0 latent that are dequantized at a time."""


class DecodeTile(NamedTuple):
    """Keys per tile, warps per block, tiles in flight."""

    block_keys: int
    warps: int
    stages: int


class LatentWorkspace(NamedTuple):
    """Partial results of the splits of one launch. acc: fp32 [rows, heads, splits, rank], unnormalized; state: fp32
    [rows, heads, splits, 2], a split's largest score (base 2) and sum of weights."""

    acc: Tensor
    state: Tensor

    @classmethod
    def allocate(
        cls, rows: int, heads: int, rank: int, coarse: bool, device: torch.device
    ) -> "LatentWorkspace":
        shape = (rows, heads, most_splits(coarse))
        return cls(
            torch.empty(*shape, rank, dtype=torch.float32, device=device),
            torch.empty(*shape, 2, dtype=torch.float32, device=device),
        )


def most_splits(coarse: bool) -> int:
    """Most KV splits of a sequence; with `coarse` fewer, since the sequences of a batch fill the device."""
    return _MOST_SPLITS // 4 if coarse else _MOST_SPLITS


def decode_tile(q8_0: bool, rank: int) -> DecodeTile:
    """The tile shape by the cache's type and the latent's elements: what fits 99 KiB of shared memory (sm_89) and does
    not spill."""
    if q8_0:
        return DecodeTile(16, 8 if rank > 256 else 4, 2)
    return DecodeTile(32, 4, 2)


@triton.jit
def load_rows(cache, row, live, first: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr, Q8: tl.constexpr):
    """Elements first .. first + N - 1 of cached rows `row` [K] as stored, and their scales; 0 where not live."""
    d = tl.arange(0, N)[None, :]
    tile = tl.load(cache.rows + row[:, None] * ROW + first + d, mask=live[:, None], other=0)
    scale = tile
    if Q8:
        g = tl.arange(0, N // 32)[None, :]
        scale = tl.load(
            cache.scale + row[:, None] * (ROW // 32) + first // 32 + g, mask=live[:, None], other=0.0
        )
    return tile, scale


@triton.jit
def _two_terms(x):
    value = x.to(tl.float16)
    return value, (x - value.to(tl.float32)).to(tl.float16)


@triton.jit
def _product(high, low, tile, scale, acc, Q8: tl.constexpr, ASM: tl.constexpr):
    """acc + (high + low) tile^T."""
    if Q8:
        tile, rest = dequantize_codes(tile, scale, ASM)
        acc = tl.dot(high, tl.trans(rest), acc)
    acc = tl.dot(low, tl.trans(tile), acc)
    return tl.dot(high, tl.trans(tile), acc)


@triton.jit
def _softmax_step(scores, live, row_max, row_sum, scale):
    """Weights of scores [H, K], and what sums before them are multiplied by: new row_max, row_sum, rescale, weights."""
    scores = tl.where(live[None, :], scores * scale, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    return new_max, row_sum * rescale + tl.sum(weights, 1), rescale, weights


@triton.jit
def _attend(
    q, state, cache, table_ptr, blocks, begin, end, scale,
    SHAPE: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov & Gimelshein 2018) over keys begin .. end - 1 of an fp16 cache: row_max and
    row_sum [H], acc [H, rank]."""
    q_high, q_low, r_high, r_low = q
    row_max, row_sum, acc = state
    RANK: tl.constexpr = SHAPE.rank
    ROTATED: tl.constexpr = SHAPE.rotated
    ROW: tl.constexpr = RANK + ROTATED
    H: tl.constexpr = acc.shape[0]
    KEYS: tl.constexpr = TILE.block_keys
    for start in tl.range(begin, end, TILE.block_keys, num_stages=TILE.stages):
        key = start + tl.arange(0, TILE.block_keys)
        live = key < end
        row = table_rows(table_ptr, blocks, key, ASM)
        c, c_scale = load_rows(cache, row, live, 0, RANK, ROW, False)
        r, r_scale = load_rows(cache, row, live, RANK, ROTATED, ROW, False)
        scores = tl.zeros([H, KEYS], tl.float32)
        scores = _product(r_high, r_low, r, r_scale, scores, False, ASM)
        scores = _product(q_high, q_low, c, c_scale, scores, False, ASM)
        row_max, row_sum, rescale, weights = _softmax_step(scores, live, row_max, row_sum, scale)
        p, p_rest = _two_terms(weights)
        acc = tl.dot(p_rest, c, acc * rescale[:, None])
        acc = tl.dot(p, c, acc)
    return row_max, row_sum, acc


@triton.jit
def _value_sum(p, p_rest, codes, scale, acc, rescale, ASM: tl.constexpr):
    """acc * rescale + (p + p_rest) times dequantized values [K, N]."""
    value, rest = dequantize_codes(codes, scale, ASM)
    acc = tl.dot(p, rest, acc * rescale[:, None])
    acc = tl.dot(p_rest, value, acc)
    return tl.dot(p, value, acc)


@triton.jit
def _attend_codes(
    q_ptr, r_high, r_low, live_heads, state, cache, table_ptr, blocks, begin, end, scale,
    SHAPE: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `_attend` over a q8_0 cache, PART elements of the latent at a time, each dequantized once for the score and
    once as a value: whole rows of both terms would spill. q_ptr: of the heads' queries [H, 1], fp32. acc: a tuple."""
    RANK: tl.constexpr = SHAPE.rank
    ROTATED: tl.constexpr = SHAPE.rotated
    ROW: tl.constexpr = RANK + ROTATED
    KEYS: tl.constexpr = TILE.block_keys
    PART: tl.constexpr = _PART
    row_max, row_sum, acc = state
    H: tl.constexpr = row_max.shape[0]
    d = tl.arange(0, PART)[None, :]
    for start in tl.range(begin, end, KEYS, num_stages=TILE.stages):
        key = start + tl.arange(0, KEYS)
        live = key < end
        row = table_rows(table_ptr, blocks, key, ASM)
        r, r_scale = load_rows(cache, row, live, RANK, ROTATED, ROW, True)
        scores = _product(r_high, r_low, r, r_scale, tl.zeros([H, KEYS], tl.float32), True, ASM)
        for part in tl.static_range(RANK // PART):
            c, c_scale = load_rows(cache, row, live, part * PART, PART, ROW, True)
            q = tl.load(q_ptr + part * PART + d, mask=live_heads[:, None], other=0.0)
            q_high, q_low = _two_terms(q)
            scores = _product(q_high, q_low, c, c_scale, scores, True, ASM)
        row_max, row_sum, rescale, weights = _softmax_step(scores, live, row_max, row_sum, scale)
        p, p_rest = _two_terms(weights)
        c, c_scale = load_rows(cache, row, live, 0, PART, ROW, True)
        sums = (_value_sum(p, p_rest, c, c_scale, acc[0], rescale, ASM),)
        for part in tl.static_range(1, RANK // PART):
            c, c_scale = load_rows(cache, row, live, part * PART, PART, ROW, True)
            sums = sums + (_value_sum(p, p_rest, c, c_scale, acc[part], rescale, ASM),)
        acc = sums
    return row_max, row_sum, acc


@triton.jit
def _splits_of(position, SPLITS: tl.constexpr, LEAST_KEYS: tl.constexpr, KEYS: tl.constexpr):
    """The number of splits of the keys up to `position`, and the keys of each."""
    per_split = tl.cdiv(tl.cdiv(position + 1, SPLITS), KEYS) * KEYS
    per_split = tl.maximum(per_split, LEAST_KEYS)
    return tl.cdiv(position + 1, per_split), per_split


@DirectLaunch
@triton.jit(do_not_specialize=["blocks", "of_head"])
def _latent_decode_kernel(
    absorbed_ptr, turned_ptr, position_ptr, table_ptr, cache, workspace, scale, blocks, of_head,
    SHAPE: tl.constexpr, Q8: tl.constexpr, SPLITS: tl.constexpr, LEAST_KEYS: tl.constexpr, TILE: tl.constexpr,
    H: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (block of H query heads, split, row)."""
    launch_then_wait(PDL)
    sequence = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(position_ptr + sequence)
    KEYS: tl.constexpr = TILE.block_keys
    RANK: tl.constexpr = SHAPE.rank
    splits, per_split = _splits_of(position, SPLITS, LEAST_KEYS, KEYS)
    if part < splits:
        head = tl.program_id(0) * H + tl.arange(0, H)
        live = head < SHAPE.heads
        d = tl.arange(0, SHAPE.rank)[None, :]
        e = tl.arange(0, SHAPE.rotated)[None, :]
        place = head[:, None] * of_head + sequence
        q_ptr = absorbed_ptr + place * SHAPE.rank
        at = sequence * SHAPE.heads + head[:, None]
        r = tl.load(turned_ptr + at * SHAPE.rotated + e, mask=live[:, None], other=0.0)
        r_high, r_low = _two_terms(r)
        begin = part * per_split
        end = tl.minimum(begin + per_split, position + 1)
        slot = (sequence * SHAPE.heads + head) * SPLITS + part
        acc_ptr = workspace.acc + slot[:, None] * SHAPE.rank
        row_max = tl.full([H], float("-inf"), tl.float32)
        row_sum = tl.zeros([H], tl.float32)
        if Q8:
            PART: tl.constexpr = _PART
            none = (tl.zeros([H, PART], tl.float32),)
            for _ in tl.static_range(1, RANK // PART):
                none = none + (tl.zeros([H, PART], tl.float32),)
            row_max, row_sum, sums = _attend_codes(
                q_ptr, r_high, r_low, live, (row_max, row_sum, none), cache, table_ptr + sequence * blocks, blocks,
                begin, end, scale, SHAPE, TILE, ASM,
            )  # fmt: skip
            for n in tl.static_range(RANK // PART):
                tl.store(acc_ptr + n * PART + tl.arange(0, PART)[None, :], sums[n], mask=live[:, None])
        else:
            q_high, q_low = _two_terms(tl.load(q_ptr + d, mask=live[:, None], other=0.0))
            state = (row_max, row_sum, tl.zeros([H, RANK], tl.float32))
            row_max, row_sum, acc = _attend(
                (q_high, q_low, r_high, r_low), state, cache, table_ptr + sequence * blocks, blocks, begin, end,
                scale, SHAPE, TILE, ASM,
            )  # fmt: skip
            tl.store(acc_ptr + d, acc, mask=live[:, None])
        tl.store(workspace.state + slot * 2, row_max, mask=live)
        tl.store(workspace.state + slot * 2 + 1, row_sum, mask=live)


@DirectLaunch
@triton.jit(do_not_specialize=["of_head"])
def _merge_kernel(
    position_ptr, workspace, out_high, out_low, out_scale, out_sums, stride, of_head,
    SHAPE: tl.constexpr, SPLITS: tl.constexpr, LEAST_KEYS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    QUANTIZE: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (block of COLUMNS elements, head, row): the weighted sum of latents over all splits, in order."""
    launch_then_wait(PDL)
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    splits, _ = _splits_of(tl.load(position_ptr + sequence), SPLITS, LEAST_KEYS, KEYS)
    s = tl.arange(0, SPLITS)
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = s < splits
    slot = (sequence * SHAPE.heads + head) * SPLITS + s
    row_max = tl.load(workspace.state + slot * 2, mask=live, other=float("-inf"))
    row_sum = tl.load(workspace.state + slot * 2 + 1, mask=live, other=0.0)
    acc = tl.load(workspace.acc + slot[:, None] * SHAPE.rank + d[None, :], mask=live[:, None], other=0.0)
    weight = tl.exp2(row_max - tl.max(row_max, 0))
    out = tl.sum(acc * weight[:, None], 0) / tl.sum(row_sum * weight, 0)
    if QUANTIZE:
        GROUPS: tl.constexpr = COLUMNS // 32
        high, low, scale, sums = quantize_group(tl.reshape(out, [GROUPS, 32]))
        group = head * (SHAPE.rank // 32) + tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
        store_quantized(out_high, out_low, out_scale, out_sums, group, group >= 0, high, low, scale, sums)
    else:
        place = head * of_head + sequence
        tl.store(out_scale + place, 1.0)
        store_operand(out_high, place, d, stride, out, d >= 0, FORM)


def latent_decode(
    absorbed: Tensor,
    turned: Tensor,
    spec: LatentSpec,
    layer: KVLayer,
    positions: Tensor,
    block_tables: Tensor,
    workspace: LatentWorkspace,
    out: QuantizedActivations | Fp16Operand,
    places: HeadPlaces | None = None,
    coarse: bool = False,
    pdl: bool = False,
) -> None:
    """Writes each of T rows' attention over cached latents, the weighted sums over positions up to its own, to `out`.

    absorbed: fp32 [places, rank], queries times their heads' matrices: row t of head h is at its place, or, without
    `places`, the one row of head h at h; turned: fp32 [T, heads, rotated]. positions: int32 [T]; block_tables: int32
    [T, blocks]. out: rows [heads, rank], quantized; or fp16 rows at their places, whose row scales become ones.
    Sources: Dao et al. 2023 (Flash-Decoding); DeepSeek-AI 2024, "DeepSeek-V2".
    """
    tokens, shape, q8_0 = len(turned), LatentShape.of(spec), layer.k_scale is not None
    check_block_tables(block_tables)
    assert absorbed.is_contiguous() and absorbed.shape[1] == spec.rank and turned.is_contiguous()
    splits, least = workspace.acc.shape[2], COARSE if coarse else LEAST
    assert workspace.acc.shape[0] >= tokens and workspace.acc.shape[1:] == (spec.heads, splits, spec.rank)
    assert splits == most_splits(coarse)
    tile, of_head = decode_tile(q8_0, spec.rank), 1 if places is None else places.of_head
    room = block_tables.shape[1] * BLOCK_SIZE
    grid = (-(-spec.heads // HEADS_AT_ONCE), min(splits, -(-room // least)), tokens)
    _latent_decode_kernel[grid](
        absorbed, turned, positions, block_tables, latent_pointers(layer), workspace, spec.scale * LOG2_E,
        block_tables.shape[1], of_head,
        SHAPE=shape, Q8=q8_0, SPLITS=splits, LEAST_KEYS=least, TILE=tile, H=HEADS_AT_ONCE, ASM=uses_assembly(),
        PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    quantize = isinstance(out, QuantizedActivations)
    outputs: tuple[Tensor, ...]
    if isinstance(out, QuantizedActivations):
        outputs, stride, form = (out.high, out.low, out.scale, out.sums), 0, 0
    else:
        assert places is not None and out.rows == places.places and out.fits(spec.rank)
        outputs, stride, form = (
            (out.values, out.values, out.row_scale, out.values),
            out.stride,
            int(out.layout),
        )
    columns = min(spec.rank, 128)
    _merge_kernel[(spec.rank // columns, spec.heads, tokens)](
        positions, workspace, *outputs, stride, of_head,
        SHAPE=shape, SPLITS=splits, LEAST_KEYS=least, KEYS=tile.block_keys, COLUMNS=columns, QUANTIZE=quantize,
        FORM=form, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
