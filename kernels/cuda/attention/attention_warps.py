"""Decode attention in registers: each warp of a program takes keys of its own, and they are combined at the end.

The same work as attention_tiles.py's kernel (one KV split of one key-value head a program), for fp16 caches, heads of
64 or 128 and groups of up to 8, where it is the faster one. There, tiles pass through shared memory between barriers;
here a warp loads keys and values as the operands of the matrix instruction (attention_operands.py), and scores and
weights stay in the registers where that leaves them.
"""

import os
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_arguments import LOG2_E, DecodeArguments
from quengine.kernels.cuda.attention.attention_merge import LOWEST, merged, merged_splits, store_heads
from quengine.kernels.cuda.attention.attention_operands import (
    columns_in_order,
    key_operand,
    key_words,
    of_both_terms,
    one_key_operand,
    query_operand,
    single_value,
    terms_added,
    threads,
    two_terms,
    value_operand,
    value_words,
    weight_operand,
)
from quengine.kernels.cuda.attention.kv_store import BLOCK, BLOCK_BITS, cache_pointers
from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.launch_chain import Link, arrive_in_gluon, await_link, begin_link

_KEYS = gl.constexpr(16)
"""Keys of a warp at a time: 16 or 32."""

_LOG2_E = gl.constexpr(LOG2_E)
_HOIST = os.environ.get("QE_HOIST", "0") == "1"
_EARLY = os.environ.get("QE_EARLY", "0") == "1"
_FINE_REGISTERS = int(os.environ.get("QE_REGS", "255"))

FEW_PROGRAMS = 264
"""Programs of which two on each multiprocessor of an H200 are all. More of them should lie four on one, which takes
half of the registers; fewer should not, since they would fill some multiprocessors and leave others empty."""


class SplitShape(NamedTuple):
    """Warps of a program, and how many keys a KV split has at least: a multiple of what the warps read at once."""

    warps: int
    least: int


FINE = SplitShape(8, 128)
"""Of a single sequence. 4 warps are up to 0.5 us faster below 128 keys, and slower above: 25% at 16384."""

COARSE = SplitShape(4, 512)
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
def _pairs(x, ROPE: gl.constexpr):
    """The two elements of each rotated pair of heads [R, HEAD_DIM]: [R, HEAD_DIM / 2] each."""
    R: gl.constexpr = x.shape[0]
    HEAD_DIM: gl.constexpr = x.shape[1]
    if ROPE.halves:
        pairs = gl.permute(gl.reshape(x, [R, 2, HEAD_DIM // 2]), [0, 2, 1])
    else:
        pairs = gl.reshape(x, [R, HEAD_DIM // 2, 2])
    return gl.split(pairs)


@gluon.jit
def _rotation_of(
    rotation, norm_ptr, position, R: gl.constexpr, HEAD_DIM: gl.constexpr, ROPE: gl.constexpr, L: gl.constexpr
):
    """What `_rotated` needs for R heads at a position, none of it from the PDL producer: cosines and sines, the norm's
    weights."""
    near, _ = _pairs(gl.zeros([R, HEAD_DIM], gl.float32, L), ROPE)
    angle = gl.expand_dims(gl.arange(0, HEAD_DIM // 2, layout=gl.SliceLayout(0, near.type.layout)), 0)
    row = position.to(gl.int64) * (ROPE.dim // 2)
    cos = gl.load(rotation.cos + row + angle, mask=angle < ROPE.dim // 2, other=1.0)
    sin = gl.load(rotation.sin + row + angle, mask=angle < ROPE.dim // 2, other=0.0)
    norm = cos
    if ROPE.norm:
        d = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, L)), 0)
        norm = gl.load(norm_ptr + d).to(gl.float32)
    return cos, sin, norm


@gluon.jit
def _rotated(heads, live, turn, eps, HEAD_DIM: gl.constexpr, ROPE: gl.constexpr, L: gl.constexpr, HOIST: gl.constexpr):
    """Heads at pointers `heads` [R, 1], normalized where ROPE.norm, rotated by `turn` (`_rotation_of`): fp32 [R,
    HEAD_DIM] in a layout in which both of a rotated pair are one thread's. 0 where not live."""
    R: gl.constexpr = heads.shape[0]
    d = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, L)), 0)
    x = gl.load(heads + d, mask=live, other=0.0)
    if ROPE.norm:
        x *= gl.expand_dims(gl.rsqrt(gl.sum(x * x, 1) / HEAD_DIM + eps), 1)
    if HOIST:
        cos, sin, norm = turn
    else:
        cos, sin, norm = _rotation_of(turn[0], turn[1], turn[2], R, HEAD_DIM, ROPE, L)
    if ROPE.norm:
        x *= norm
    near, far = _pairs(x, ROPE)
    turned = gl.join(near * cos - far * sin, far * cos + near * sin)
    if ROPE.halves:
        turned = gl.permute(turned, [0, 2, 1])
    return gl.convert_layout(gl.reshape(turned, [R, HEAD_DIM]), L, assert_trivial=True)


@gluon.jit
def _cache_row(table_ptr, blocks, position):
    """The cache row of a position, a multiple of 16 or the newest one."""
    entry = gl.load(table_ptr + gl.minimum(position >> BLOCK_BITS, blocks - 1))
    return (entry << BLOCK_BITS) + (position & (BLOCK - 1))


@gluon.jit
def _combine_warps(acc, row_max, row_sum, SHAPE: gl.constexpr, F: gl.constexpr):
    """The parts of all warps through shared memory: row_max, row_sum [HEADS], acc fp32 [HEADS, HEAD_DIM]."""
    WARPS: gl.constexpr = acc.shape[0]
    HEADS: gl.constexpr = row_max.shape[1]
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    STATES: gl.constexpr = gl.SliceLayout(2, F)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared_acc = gl.allocate_shared_memory(
        gl.float32, [WARPS, HEADS, HEAD_DIM], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    )
    shared_max = gl.allocate_shared_memory(gl.float32, [WARPS, HEADS], PLAIN)
    shared_sum = gl.allocate_shared_memory(gl.float32, [WARPS, HEADS], PLAIN)
    shared_acc.store(columns_in_order(terms_added(acc), HEAD_DIM))
    shared_max.store(row_max)
    shared_sum.store(row_sum)
    return merged(shared_max.load(STATES), shared_sum.load(STATES), shared_acc.load(F), F)


@gluon.jit
def _finish(
    row_max, row_sum, out, workspace, outputs, kv_head, part, splits, sequence, out_stride, link,
    SHAPE: gl.constexpr, SPLITS: gl.constexpr, HEADS: gl.constexpr, QUANTIZE: gl.constexpr, FORM: gl.constexpr,
    F: gl.constexpr,
):  # fmt: skip
    """Store a program's heads, or leave them to the last of the splits, which combines all of them."""
    ALL_HEADS: gl.constexpr = SHAPE.kv_heads * SHAPE.group
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    values_ptr = outputs.data
    if FORM < 0:
        values_ptr += sequence * (ALL_HEADS * HEAD_DIM)
    own = (
        values_ptr, outputs.low + sequence * (ALL_HEADS * HEAD_DIM),
        outputs.scale + sequence * (ALL_HEADS * HEAD_DIM // 32),
        outputs.sums + sequence * (ALL_HEADS * HEAD_DIM // 16),
    )  # fmt: skip
    head = kv_head * SHAPE.group
    if splits == 1:
        out = out / gl.expand_dims(row_sum, 1)
        store_heads(out, head, own, sequence, out_stride, SHAPE, HEADS, QUANTIZE, FORM, F)
        arrive_in_gluon(link)
    else:
        acc_ptr = workspace.acc + sequence * (ALL_HEADS * SPLITS * HEAD_DIM)
        state_ptr = workspace.state + sequence * (ALL_HEADS * SPLITS * 2)
        member = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(0, F)))
        live = member < SHAPE.group
        at = (head + member) * SPLITS + part
        column = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, F))), 0)
        gl.store(acc_ptr + gl.expand_dims(at, 1) * HEAD_DIM + column, out, mask=gl.expand_dims(live, 1))
        gl.store(state_ptr + at * 2, row_max, mask=live)
        gl.store(state_ptr + at * 2 + 1, row_sum, mask=live)
        tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
        arrivals = workspace.arrivals + sequence * SHAPE.kv_heads + kv_head
        if gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == splits - 1:
            gl.store(arrivals, 0)
            row_sum, out = merged_splits(acc_ptr, state_ptr, head, splits, SHAPE, HEADS, SPLITS, F)
            out = out / gl.expand_dims(row_sum, 1)
            store_heads(out, head, own, sequence, out_stride, SHAPE, HEADS, QUANTIZE, FORM, F)
            arrive_in_gluon(link)


@gluon.jit(do_not_specialize=["cache_rows", "blocks", "awaited"])
def _attention_warps_kernel(
    qkv_ptr, rotation, position_ptr, table_ptr, sink_ptr, k_ptr, v_ptr, workspace, outputs,
    eps, scale, cache_rows, blocks, qkv_stride, out_stride, producer_ptr, counter_ptr, awaited,
    SHAPE: gl.constexpr, ROPE: gl.constexpr, WINDOW: gl.constexpr, SPLITS: gl.constexpr, SPLIT: gl.constexpr,
    HEADS: gl.constexpr, QUANTIZE: gl.constexpr, FORM: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
    HOIST: gl.constexpr,
):  # fmt: skip
    """Programs (key-value head, KV split, sequence). HEADS: 4 or 8, heads there is room for. sink_ptr: [heads], or
    None."""
    WARPS: gl.constexpr = SPLIT.warps
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    GROUP: gl.constexpr = SHAPE.group
    ALL_HEADS: gl.constexpr = SHAPE.kv_heads * GROUP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    S: gl.constexpr = terms_added(gl.zeros([WARPS, _KEYS, 2 * HEADS], gl.float32, MMA)).type.layout
    STEP: gl.constexpr = WARPS * _KEYS
    kv_head = gl.program_id(0)
    part = gl.program_id(1)
    sequence = gl.program_id(2).to(gl.int64)
    link = Link(producer_ptr, counter_ptr)
    if EARLY:
        begin_link(link, awaited, PDL)
    position = gl.load(position_ptr + sequence)
    # Keys before the new one, cut into `splits` splits of `per_split`. A warp's keys lie in one block of the cache, the
    # first of them in that of the oldest visible key.
    oldest = 0
    if WINDOW > 0:
        oldest = gl.maximum(position - (WINDOW - 1), 0)
    first = oldest // _KEYS * _KEYS
    per_split = gl.maximum(gl.cdiv(gl.cdiv(position - first, SPLITS), STEP) * STEP, SPLIT.least)
    splits = gl.minimum(gl.maximum(gl.cdiv(position - first, per_split), 1), gl.num_programs(1))
    if part < splits:
        head_rows = kv_head.to(gl.int64) * cache_rows
        table_ptr += sequence * blocks
        k_ptr += head_rows * HEAD_DIM
        v_ptr += head_rows * HEAD_DIM
        k_words = k_ptr.to(gl.pointer_type(gl.int32))
        v_words = v_ptr.to(gl.pointer_type(gl.int32))
        begin = first + part * per_split
        end = gl.minimum(begin + per_split, position)
        # The first keys and values are fetched before the PDL producer has delivered the queries.
        own = begin + _KEYS * threads(_KEYS * HEAD_DIM // 64, WARPS)[0]
        row = _cache_row(table_ptr, blocks, own)
        k_at, k_key = key_words(row, _KEYS, HEAD_DIM, WARPS)
        keys = _load(k_words, k_at, k_key, own, oldest, end)
        v_at, v_key = value_words(row, _KEYS, HEAD_DIM, WARPS)
        values = _load(v_words, v_at, v_key, own, oldest, end)
        row = _cache_row(table_ptr, blocks, own + STEP)
        new_row = _cache_row(table_ptr, blocks, position)
        if sink_ptr is not None:
            member = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(0, gl.SliceLayout(1, S))), 0)
            sink = gl.load(sink_ptr + kv_head * GROUP + member, mask=member < GROUP, other=0.0) * _LOG2_E
        # Queries and the new key are rotated once, by all threads, and pass to all warps through shared memory.
        R: gl.constexpr = gl.BlockedLayout([1, 4], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
        if HOIST:
            turn = _rotation_of(rotation, rotation.q_norm, position, HEADS, HEAD_DIM, ROPE, R)
            turn_new = _rotation_of(rotation, rotation.k_norm, position, 1, HEAD_DIM, ROPE, R)
        else:
            turn = (rotation, rotation.q_norm, position)
            turn_new = (rotation, rotation.k_norm, position)
        await_link(link, awaited, PDL)

        qkv_ptr += sequence * qkv_stride
        h = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, R)), 1)
        q = _rotated(
            qkv_ptr + (kv_head * GROUP + h) * HEAD_DIM, h < GROUP, turn, eps, HEAD_DIM, ROPE, R, HOIST
        )  # fmt: skip
        # Split 0 writes the new key and value, and its first warp attends to them; they are not read back here.
        one = gl.expand_dims(gl.arange(0, 1, layout=gl.SliceLayout(1, R)), 1)
        owner = one + part == 0
        k_new = _rotated(
            qkv_ptr + (ALL_HEADS + kv_head + one) * HEAD_DIM, owner, turn_new, eps, HEAD_DIM, ROPE, R, HOIST
        ).to(gl.float16)  # fmt: skip
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        queries = gl.allocate_shared_memory(gl.float16, [2 * HEADS, HEAD_DIM], PLAIN)
        new_key = gl.allocate_shared_memory(gl.float16, [1, HEAD_DIM], PLAIN)
        queries.store(two_terms(q))
        new_key.store(k_new)
        operand = query_operand(queries, WARPS, B)
        if ROPE.query_scale:
            scale *= gl.load(rotation.query_scale + position)
        inside = position < blocks * BLOCK
        d = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, R)), 0)
        gl.store(k_ptr + new_row * HEAD_DIM + d, k_new, mask=owner & inside)
        nothing = gl.zeros([WARPS, 16, 2 * HEADS], gl.float32, MMA)
        new_score = terms_added(mma_v2(one_key_operand(new_key, WARPS, A), operand, nothing))
        new_score = gl.convert_layout(gl.max(new_score, 1), gl.SliceLayout(1, S), assert_trivial=True) * scale
        warp, r, c, m = threads(HEAD_DIM // 8, WARPS)
        d = 64 * (m // 8) + 8 * r + m % 8
        owner = (warp == 0) & (part == 0)
        v_new = gl.load(
            qkv_ptr + (ALL_HEADS + SHAPE.kv_heads + kv_head) * HEAD_DIM + d, mask=owner, other=0.0
        )
        v_new = v_new.to(gl.float16)
        gl.store(v_ptr + new_row * HEAD_DIM + d, v_new, mask=owner & (c == 0) & inside)

        s_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, S)))
        owner = (gl.expand_dims(s_warp, 1) == 0) & (part == 0)
        row_max = gl.where(owner, new_score, LOWEST)
        row_sum = gl.where(owner, 1.0, gl.zeros([WARPS, HEADS], gl.float32, gl.SliceLayout(1, S)))
        acc = single_value(v_new.to(gl.float32), HEAD_DIM, HEADS, WARPS, MMA)
        if sink_ptr is not None:  # the owner has the sinks too
            new_max = gl.maximum(new_score, sink)
            weight = gl.exp2(new_score - new_max)
            row_max = gl.where(owner, new_max, LOWEST)
            row_sum = gl.where(owner, weight + gl.exp2(sink - new_max), 0.0)
            acc *= of_both_terms(weight, MMA)
        s_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, S)))
        s_key = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, S)))
        s_key = _KEYS * gl.expand_dims(s_warp, 1) + gl.expand_dims(s_key, 0)
        s_key = gl.expand_dims(s_key, 2)
        for start in range(begin, end, STEP):
            key = start + s_key
            none = gl.zeros([WARPS, _KEYS, 2 * HEADS], gl.float32, MMA)
            s = terms_added(mma_v2(key_operand(keys, _KEYS, HEAD_DIM, WARPS, A), operand, none)) * scale
            # The next keys and values are fetched as soon as the registers of these are free.
            own += STEP
            k_at, k_key = key_words(row, _KEYS, HEAD_DIM, WARPS)
            keys = _load(k_words, k_at, k_key, own, oldest, end)
            s = gl.where((key >= oldest) & (key < end), s, LOWEST)
            new_max = gl.maximum(row_max, gl.max(s, 1))
            rescale = gl.exp2(row_max - new_max)
            row_max = new_max
            p = gl.exp2(s - gl.expand_dims(row_max, 1))
            row_sum = row_sum * rescale + gl.sum(p, 1)
            acc *= of_both_terms(rescale, MMA)
            v = value_operand(values, _KEYS, HEAD_DIM, WARPS, A)
            acc = mma_v2(v, weight_operand(p, B), acc)
            v_at, v_key = value_words(row, _KEYS, HEAD_DIM, WARPS)
            values = _load(v_words, v_at, v_key, own, oldest, end)
            row = _cache_row(table_ptr, blocks, own + STEP)
        if not EARLY:
            # Not earlier: consumer blocks beside these would leave the multiprocessors unevenly filled.
            begin_link(link, awaited, PDL)

        F: gl.constexpr = gl.BlockedLayout(
            [WARPS, 1, 4], [1, 128 // HEAD_DIM, HEAD_DIM // 4], [1, WARPS, 1], [2, 1, 0]
        )
        row_max, row_sum, out = _combine_warps(acc, row_max, row_sum, SHAPE, F)
        _finish(
            row_max, row_sum, out, workspace, outputs, kv_head, part, splits, sequence, out_stride, link,
            SHAPE, SPLITS, HEADS, QUANTIZE, FORM, F,
        )  # fmt: skip


def launch_warps(given: DecodeArguments) -> None:
    """The launch, with this kernel's KV splits.

    Numerics: keys and values as they are stored; queries, and the weights of the softmax, in two fp16 terms (22 bits);
    sums in fp32, in an order that follows from the position alone. Source: Dao et al. 2023 (Flash-Decoding).
    """
    split = COARSE if given.coarse else FINE
    cache = cache_pointers(given.layer)
    _attention_warps_kernel[given.grid(split.least, more=1)](
        *given.inputs(), cache.k, cache.v, *given.results(), *given.link, given.awaited, **given.constants(),
        EARLY=_EARLY, HOIST=_HOIST,
        HEADS=4 if given.shape.group <= 4 else 8, SPLIT=split,
        num_warps=split.warps, maxnreg=_registers(given), launch_pdl=given.pdl,
    )  # fmt: skip


def _registers(given: DecodeArguments) -> int:
    """Registers of a thread, at most; left to itself, ptxas may stop at fewer than it needs, and spill.

    Which register holds what does not touch the sums: a row has the same bits either way. 128 are enough on Hopper
    (where there is PDL), and a few too little before.
    """
    programs = given.qkv.shape[0] * given.shape.kv_heads
    if not given.coarse and given.pdl and given.shape.group <= 4:
        return _FINE_REGISTERS
    return 128 if given.coarse and given.pdl and given.shape.group <= 4 and programs > FEW_PROGRAMS else 255
