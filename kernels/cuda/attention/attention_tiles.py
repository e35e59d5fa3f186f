"""Decode attention with tiles in shared memory: the kernel for every head size and cache type.

It serves what attention_warps.py does not: heads of other sizes than 64 and 128 (512, 96, 80, and 256 in batches or as
codes), groups of more than 8, partial rotation in halves, output gates, soft-capped scores, keys and values that
another layer stored, and the interpreter. A program serves one key-value head and one KV split. Tiles of keys and
values pass through shared memory, some of them ahead of the one that is attended to.

Accuracy without fp32 matrix units: an fp32 operand is split into two fp16 terms (value and remainder, 22 bits), which
share one 16-row matrix instruction, the terms of up to 8 heads stacked.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from quengine.kernels.cuda.attention.attention_arguments import LOG2_E, DecodeArguments
from quengine.kernels.cuda.attention.hadamard import hadamard_heads
from quengine.kernels.cuda.attention.kv_store import (
    BLOCK,
    cache_pointers,
    dequantize_codes,
    dequantize_packed,
    load_row,
    load_tile,
    row_width,
    store_rows,
    table_rows,
)
from quengine.kernels.cuda.attention.output_gate import load_gates
from quengine.kernels.cuda.attention.rope import angle_row, load_angles, load_rotated, load_values
from quengine.kernels.cuda.gemm.fp16_operand import store_operand
from quengine.kernels.cuda.gemm.mma import prefetch, uses_assembly
from quengine.kernels.cuda.gemv.activations import quantize_group, store_quantized
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.cuda.softcap import soft_capped

ONE_SPLIT = tl.constexpr(128)
"""Keys up to which there is one split: reading them takes no longer than combining splits."""

COMBINED = tl.constexpr(8)
"""KV splits that are combined at a time. One H200, two key-value heads of 256 at 600 keys: 13.4 us; with 16 it is 16.2,
with 32 21.7."""

FIRST_KEYS = 32
"""Keys of the first tile; a split has a multiple of it."""

COARSE = 416
"""Least keys of a coarse split: a first tile and whole tiles. Other sequences fill the device, so more splits would
only add cost.
"""

_FIRST = tl.constexpr(FIRST_KEYS)
_LOG2_E = tl.constexpr(LOG2_E)


class TileShape(NamedTuple):
    """Keys per tile, warps per block, tiles in flight."""

    block_keys: int
    warps: int
    stages: int


@triton.jit
def _add_halves(x):
    """[2 * R, N] to [2 * R, N]: rows r and r + R, the two terms of one head, both become their sum."""
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    both = tl.sum(tl.reshape(x, [2, ROWS // 2, N]), 0)
    return tl.reshape(tl.broadcast_to(both[None, :, :], [2, ROWS // 2, N]), [ROWS, N])


@triton.jit
def _two_terms(x, upper):
    """fp32 [R, N] with equal halves to fp16: rounded values in the rows of the upper half, remainders in the lower."""
    value = x.to(tl.float16)
    remainder = (x - value.to(tl.float32)).to(tl.float16)
    return tl.where(upper[:, None], value, remainder)


@triton.jit
def _first_rows(x, COUNT: tl.constexpr):
    """[R, N] to [COUNT, N]: the first COUNT rows, COUNT a divisor of R."""
    PARTS: tl.constexpr = x.shape[0] // COUNT
    N: tl.constexpr = x.shape[1]
    first = (tl.arange(0, PARTS) == 0)[:, None, None]
    return tl.sum(tl.where(first, tl.reshape(x, [PARTS, COUNT, N]), 0.0), 0)


@triton.jit
def _scaled(scores, scale, CAP: tl.constexpr):
    """Scores in base 2. With a soft cap `scale` is that of the scores, without one also of the base."""
    if CAP > 0.0:
        scores = soft_capped(scores * scale, CAP) * _LOG2_E
    else:
        scores = scores * scale
    return scores


@triton.jit
def _attend_tile(
    q, upper, row_max, row_sum, acc, k, k_scale, v, v_scale, live, scale,
    CAP: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (Milakov & Gimelshein 2018): adds keys and values [N, PADDED] to 2R rows."""
    if BITS == 8:  # codes times scale have 19 bits: two fp16 terms as well
        k, k_rest = dequantize_codes(k, k_scale, ASM)
        scores = tl.dot(q, tl.trans(k))
        scores = tl.dot(q, tl.trans(k_rest), scores)
    else:
        if BITS == 4:
            k = dequantize_packed(k, k_scale)
        scores = tl.dot(q, tl.trans(k))
    scores = tl.where(live[None, :], _scaled(_add_halves(scores), scale, CAP), float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    p = _two_terms(weights, upper)
    if BITS == 8:
        v, v_rest = dequantize_codes(v, v_scale, ASM)
        acc = tl.dot(p, v, acc)
        acc = tl.dot(p, v_rest, acc)
    else:
        if BITS == 4:
            v = dequantize_packed(v, v_scale)
        acc = tl.dot(p, v, acc)
    return new_max, row_sum, acc


@triton.jit
def _store_heads(
    out, head, live, outputs, qkv_ptr, sequence, stride,
    SHAPE: tl.constexpr, BITS: tl.constexpr, QUANTIZE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write [R, PADDED] as heads `head` [R] of a sequence's output where `live`, of q4_0 values transformed back, times
    their gates, if any, in the row at qkv_ptr: fp32, quantized for the q-dot, or, where FORM is not negative, fp16 in
    row `sequence` of an operand of that form."""
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    ROWS: tl.constexpr = out.shape[0]
    PADDED: tl.constexpr = out.shape[1]
    if BITS == 4:
        out = hadamard_heads(out, HEAD_DIM)
    values_ptr, low_ptr, scale_ptr, sums_ptr = outputs
    if SHAPE.gated:
        element = tl.arange(0, PADDED)[None, :]
        mask = live[:, None] & (element < HEAD_DIM)
        out *= tl.sigmoid(load_gates(qkv_ptr, head[:, None], element, mask, HEAD_DIM))
    if QUANTIZE:
        high, low, scale, sums = quantize_group(tl.reshape(out, [ROWS * PADDED // 32, 32]))
        PER_HEAD: tl.constexpr = PADDED // 32
        n = tl.arange(0, PER_HEAD)[None, :]
        group = tl.reshape(head[:, None] * (HEAD_DIM // 32) + n, [ROWS * PER_HEAD])
        inside = tl.reshape(live[:, None] & (n < HEAD_DIM // 32), [ROWS * PER_HEAD])
        store_quantized(values_ptr, low_ptr, scale_ptr, sums_ptr, group, inside, high, low, scale, sums)
    else:
        d = tl.arange(0, PADDED)[None, :]
        column = head[:, None] * HEAD_DIM + d
        inside = live[:, None] & (d < HEAD_DIM)
        if FORM >= 0:
            store_operand(values_ptr, sequence, column, stride, out, inside, FORM)
        else:
            tl.store(values_ptr + column, out, mask=inside)


@triton.constexpr_function
def combine_heads(group: int, splits: int, padded: int) -> int:
    """Heads of which so many splits are combined at once: a power of two that takes 64 registers per thread."""
    return int(max(1, min(triton.next_power_of_2(group), 8192 // (splits * padded))))


@triton.jit
def _combine(
    acc_ptr, state_ptr, outputs, qkv_ptr, sequence, stride, first_head, splits,
    SHAPE: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr, QUANTIZE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Combines the KV splits of a group's heads in order, some heads and some splits at a time; stores the outputs as
    `_store_heads`. Splits that are not there take no time."""
    GROUP: tl.constexpr = SHAPE.group
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    TOGETHER: tl.constexpr = min(SPLITS, COMBINED)
    HEADS_AT_ONCE: tl.constexpr = combine_heads(GROUP, TOGETHER, PADDED)
    d = tl.arange(0, PADDED)
    for start in range(0, GROUP, HEADS_AT_ONCE):
        member = start + tl.arange(0, HEADS_AT_ONCE)
        head = first_head + member
        live = member < GROUP
        every = tl.arange(0, SPLITS)
        there = live[:, None] & (every < splits)[None, :]
        # .cg: other multiprocessors wrote these during this launch, so L1 must not answer
        state = state_ptr + (head[:, None] * SPLITS + every[None, :]) * 2
        row_max = tl.load(state, mask=there, other=float("-inf"), cache_modifier=".cg")
        row_sum = tl.load(state + 1, mask=there, other=0.0, cache_modifier=".cg")
        top = tl.where(live, tl.max(row_max, 1), 0.0)
        total = tl.sum(row_sum * tl.exp2(row_max - top[:, None]), 1)
        out = tl.zeros([HEADS_AT_ONCE, PADDED], tl.float32)
        for first in range(0, splits, TOGETHER):
            s = first + tl.arange(0, TOGETHER)
            at = head[:, None] * SPLITS + s[None, :]
            inside = live[:, None] & (s < splits)[None, :]
            own_max = tl.load(state_ptr + at * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
            tile = inside[:, :, None] & (d < HEAD_DIM)[None, None, :]
            address = acc_ptr + at[:, :, None] * HEAD_DIM + d[None, None, :]
            acc = tl.load(address, mask=tile, other=0.0, cache_modifier=".cg")
            out += tl.sum(acc * tl.exp2(own_max - top[:, None])[:, :, None], 1)
        out = out / total[:, None]
        _store_heads(out, head, live, outputs, qkv_ptr, sequence, stride, SHAPE, BITS, QUANTIZE, FORM)


@triton.jit
def _finish(
    row_max, row_sum, acc, sink_ptr, workspace, outputs, qkv_ptr, kv_head, part, splits, sequence, out_stride,
    SHAPE: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr, QUANTIZE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Stores a program's heads, or their partial results, which the last split to finish combines.

    acc: [R, PADDED], the two terms of a head in rows r and r + R / 2; row_max, row_sum: [R], equal for both.
    """
    GROUP: tl.constexpr = SHAPE.group
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    HEADS: tl.constexpr = SHAPE.kv_heads * GROUP
    HEADS_PADDED: tl.constexpr = triton.next_power_of_2(GROUP)
    ROWS: tl.constexpr = acc.shape[0]
    PADDED: tl.constexpr = acc.shape[1]
    # Keep HEADS_PADDED rows, one per head, with their two terms added.
    acc = _first_rows(tl.sum(tl.reshape(acc, [2, ROWS // 2, PADDED]), 0), HEADS_PADDED)
    row_sum = tl.reshape(_first_rows(row_sum[:, None], HEADS_PADDED), [HEADS_PADDED])
    row_max = tl.reshape(_first_rows(row_max[:, None], HEADS_PADDED), [HEADS_PADDED])
    d = tl.arange(0, PADDED)
    member = tl.arange(0, HEADS_PADDED)
    live = member < GROUP
    tile = live[:, None] & (d < HEAD_DIM)[None, :]
    head = kv_head * GROUP + member
    if sink_ptr is not None:  # split 0 includes the sinks, logits without a value
        sink = tl.load(sink_ptr + head, mask=live & (part == 0), other=float("-inf")) * _LOG2_E
        new_max = tl.maximum(row_max, sink)
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.exp2(sink - new_max)
        acc *= rescale[:, None]
        row_max = new_max
    values_ptr = outputs.data
    if FORM < 0:
        values_ptr += sequence * (HEADS * HEAD_DIM)
    low_ptr = outputs.low + sequence * (HEADS * HEAD_DIM)
    scale_ptr = outputs.scale + sequence * (HEADS * HEAD_DIM // 32)
    sums_ptr = outputs.sums + sequence * (HEADS * HEAD_DIM // 16)
    own = (values_ptr, low_ptr, scale_ptr, sums_ptr)
    if splits == 1:
        _store_heads(
            acc / row_sum[:, None],
            head,
            live,
            own,
            qkv_ptr,
            sequence,
            out_stride,
            SHAPE,
            BITS,
            QUANTIZE,
            FORM,
        )
    else:
        acc_ptr = workspace.acc + sequence * (HEADS * SPLITS * HEAD_DIM)
        state_ptr = workspace.state + sequence * (HEADS * SPLITS * 2)
        at = head * SPLITS + part
        tl.store(acc_ptr + at[:, None] * HEAD_DIM + d[None, :], acc, mask=tile)
        tl.store(state_ptr + at * 2, row_max, mask=live)
        tl.store(state_ptr + at * 2 + 1, row_sum, mask=live)
        tl.debug_barrier()  # all warps' stores come before the atomic that publishes them
        arrivals = workspace.arrivals + sequence * SHAPE.kv_heads + kv_head
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(arrivals, 0)
            _combine(
                acc_ptr, state_ptr, own, qkv_ptr, sequence, out_stride, kv_head * GROUP, splits,
                SHAPE, BITS, SPLITS, QUANTIZE, FORM,
            )  # fmt: skip


@triton.jit(do_not_specialize=["cache_rows", "blocks"])
def _attention_tiles_kernel(
    qkv_ptr, rotation, position_ptr, table_ptr, sink_ptr, cache, workspace, outputs,
    eps, scale, cache_rows, blocks, qkv_stride, out_stride,
    SHAPE: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr,
    CAP: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr, QUANTIZE: tl.constexpr, FORM: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs: (key/value head, KV split, sequence). LEAST: least keys of a coarse split; 0: splits are
    fine. sink_ptr: [heads], or None.
    """
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    GROUP: tl.constexpr = SHAPE.group
    HEADS: tl.constexpr = SHAPE.kv_heads * GROUP
    HEADS_PADDED: tl.constexpr = triton.next_power_of_2(GROUP)
    ROWS: tl.constexpr = 2 * HEADS_PADDED if HEADS_PADDED > 8 else 16
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    position = tl.load(position_ptr + sequence)
    # The visible keys before the new one, cut into `splits` splits of `per_split`.
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    old_keys = position - first
    per_split = tl.cdiv(tl.cdiv(old_keys, SPLITS), _FIRST) * _FIRST
    if LEAST > 0:
        per_split = tl.maximum(per_split, LEAST)
    else:
        per_split = tl.maximum(per_split, tl.where(old_keys <= ONE_SPLIT, ONE_SPLIT, _FIRST))
    splits = tl.minimum(tl.maximum(tl.cdiv(old_keys, per_split), 1), tl.num_programs(1))
    if part >= splits:
        return
    head_rows = kv_head.to(tl.int64) * cache_rows
    table_ptr += sequence * blocks
    k_ptr = cache.k + head_rows * row_width(HEAD_DIM, BITS)
    v_ptr = cache.v + head_rows * row_width(HEAD_DIM, BITS)
    k_scale_ptr = cache.k_scale
    v_scale_ptr = cache.v_scale
    if BITS < 16:
        k_scale_ptr += head_rows * (HEAD_DIM // 32)
        v_scale_ptr += head_rows * (HEAD_DIM // 32)
    offset = angle_row(rotation, sequence, position, ROPE) * (ROPE.dim // 2)
    angles = load_angles(rotation.cos + offset, rotation.sin + offset, PADDED, ROPE)
    # The first tile is fetched before the PDL producer has delivered the queries.
    begin = first + part * per_split
    end = tl.minimum(begin + per_split, position)
    first_key = begin + tl.arange(0, _FIRST)
    first_live = first_key < end
    one = tl.arange(0, 1)
    first_row = table_rows(table_ptr, blocks, first_key, ASM)
    new_row = table_rows(table_ptr, blocks, position + one, ASM).to(tl.int64)
    first_k, first_k_scale = load_tile(k_ptr, k_scale_ptr, first_row, first_live, HEAD_DIM, PADDED, BITS)
    first_v, first_v_scale = load_tile(v_ptr, v_scale_ptr, first_row, first_live, HEAD_DIM, PADDED, BITS)
    if sink_ptr is not None:
        prefetch(sink_ptr + kv_head * GROUP + one, ASM)
    if PDL:
        tl.extra.cuda.gdc_wait()

    r = tl.arange(0, ROWS)
    g = r % (ROWS // 2)
    upper = r < ROWS // 2
    qkv = qkv_ptr + sequence * qkv_stride
    QUERIES: tl.constexpr = 2 if SHAPE.gated else 1
    q_rows = qkv + (kv_head * GROUP + g) * (QUERIES * HEAD_DIM)
    q = load_rotated(q_rows, g < GROUP, angles, rotation.q_norm, eps, HEAD_DIM, PADDED, ROPE)
    if ROPE.query_scale:
        q *= tl.load(rotation.query_scale + position)
    if BITS == 4:
        q = hadamard_heads(q, HEAD_DIM)
    # Split 0 stores the new key and value and starts its state from them; they are not read back in this launch.
    owner = part == 0
    if SHAPE.shared:  # an earlier launch of the step has stored them
        k_new = load_row(k_ptr, k_scale_ptr, new_row, one == 0, HEAD_DIM, PADDED, BITS)
        v_new = load_row(v_ptr, v_scale_ptr, new_row, one == 0, HEAD_DIM, PADDED, BITS)
    else:
        k_row = qkv + (QUERIES * HEADS + kv_head + one) * HEAD_DIM
        v_row = k_row + SHAPE.kv_heads * HEAD_DIM
        k_new = load_rotated(k_row, one == 0, angles, rotation.k_norm, eps, HEAD_DIM, PADDED, ROPE)
        v_new = load_values(v_row, one == 0, 1.0, eps, HEAD_DIM, PADDED, ROPE)
        write = (one == 0) & owner & (position < blocks * BLOCK)
        k_new = store_rows(k_new, new_row, write, k_ptr, k_scale_ptr, HEAD_DIM, PADDED, BITS)
        v_new = store_rows(v_new, new_row, write, v_ptr, v_scale_ptr, HEAD_DIM, PADDED, BITS)
    new_score = _scaled(tl.sum(q * k_new, 1), scale, CAP)
    row_max = tl.where(owner, new_score, float("-inf"))
    row_sum = tl.where(owner & (r >= 0), 1.0, 0.0)
    acc = tl.where(owner & upper[:, None], v_new, 0.0)

    q = _two_terms(q, upper)
    row_max, row_sum, acc = _attend_tile(
        q, upper, row_max, row_sum, acc, first_k, first_k_scale, first_v, first_v_scale, first_live, scale,
        CAP, BITS, ASM,
    )  # fmt: skip
    for start in tl.range(begin + _FIRST, end, TILE.block_keys, num_stages=TILE.stages):
        key = start + tl.arange(0, TILE.block_keys)
        live = key < end
        row = table_rows(table_ptr, blocks, key, ASM)
        k, k_scale = load_tile(k_ptr, k_scale_ptr, row, live, HEAD_DIM, PADDED, BITS)
        v, v_scale = load_tile(v_ptr, v_scale_ptr, row, live, HEAD_DIM, PADDED, BITS)
        row_max, row_sum, acc = _attend_tile(
            q, upper, row_max, row_sum, acc, k, k_scale, v, v_scale, live, scale, CAP, BITS, ASM
        )
    if PDL:
        # Not earlier: early consumer blocks would fill the multiprocessors unevenly.
        tl.extra.cuda.gdc_launch_dependents()
    _finish(
        row_max, row_sum, acc, sink_ptr, workspace, outputs, qkv, kv_head, part, splits, sequence, out_stride,
        SHAPE, BITS, SPLITS, QUANTIZE, FORM,
    )  # fmt: skip


def launch_tiles(given: DecodeArguments) -> None:
    """Launches this kernel, with its own KV split sizes."""
    shape, held = given.shape, given.layer.format
    hopper = is_hopper(given.qkv.device)
    tile = tile_shape(shape.head_dim, shape.group, held.coded, given.coarse, hopper)
    least = COARSE if given.coarse else 0
    # ptxas would choose 168 registers, and spill
    registers = 255 if shape.head_dim > 128 and tile.warps == 4 else None
    _attention_tiles_kernel[given.grid(max(least, FIRST_KEYS))](
        *given.inputs(), cache_pointers(given.layer), *given.results(), **given.constants(),
        BITS=held.bits, CAP=given.spec.softcap, LEAST=least, TILE=tile, ASM=uses_assembly(),
        num_warps=tile.warps, maxnreg=registers, launch_pdl=given.pdl,
    )  # fmt: skip


def tile_shape(
    head_dim: int, group: int, coded: bool, coarse: bool = False, hopper: bool = False
) -> TileShape:
    """The tile shape by head size, query heads per group, cache type and splits, from benchmarks/cuda/attention.py on
    an H200.

    The tiles of all stages must fit 99 KiB of shared memory (sm_89), and nothing may spill. With heads of 256 and a
    context of 65,536 tokens, three tiles in flight take 87 us and two take 122 with four key-value heads; with two
    key-value heads, 57 and 74.
    """
    if head_dim > 256:
        return TileShape(32 if hopper and not coarse else 16, 8, 2)
    if head_dim > 128:
        return TileShape(32, 8, 2) if coded or coarse else TileShape(32, 4, 3)
    if coarse and group <= 8:
        return TileShape(64, 4, 2) if coded else TileShape(128, 8, 2)
    if not coded:
        return TileShape(64, 8, 3)
    return TileShape(128 if group <= 8 else 64, 8, 2)
