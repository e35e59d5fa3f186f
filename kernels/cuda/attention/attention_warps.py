"""Decode attention in registers: each warp of a program takes keys of its own, and they meet once, at the end.

The same work as attention_tiles.py's kernel (one slice of one key-value head a program), for fp16 caches, heads of 64
or 128 and groups of up to 8. There, tiles pass through shared memory between barriers; here a warp loads keys and
values as the operands of the matrix instruction (attention_operands.py), and scores and weights stay where that leaves
them.
Does not know: when this kernel is taken (attention_decode.py).
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_arguments import DecodeArguments
from quengine.kernels.cuda.attention.attention_merge import LOWEST, merged, merged_slices, store_heads
from quengine.kernels.cuda.attention.attention_operands import (
    alone,
    columns_in_order,
    key_operand,
    key_words,
    of_both_terms,
    one_key_operand,
    query_operand,
    terms_added,
    threads,
    two_terms,
    value_operand,
    value_words,
    weight_operand,
)
from quengine.kernels.cuda.attention.kv_store import BLOCK, BLOCK_BITS
from quengine.kernels.cuda.gemm.mma import uses_assembly

KEYS = 16
"""Keys of a warp at a time: 16 or 32."""

FEW_PROGRAMS = 264
"""Programs of which two on each multiprocessor of an H200 are all. More of them should lie four on one, which takes
half of the registers; fewer should not, since they would fill some multiprocessors and leave others empty."""


@dataclass(frozen=True)
class Slices:
    """Warps of a program, and how many keys a slice has at least: a multiple of what the warps read at once."""

    warps: int
    least: int


FINE = Slices(8, 128)
"""Of a single sequence. 4 warps are up to 0.5 us faster below 128 keys, and slower above: 25% at 16384."""

COARSE = Slices(4, 512)
"""In batches, where other sequences fill the device: several programs on a multiprocessor, and less to combine."""


def takes(qkv: Tensor, spec: AttentionSpec, q8_0: bool) -> bool:
    """Whether this kernel serves such heads, on a GPU: both elements of a rotated pair must lie in one thread."""
    rotates = 2 * spec.cos.shape[1] == spec.head_dim or spec.rope_layout == "pairs"
    aligned = qkv.dtype == torch.float32 and qkv.stride(0) % 4 == 0 and qkv.data_ptr() % 16 == 0
    shaped = spec.heads <= 8 * spec.kv_heads and spec.head_dim in (64, 128)
    return uses_assembly() and shaped and rotates and aligned and not q8_0


@gluon.jit
def _load(ptr, words, key, first, begin, end):
    """Words of cache rows, 0 where a key is not in begin .. end - 1; `first`: the warp's first key."""
    place = first + key
    return gl.load(ptr + words, mask=(place >= begin) & (place < end), other=0)


@gluon.jit
def _rotated(
    heads, live, cos_ptr, sin_ptr, norm_ptr, eps,
    HEAD_DIM: gl.constexpr, ROPE_DIM: gl.constexpr, HALVES: gl.constexpr, NORM: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Heads at pointers `heads` [R, 1], normalised where NORM, rotated by one position's rows of the angle table: fp32
    [R, HEAD_DIM] in a layout in which both of a rotated pair are one thread's. 0 where not live."""
    R: gl.constexpr = heads.shape[0]
    d = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, L)), 0)
    x = gl.load(heads + d, mask=live, other=0.0)
    if NORM:
        x *= gl.expand_dims(gl.rsqrt(gl.sum(x * x, 1) / HEAD_DIM + eps), 1)
        x *= gl.load(norm_ptr + d).to(gl.float32)
    if HALVES:
        pairs = gl.permute(gl.reshape(x, [R, 2, HEAD_DIM // 2]), [0, 2, 1])
    else:
        pairs = gl.reshape(x, [R, HEAD_DIM // 2, 2])
    near, far = gl.split(pairs)
    angle = gl.expand_dims(gl.arange(0, HEAD_DIM // 2, layout=gl.SliceLayout(0, near.type.layout)), 0)
    cos = gl.load(cos_ptr + angle, mask=angle < ROPE_DIM // 2, other=1.0)
    sin = gl.load(sin_ptr + angle, mask=angle < ROPE_DIM // 2, other=0.0)
    turned = gl.join(near * cos - far * sin, far * cos + near * sin)
    if HALVES:
        turned = gl.permute(turned, [0, 2, 1])
    return gl.convert_layout(gl.reshape(turned, [R, HEAD_DIM]), L, assert_trivial=True)


@gluon.jit
def _cache_row(table_ptr, blocks, place, PAGED: gl.constexpr):
    """The row of the cache where position `place`, a multiple of 16 or the newest one, lies."""
    if PAGED:
        entry = gl.load(table_ptr + gl.minimum(place >> BLOCK_BITS, blocks - 1))
        return (entry << BLOCK_BITS) + (place & (BLOCK - 1))
    else:
        return place


@gluon.jit(do_not_specialize=["context", "blocks"])
def _attention_warps_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, query_scale_ptr, position_ptr, table_ptr, k_ptr, v_ptr,
    mixed_ptr, state_ptr, arrived_ptr, out_ptr, low_ptr, out_scale_ptr, sums_ptr,
    eps, scale, context, blocks, qkv_stride, out_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROPE_DIM: gl.constexpr,
    HALVES: gl.constexpr, NORM: gl.constexpr, QUERY_SCALE: gl.constexpr, WINDOW: gl.constexpr, PAGED: gl.constexpr,
    SLICES: gl.constexpr, LEAST: gl.constexpr, WARPS: gl.constexpr, KEYS: gl.constexpr, ROUND: gl.constexpr,
    FORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    S: gl.constexpr = terms_added(gl.zeros([WARPS, KEYS, 2 * HEADS], gl.float32, MMA)).type.layout
    ALL_HEADS: gl.constexpr = KV_HEADS * GROUP
    STEP: gl.constexpr = WARPS * KEYS
    kv_head = gl.program_id(0)
    part = gl.program_id(1)
    sequence = gl.program_id(2).to(gl.int64)
    position = gl.load(position_ptr + sequence)
    # Keys before the new one, cut into `slices` slices of `per_slice`. A warp's keys lie in one block of a pool.
    oldest = 0
    if WINDOW > 0:
        oldest = gl.maximum(position - (WINDOW - 1), 0)
    first = oldest // KEYS * KEYS
    per_slice = gl.maximum(gl.cdiv(gl.cdiv(position - first, SLICES), STEP) * STEP, LEAST)
    slices = gl.minimum(gl.maximum(gl.cdiv(position - first, per_slice), 1), gl.num_programs(1))
    if part < slices:
        if PAGED:
            head_rows = kv_head.to(gl.int64) * context
            table_ptr += sequence * blocks
        else:
            head_rows = (sequence * KV_HEADS + kv_head) * context
        k_ptr += head_rows * HEAD_DIM
        v_ptr += head_rows * HEAD_DIM
        k_words = k_ptr.to(gl.pointer_type(gl.int32))
        v_words = v_ptr.to(gl.pointer_type(gl.int32))
        begin = first + part * per_slice
        end = gl.minimum(begin + per_slice, position)
        # The first keys and values are on their way before the launch in front has delivered the queries.
        own = begin + KEYS * threads(KEYS * HEAD_DIM // 64, WARPS)[0]
        row = _cache_row(table_ptr, blocks, own, PAGED)
        k_at, k_key = key_words(row, KEYS, HEAD_DIM, WARPS)
        keys = _load(k_words, k_at, k_key, own, oldest, end)
        v_at, v_key = value_words(row, KEYS, HEAD_DIM, WARPS)
        values = _load(v_words, v_at, v_key, own, oldest, end)
        row = _cache_row(table_ptr, blocks, own + STEP, PAGED)
        new_row = _cache_row(table_ptr, blocks, position, PAGED)
        if PDL:
            tl.extra.cuda.gdc_wait()

        qkv_ptr += sequence * qkv_stride
        angles = position.to(gl.int64) * (ROPE_DIM // 2)
        # Queries and the new key are rotated once, by all threads, and pass to all warps through shared memory.
        R: gl.constexpr = gl.BlockedLayout([1, 4], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
        h = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, R)), 1)
        q = _rotated(
            qkv_ptr + (kv_head * GROUP + h) * HEAD_DIM, h < GROUP, cos_ptr + angles, sin_ptr + angles,
            q_norm_ptr, eps, HEAD_DIM, ROPE_DIM, HALVES, NORM, R,
        )  # fmt: skip
        # Slice 0 writes the new key and value, and its first warp attends to them; nobody reads them back here.
        one = gl.expand_dims(gl.arange(0, 1, layout=gl.SliceLayout(1, R)), 1)
        owner = one + part == 0
        k_new = _rotated(
            qkv_ptr + (ALL_HEADS + kv_head + one) * HEAD_DIM, owner, cos_ptr + angles, sin_ptr + angles, k_norm_ptr,
            eps, HEAD_DIM, ROPE_DIM, HALVES, NORM, R,
        ).to(gl.float16)  # fmt: skip
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        queries = gl.allocate_shared_memory(gl.float16, [2 * HEADS, HEAD_DIM], plain)
        new_key = gl.allocate_shared_memory(gl.float16, [1, HEAD_DIM], plain)
        queries.store(two_terms(q))
        new_key.store(k_new)
        operand = query_operand(queries, WARPS, B)
        if QUERY_SCALE:
            scale *= gl.load(query_scale_ptr + position)
        room = blocks * BLOCK if PAGED else context
        d = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, R)), 0)
        gl.store(k_ptr + new_row * HEAD_DIM + d, k_new, mask=owner & (position < room))
        nothing = gl.zeros([WARPS, 16, 2 * HEADS], gl.float32, MMA)
        new_score = terms_added(mma_v2(one_key_operand(new_key, WARPS, A), operand, nothing))
        new_score = gl.convert_layout(gl.max(new_score, 1), gl.SliceLayout(1, S), assert_trivial=True) * scale
        warp, r, c, m = threads(HEAD_DIM // 8, WARPS)
        d = 64 * (m // 8) + 8 * r + m % 8
        owner = (warp == 0) & (part == 0)
        v_new = gl.load(qkv_ptr + (ALL_HEADS + KV_HEADS + kv_head) * HEAD_DIM + d, mask=owner, other=0.0)
        v_new = v_new.to(gl.float16)
        gl.store(v_ptr + new_row * HEAD_DIM + d, v_new, mask=owner & (c == 0) & (position < room))

        s_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, S)))
        owner = (gl.expand_dims(s_warp, 1) == 0) & (part == 0)
        largest = gl.where(owner, new_score, LOWEST)
        total = gl.where(owner, 1.0, gl.zeros([WARPS, HEADS], gl.float32, gl.SliceLayout(1, S)))
        mixed = alone(v_new.to(gl.float32), HEAD_DIM, HEADS, WARPS, MMA)
        s_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, S)))
        s_key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, S)))
        s_key = KEYS * gl.expand_dims(s_warp, 1) + gl.expand_dims(s_key, 0)
        s_key = gl.expand_dims(s_key, 2)
        for start in range(begin, end, STEP):
            place = start + s_key
            none = gl.zeros([WARPS, KEYS, 2 * HEADS], gl.float32, MMA)
            s = terms_added(mma_v2(key_operand(keys, KEYS, HEAD_DIM, WARPS, A), operand, none)) * scale
            # The next keys and values are asked for as soon as the registers of these are free.
            own += STEP
            k_at, k_key = key_words(row, KEYS, HEAD_DIM, WARPS)
            keys = _load(k_words, k_at, k_key, own, oldest, end)
            s = gl.where((place >= oldest) & (place < end), s, LOWEST)
            larger = gl.maximum(largest, gl.max(s, 1))
            shrink = gl.exp2(largest - larger)
            largest = larger
            p = gl.exp2(s - gl.expand_dims(largest, 1))
            total = total * shrink + gl.sum(p, 1)
            mixed *= of_both_terms(shrink, MMA)
            v = value_operand(values, KEYS, HEAD_DIM, WARPS, A)
            mixed = mma_v2(v, weight_operand(p, B), mixed)
            v_at, v_key = value_words(row, KEYS, HEAD_DIM, WARPS)
            values = _load(v_words, v_at, v_key, own, oldest, end)
            row = _cache_row(table_ptr, blocks, own + STEP, PAGED)
        if PDL:
            # Not earlier: blocks of the next launch beside these would leave the multiprocessors unevenly filled.
            tl.extra.cuda.gdc_launch_dependents()

        F: gl.constexpr = gl.BlockedLayout(
            [WARPS, 1, 4], [1, 128 // HEAD_DIM, HEAD_DIM // 4], [1, WARPS, 1], [2, 1, 0]
        )
        STATES: gl.constexpr = gl.SliceLayout(2, F)
        meeting = gl.allocate_shared_memory(
            gl.float32, [WARPS, HEADS, HEAD_DIM], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
        )
        tops_there = gl.allocate_shared_memory(gl.float32, [WARPS, HEADS], plain)
        totals_there = gl.allocate_shared_memory(gl.float32, [WARPS, HEADS], plain)
        meeting.store(columns_in_order(terms_added(mixed), HEAD_DIM))
        tops_there.store(largest)
        totals_there.store(total)
        top, sum, out = merged(tops_there.load(STATES), totals_there.load(STATES), meeting.load(F), F)

        if FORM < 0:
            out_ptr += sequence * (ALL_HEADS * HEAD_DIM)
        outputs = (
            out_ptr, low_ptr + sequence * (ALL_HEADS * HEAD_DIM),
            out_scale_ptr + sequence * (ALL_HEADS * HEAD_DIM // 32),
            sums_ptr + sequence * (ALL_HEADS * HEAD_DIM // 16),
        )  # fmt: skip
        head = kv_head * GROUP
        if slices == 1:
            out = out / gl.expand_dims(sum, 1)
            store_heads(out, head, outputs, sequence, out_stride, GROUP, HEADS, HEAD_DIM, ROUND, FORM, F)
        else:
            mixed_ptr += sequence * (ALL_HEADS * SLICES * HEAD_DIM)
            state_ptr += sequence * (ALL_HEADS * SLICES * 2)
            member = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(0, F)))
            live = member < GROUP
            at = (head + member) * SLICES + part
            column = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, F))), 0)
            gl.store(mixed_ptr + gl.expand_dims(at, 1) * HEAD_DIM + column, out, mask=gl.expand_dims(live, 1))
            gl.store(state_ptr + at * 2, top, mask=live)
            gl.store(state_ptr + at * 2 + 1, sum, mask=live)
            tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
            arrived = arrived_ptr + sequence * KV_HEADS + kv_head
            if gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == slices - 1:
                gl.store(arrived, 0)
                sum, out = merged_slices(
                    mixed_ptr, state_ptr, head, slices, GROUP, HEADS, HEAD_DIM, SLICES, F
                )
                out = out / gl.expand_dims(sum, 1)
                store_heads(out, head, outputs, sequence, out_stride, GROUP, HEADS, HEAD_DIM, ROUND, FORM, F)


def launch_warps(given: DecodeArguments) -> None:
    """The launch, in this kernel's slices.

    Numerics: keys and values as they are stored; queries, and the weights of the softmax, in two fp16 terms (22 bits);
    sums in fp32, in an order that follows from the position alone. Source: Dao et al. 2023 (Flash-Decoding).
    """
    chosen = COARSE if given.coarse else FINE
    _attention_warps_kernel[given.grid(chosen.least, more=1)](
        *given.leading(),
        given.cache.k,
        given.cache.v,
        *given.trailing(),
        **given.constants(),
        HEADS=4 if given.group <= 4 else 8,
        LEAST=chosen.least,
        WARPS=chosen.warps,
        KEYS=KEYS,
        num_warps=chosen.warps,
        maxnreg=_registers(given),
        launch_pdl=given.pdl,
    )


def _registers(given: DecodeArguments) -> int:
    """Registers of a thread, at most; left to itself, ptxas may stop at fewer than it needs, and spill.

    Which register holds what does not touch the sums: a row has the same bits either way. 128 are enough on Hopper
    (where there is dependent launch), and a few too little before.
    """
    programs = given.qkv.shape[0] * given.cache.k.shape[1]
    return 128 if given.coarse and given.pdl and given.group <= 4 and programs > FEW_PROGRAMS else 255
