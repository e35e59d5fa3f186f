"""Decode attention in registers: each warp of a program takes its own keys, and the warps are combined at the end.

It does the work of attention_tiles.py's kernel (one KV split of one key/value head per program), for heads of 64 or
128 and groups of up to 8, and for some of 256 (`takes`), where it is faster. That kernel passes tiles through shared
memory between barriers; here a warp loads keys and values as matrix operands (attention_operands.py), and scores and
weights stay in the registers of the result. The new key and value are added when the warps are combined.

With a q8_0 cache the codes are multiplied as fp16. A key's scales multiply the scores of its groups of columns; a
value's scales multiply the softmax weights, which are separate for each group. Codes of a q4_0 cache become exact
values in registers, and a warp takes twice as many keys at a time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cuda.attention.attention_arguments import LOG2_E, DecodeArguments
from quengine.kernels.cuda.attention.attention_merge import LOWEST, merged, merged_splits, store_heads
from quengine.kernels.cuda.attention.attention_operands import (
    columns_in_order,
    key_operand,
    key_scales,
    key_words,
    of_both_terms,
    of_keys,
    query_operand,
    scale_of,
    scale_words,
    terms_added,
    threads,
    two_terms,
    value_operand,
    value_scales,
    value_words,
    weight_operand,
)
from quengine.kernels.cuda.attention.hadamard import REMAINDERS, hadamard_terms
from quengine.kernels.cuda.attention.kv_store import (
    BLOCK,
    BLOCK_BITS,
    cache_pointers,
    packed_codes,
    q4_0_codes,
    q8_0_codes,
    row_width,
)
from quengine.kernels.cuda.gemm.mma import uses_assembly


@triton.constexpr_function
def warp_keys(bits: int) -> int:
    """Keys that a warp takes at a time: 16 or 32, from benchmarks/cuda/attention.py on an H200."""
    return 32 if bits == 4 else 16


_LOG2_E = gl.constexpr(LOG2_E)

FEW_PROGRAMS = 264
"""Programs up to which an H200 holds all of them, two per multiprocessor. More programs should run four per
multiprocessor, with half of the registers; fewer should not, as they would fill some multiprocessors and
leave others empty.
"""


class SplitShape(NamedTuple):
    """Warps per program, and the least keys of a KV split: a multiple of the keys that the warps read at a
    time. early: the PDL consumer may start along with this launch, not only once its keys have been read.
    """

    warps: int
    least: int
    early: bool = False


FINE = SplitShape(8, 128, early=True)
"""For a single sequence. 4 warps are up to 0.5 us faster below 128 keys, and slower above: 25% at 16384."""

COARSE = SplitShape(4, 512)
"""For batches, where other sequences fill the device: several programs per multiprocessor, and fewer splits
to combine.
"""


def split_shape(bits: int, coarse: bool) -> SplitShape:
    """FINE or COARSE, with whole steps of the warps."""
    shape = COARSE if coarse else FINE
    return shape._replace(least=max(shape.least, shape.warps * warp_keys(bits)))


def takes(qkv: Tensor, spec: AttentionSpec, layer: KVLayer, coarse: bool) -> bool:
    """Whether this kernel, on a GPU, supports a layer's heads: one thread must hold both elements of a rotated pair.
    Heads of 256 take all registers of a program: only groups of up to 4, an fp16 cache and no `coarse` splits."""
    rotates = 2 * spec.cos.shape[1] == spec.head_dim or spec.rope_layout == "pairs"
    aligned = qkv.dtype == torch.float32 and qkv.stride(0) % 4 == 0 and qkv.data_ptr() % 16 == 0
    shaped = spec.heads <= 8 * spec.kv_heads and spec.head_dim in (64, 128)
    shaped |= (
        spec.head_dim == 256 and spec.heads <= 4 * spec.kv_heads and not layer.format.coded and not coarse
    )
    plain = not spec.gated and not spec.softcap and not spec.shared
    return uses_assembly() and shaped and plain and rotates and aligned


@gluon.jit
def _load(ptr, words, key, first, begin, end, PARTS: gl.constexpr = 1):
    """Loads words of cache rows, in parts 8 words apart; 0 for keys outside begin .. end - 1. `first`: the
    warp's first key.
    """
    place = gl.convert_layout(first, key.type.layout, assert_trivial=True) + key
    parts = ()
    for part in gl.static_range(PARTS):
        parts = parts + (gl.load(ptr + words + 8 * part, mask=(place >= begin) & (place < end), other=0),)
    return parts


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
def _turn_at(
    row, rotation, norm_ptr, R: gl.constexpr, HEAD_DIM: gl.constexpr, ROPE: gl.constexpr, L: gl.constexpr
):
    """Inputs of `_rotated` for R heads: a row of cosines and sines, norm weights. The PDL producer writes none."""
    near, _ = _pairs(gl.zeros([R, HEAD_DIM], gl.float32, L), ROPE)
    angle = gl.expand_dims(gl.arange(0, HEAD_DIM // 2, layout=gl.SliceLayout(0, near.type.layout)), 0)
    row *= ROPE.dim // 2
    cos = gl.load(rotation.cos + row + angle, mask=angle < ROPE.dim // 2, other=1.0)
    sin = gl.load(rotation.sin + row + angle, mask=angle < ROPE.dim // 2, other=0.0)
    norm = cos
    if ROPE.norm:
        d = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, L)), 0)
        norm = gl.load(norm_ptr + d).to(gl.float32)
    return cos, sin, norm


@gluon.jit
def _rotated(heads, live, turn, eps, HEAD_DIM: gl.constexpr, ROPE: gl.constexpr, L: gl.constexpr):
    """Heads at pointers `heads` [R, 1], rotated by `turn` (`_turn_at`), normalized before or after where ROPE says so:
    fp32 [R, HEAD_DIM] in a layout in which both of a rotated pair are one thread's. 0 where not live."""
    R: gl.constexpr = heads.shape[0]
    d = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, L)), 0)
    x = gl.load(heads + d, mask=live, other=0.0)
    cos, sin, norm = turn
    if ROPE.norm and not ROPE.norm_rotated:
        x *= gl.expand_dims(gl.rsqrt(gl.sum(x * x, 1) / HEAD_DIM + eps), 1)
        x *= norm
    near, far = _pairs(x, ROPE)
    turned = gl.join(near * cos - far * sin, far * cos + near * sin)
    if ROPE.halves:
        turned = gl.permute(turned, [0, 2, 1])
    x = gl.convert_layout(gl.reshape(turned, [R, HEAD_DIM]), L, assert_trivial=True)
    if ROPE.norm_rotated:
        x *= gl.expand_dims(gl.rsqrt(gl.sum(x * x, 1) / HEAD_DIM + eps), 1)
        x *= norm
    return x


@gluon.jit
def _cache_row(table_ptr, blocks, position):
    """The cache row of a position that is a multiple of 16 or the newest one."""
    entry = gl.load(table_ptr + gl.minimum(position >> BLOCK_BITS, blocks - 1))
    return (entry << BLOCK_BITS) + (position & (BLOCK - 1))


@gluon.jit
def _new_codes(x, BITS: gl.constexpr):
    """A new key and value, fp32 [2, HEAD_DIM], as stored and as the cache would return them, fp32 [2, HEAD_DIM]; of
    codes with their scales, fp16 [2, HEAD_DIM / 32]."""
    HEAD_DIM: gl.constexpr = x.shape[1]
    L: gl.constexpr = x.type.layout
    if BITS == 16:
        codes = x.to(gl.float16)
        scale = codes
        read_back = codes.to(gl.float32)
    else:
        groups = gl.reshape(x, [2, HEAD_DIM // 32, 32])
        if BITS == 8:
            numbers, scale = q8_0_codes(groups)
            scale = scale.to(gl.float16)
            codes = gl.convert_layout(gl.reshape(numbers, [2, HEAD_DIM]), L, assert_trivial=True).to(gl.int8)
        else:
            numbers, scale = q4_0_codes(groups)
            codes = gl.reshape(packed_codes(numbers), [2, HEAD_DIM // 2])
        read_back = gl.reshape(numbers * gl.expand_dims(scale.to(gl.float32), 2), [2, HEAD_DIM])
        read_back = gl.convert_layout(read_back, L, assert_trivial=True)
    return codes, scale, read_back


@triton.constexpr_function
def _packing_layout(head_dim: int, warps: int) -> gl.DistributedLinearLayout:
    """The layout [2, head_dim] in which a thread has both codes of 4 bits of each of its bytes."""
    apart = [[0, 64]] * (head_dim == 128) + [[1, 0]]
    bits = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 16], *apart[bits:]],
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 32]],
        apart[:bits] + [[0, 0]] * (bits - len(apart)),
        [],
        [2, head_dim],
    )


@gluon.jit
def _store_both(ptrs, row, rows, inside):
    """Stores a key's and a value's part `rows` [2, N] to row `row` of each of two pointers if `inside`."""
    N: gl.constexpr = rows.shape[1]
    L: gl.constexpr = rows.type.layout
    which = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(1, L)), 1)
    at = row * N + 0 * which + gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, L)), 0)
    gl.store(ptrs[0] + at, rows, mask=inside & (which == 0))
    gl.store(ptrs[1] + at, rows, mask=inside & (which == 1))


@gluon.jit
def _store_new_rows(rows, cache_ptrs, scale_ptrs, row, inside, WARPS: gl.constexpr, BITS: gl.constexpr):
    """Stores a new key and value, fp32 [2, HEAD_DIM] in shared memory, transformed if they are stored so, to their
    cache row if `inside`; the shared values are replaced by what the cache would return.
    """
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, WARPS // 2], [1, 0])
    PACKED: gl.constexpr = _packing_layout(rows.shape[1], WARPS)
    x = rows.load(PACKED if BITS == 4 else SPREAD)
    codes, scale, read_back = _new_codes(x, BITS)
    _store_both(cache_ptrs, row, codes, inside)
    if BITS < 16:
        _store_both(scale_ptrs, row, scale, inside)
    rows.store(read_back)


@gluon.jit
def _combine_warps(acc, row_max, row_sum, SHAPE: gl.constexpr, BITS: gl.constexpr, F: gl.constexpr):
    """Combines the warps' parts through shared memory: row_max, row_sum [HEADS], acc fp32 [HEADS, HEAD_DIM]."""
    WARPS: gl.constexpr = row_max.shape[0]
    HEADS: gl.constexpr = row_max.shape[1]
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    STATES: gl.constexpr = gl.SliceLayout(2, F)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared_acc = gl.allocate_shared_memory(
        gl.float32, [WARPS, HEADS, HEAD_DIM], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    )
    shared_max = gl.allocate_shared_memory(gl.float32, [WARPS, HEADS], PLAIN)
    shared_sum = gl.allocate_shared_memory(gl.float32, [WARPS, HEADS], PLAIN)
    if BITS == 8:
        for part in gl.static_range(HEAD_DIM // 32):
            columns = columns_in_order(terms_added(acc[part]), BITS)
            shared_acc.slice(32 * part, 32, dim=2).store(columns)
    else:
        shared_acc.store(columns_in_order(terms_added(acc[0]), BITS))
    shared_max.store(row_max)
    shared_sum.store(row_sum)
    return merged(shared_max.load(STATES), shared_sum.load(STATES), shared_acc.load(F), F)


@gluon.jit
def _with_new_key(row_max, row_sum, out, queries, rows, scale, sink, SINKS: gl.constexpr, F: gl.constexpr):
    """Adds the new key and value `rows`, rounded as in the cache, and the sinks to the heads of split 0.
    queries and rows: fp32 [HEADS, HEAD_DIM] and [2, HEAD_DIM] in shared memory.
    """
    ROWS: gl.constexpr = gl.SliceLayout(0, F)
    key = rows.slice(0, 1).load(ROWS)
    score = gl.sum(queries.load(ROWS) * key, 1) * scale
    new_max = gl.maximum(row_max, score)
    if SINKS:
        new_max = gl.maximum(new_max, sink)
    old = gl.exp2(row_max - new_max)
    new = gl.exp2(score - new_max)
    row_sum = row_sum * old + new
    if SINKS:
        row_sum += gl.exp2(sink - new_max)
    value = rows.slice(1, 1).load(ROWS)
    return new_max, row_sum, out * gl.expand_dims(old, 1) + value * gl.expand_dims(new, 1)


@gluon.jit
def _transformed(out):
    """Heads fp32 [HEADS, HEAD_DIM], sums of stored values, transformed, in the same layout."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    terms = gl.allocate_shared_memory(gl.float16, [2 * out.shape[0], out.shape[1]], SHARED)
    terms.store(two_terms(out, REMAINDERS))
    return gl.convert_layout(hadamard_terms(terms, gl.num_warps()), out.type.layout)


@gluon.jit
def _finish(
    row_max, row_sum, out, workspace, outputs, kv_head, part, splits, sequence, out_stride,
    SHAPE: gl.constexpr, BITS: gl.constexpr, SPLITS: gl.constexpr, HEADS: gl.constexpr, QUANTIZE: gl.constexpr,
    FORM: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Stores a program's heads, or their partial results, which the last split to finish combines."""
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
    acc_ptr = workspace.acc + sequence * (ALL_HEADS * SPLITS * HEAD_DIM)
    state_ptr = workspace.state + sequence * (ALL_HEADS * SPLITS * 2)
    last = splits == 1
    if splits > 1:
        member = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(0, F)))
        live = member < SHAPE.group
        at = (head + member) * SPLITS + part
        column = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, F))), 0)
        gl.store(acc_ptr + gl.expand_dims(at, 1) * HEAD_DIM + column, out, mask=gl.expand_dims(live, 1))
        gl.store(state_ptr + at * 2, row_max, mask=live)
        gl.store(state_ptr + at * 2 + 1, row_sum, mask=live)
        tl.debug_barrier()  # all warps' stores come before the atomic that publishes them
        arrivals = workspace.arrivals + sequence * SHAPE.kv_heads + kv_head
        last = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == splits - 1
        if last:
            gl.store(arrivals, 0)
            MANY: gl.constexpr = 2 * F.size_per_thread[0]
            if splits > MANY // 2:
                row_sum, out = merged_splits(acc_ptr, state_ptr, head, splits, MANY, HEADS, SHAPE, SPLITS, F)
            else:
                row_sum, out = merged_splits(
                    acc_ptr, state_ptr, head, splits, MANY // 2, HEADS, SHAPE, SPLITS, F
                )
    if last:
        out = out / gl.expand_dims(row_sum, 1)
        if BITS == 4:
            out = _transformed(out)
        store_heads(out, head, own, sequence, out_stride, SHAPE, HEADS, QUANTIZE, FORM, F)


@gluon.jit
def _load_tile(
    ptrs, row, first, begin, end, WORDS: gl.constexpr, SCALES: gl.constexpr, HEAD_DIM: gl.constexpr,
    KEYS: gl.constexpr, WARPS: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """The words of a warp's KEYS keys or values from cache row `row` on, and of codes their scales; `first`, `begin`,
    `end`: as of `_load`. ptrs: to the head's words and scales. WORDS, SCALES: the functions that give their places, of
    q4_0 scales the second."""
    at, key = WORDS(row, KEYS, HEAD_DIM, WARPS, BITS)
    words = _load(ptrs[0], at, key, first, begin, end, HEAD_DIM // 32 if BITS == 8 else 1)
    scales = words
    if BITS == 8:
        at, key = scale_words(row, KEYS, WARPS)
        scales = _load(ptrs[1], at, key, first, begin, end)
    if BITS == 4:
        at, key = SCALES(row, KEYS, HEAD_DIM, WARPS)
        scales = _load(ptrs[1], at, key, first, begin, end)
    return words, scales


@gluon.jit
def _scores(
    keys, scales, queries, S: gl.constexpr, KEYS: gl.constexpr, BITS: gl.constexpr, MMA: gl.constexpr
):
    """Products of a warp's keys with the queries, [WARPS, KEYS, HEADS]. queries: one operand per part of a
    head's columns; keys, scales: of `_load_tile`.
    """
    WARPS: gl.constexpr = queries[0].shape[0]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    nothing = gl.zeros([WARPS, KEYS, queries[0].shape[2]], gl.float32, MMA)
    s = terms_added(mma_v2(key_operand(keys[0], scales[0], KEYS, WARPS, BITS, A), queries[0], nothing))
    if BITS == 8:
        HEADS: gl.constexpr = s.shape[2]
        s *= of_keys(scale_of(scales[0], 0), KEYS, S, HEADS, WARPS)
        for part in gl.static_range(1, len(keys)):
            k = key_operand(keys[part], scales[0], KEYS, WARPS, BITS, A)
            more = terms_added(mma_v2(k, queries[part], nothing))
            s += more * of_keys(scale_of(scales[0], part), KEYS, S, HEADS, WARPS)
    return s


@gluon.jit
def _headroom(scales, PARTS: gl.constexpr):
    """For each of a thread's q8_0 values, the exponent of a power of two that brings its largest scale to
    2^14 or less; subtracted from the weights' exponents, it keeps weights times scales within fp16's range.
    """
    most = scale_of(scales[0], 0)
    for part in gl.static_range(1, PARTS):
        most = gl.maximum(most, scale_of(scales[0], part))
    exponent = most.to(gl.int32, bitcast=True) >> 23  # of the largest power of two below, plus 127
    return (gl.maximum(exponent, 127 - 24) - (126 + 14)).to(gl.float32)


@gluon.jit(do_not_specialize=["cache_rows", "blocks"])
def _attention_warps_kernel(
    qkv_ptr, rotation, position_ptr, table_ptr, sink_ptr, cache, workspace, outputs,
    eps, scale, cache_rows, blocks, qkv_stride, out_stride,
    SHAPE: gl.constexpr, ROPE: gl.constexpr, WINDOW: gl.constexpr, BITS: gl.constexpr, SPLITS: gl.constexpr,
    SPLIT: gl.constexpr, HEADS: gl.constexpr, QUANTIZE: gl.constexpr, FORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs: (key/value head, KV split, sequence). HEADS: 4 or 8, the padded group size. sink_ptr:
    [heads], or None.
    """
    WARPS: gl.constexpr = SPLIT.warps
    KEYS: gl.constexpr = warp_keys(BITS)
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    GROUP: gl.constexpr = SHAPE.group
    ALL_HEADS: gl.constexpr = SHAPE.kv_heads * GROUP
    GROUPS: gl.constexpr = HEAD_DIM // 32
    PARTS: gl.constexpr = GROUPS if BITS == 8 else 1
    WIDTH: gl.constexpr = HEAD_DIM // PARTS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    S: gl.constexpr = terms_added(gl.zeros([WARPS, KEYS, 2 * HEADS], gl.float32, MMA)).type.layout
    # Where parts are combined, a thread has all parts of an element, and a warp has one head or a part of one.
    ACROSS: gl.constexpr = WARPS // HEADS if WARPS > HEADS else 1
    ALONG: gl.constexpr = HEAD_DIM // (32 * ACROSS)
    F: gl.constexpr = gl.BlockedLayout([WARPS, 1, ALONG], [1, 1, 32], [1, WARPS // ACROSS, ACROSS], [2, 1, 0])
    STEP: gl.constexpr = WARPS * KEYS
    kv_head = gl.program_id(0)
    part = gl.program_id(1)
    sequence = gl.program_id(2).to(gl.int64)
    if PDL and SPLIT.early:
        tl.extra.cuda.gdc_launch_dependents()
    position = gl.load(position_ptr + sequence)
    # The keys before the new one, cut into `splits` splits of `per_split`. A warp's keys lie in one block of the
    # cache; the first one's block is that of the oldest visible key.
    oldest = 0
    if WINDOW > 0:
        oldest = gl.maximum(position - (WINDOW - 1), 0)
    first = oldest // KEYS * KEYS
    per_split = gl.maximum(gl.cdiv(gl.cdiv(position - first, SPLITS), STEP) * STEP, SPLIT.least)
    splits = gl.minimum(gl.maximum(gl.cdiv(position - first, per_split), 1), gl.num_programs(1))
    if part < splits:
        head_rows = kv_head.to(gl.int64) * cache_rows
        table_ptr += sequence * blocks
        k_ptr = cache.k + head_rows * row_width(HEAD_DIM, BITS)
        v_ptr = cache.v + head_rows * row_width(HEAD_DIM, BITS)
        k_scale_ptr = cache.k_scale + head_rows * GROUPS
        v_scale_ptr = cache.v_scale + head_rows * GROUPS
        WORD: gl.constexpr = gl.pointer_type(gl.int32)
        WIDE: gl.constexpr = gl.int64 if GROUPS == 4 else gl.int32
        SCALES: gl.constexpr = gl.pointer_type(gl.int16 if BITS == 4 else WIDE)
        k_ptrs = (k_ptr.to(WORD), k_scale_ptr.to(SCALES))
        v_ptrs = (v_ptr.to(WORD), v_scale_ptr.to(SCALES))
        begin = first + part * per_split
        end = gl.minimum(begin + per_split, position)
        # The first keys and values are fetched before the PDL producer has delivered the queries.
        own = begin + KEYS * threads(1, WARPS)[0]
        row = _cache_row(table_ptr, blocks, own)
        keys, k_scales = _load_tile(
            k_ptrs, row, own, oldest, end, key_words, key_scales, HEAD_DIM, KEYS, WARPS, BITS
        )  # fmt: skip
        values, v_scales = _load_tile(
            v_ptrs, row, own, oldest, end, value_words, value_scales, HEAD_DIM, KEYS, WARPS, BITS
        )  # fmt: skip
        row = _cache_row(table_ptr, blocks, own + STEP)
        new_row = _cache_row(table_ptr, blocks, position)
        member = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(0, F)))
        sink = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, gl.SliceLayout(0, F)))
        if sink_ptr is not None:
            sink = gl.load(sink_ptr + kv_head * GROUP + member, mask=member < GROUP, other=0.0) * _LOG2_E
        # Queries and the new key are rotated once, by all threads, and reach all warps through shared memory.
        R: gl.constexpr = gl.BlockedLayout([1, 4], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
        angles = position.to(gl.int64)
        if ROPE.rows:
            angles = gl.load(rotation.rows + sequence).to(gl.int64)
        turn = _turn_at(angles, rotation, rotation.q_norm, HEADS, HEAD_DIM, ROPE, R)
        turn_new = _turn_at(angles, rotation, rotation.k_norm, 1, HEAD_DIM, ROPE, R)
        if PDL:
            tl.extra.cuda.gdc_wait()

        qkv_ptr += sequence * qkv_stride
        h = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, R)), 1)
        q = _rotated(
            qkv_ptr + (kv_head * GROUP + h) * HEAD_DIM, h < GROUP, turn, eps, HEAD_DIM, ROPE, R
        )  # fmt: skip
        # Split 0 stores the new key and value, and attends to them at its end; they are not read back here.
        one = gl.expand_dims(gl.arange(0, 1, layout=gl.SliceLayout(1, R)), 1)
        owner = one + part == 0
        k_new = _rotated(
            qkv_ptr + (ALL_HEADS + kv_head + one) * HEAD_DIM, owner, turn_new, eps, HEAD_DIM, ROPE, R
        )  # fmt: skip
        d = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, R)), 0)
        v_new_ptr = qkv_ptr + (ALL_HEADS + SHAPE.kv_heads + kv_head + one) * HEAD_DIM
        v_new = gl.load(v_new_ptr + d, mask=owner, other=0.0)
        if ROPE.v_norm:
            v_new *= gl.expand_dims(gl.rsqrt(gl.sum(v_new * v_new, 1) / HEAD_DIM + eps), 1)
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        TRANSFORMED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        terms = gl.allocate_shared_memory(gl.float16, [2 * HEADS, HEAD_DIM], PLAIN)
        rotated = gl.allocate_shared_memory(gl.float32, [2 * HEADS, HEAD_DIM], PLAIN)  # queries, key, value
        queries = rotated.slice(0, HEADS)
        new_rows = rotated.slice(HEADS, 2)
        if BITS == 4:
            every = gl.allocate_shared_memory(gl.float16, [4 * HEADS, HEAD_DIM], TRANSFORMED)
            new = gl.reshape(gl.permute(gl.join(k_new, v_new), [0, 2, 1]), [2, HEAD_DIM])
            for _ in gl.static_range(HEADS // 4):  # repeated, to as many as the queries
                new = gl.reshape(gl.permute(gl.join(new, new), [2, 0, 1]), [2 * new.shape[0], HEAD_DIM])
            every.slice(0, 2 * HEADS).store(two_terms(q, REMAINDERS))
            every.slice(2 * HEADS, 2 * HEADS).store(two_terms(new, REMAINDERS))
            rotated.store(hadamard_terms(every, WARPS))
            q = queries.load(R)
        else:
            queries.store(q)
            rotated.slice(HEADS, 1).store(k_new)
            rotated.slice(HEADS + 1, 1).store(v_new)
        terms.store(two_terms(q))
        if ROPE.query_scale:
            scale *= gl.load(rotation.query_scale + position)
        if part == 0:
            inside = position < blocks * BLOCK
            scale_ptrs = (k_scale_ptr, v_scale_ptr)
            _store_new_rows(new_rows, (k_ptr, v_ptr), scale_ptrs, new_row, inside, WARPS, BITS)
        operands = ()
        for n in gl.static_range(PARTS):
            operands = operands + (query_operand(terms.slice(WIDTH * n, WIDTH, dim=1), WARPS, BITS, B),)

        row_max = gl.full([WARPS, HEADS], LOWEST, gl.float32, gl.SliceLayout(1, S))
        row_sum = gl.zeros([WARPS, HEADS], gl.float32, gl.SliceLayout(1, S))
        acc = ()
        for n in gl.static_range(PARTS):
            acc = acc + (gl.zeros([WARPS, WIDTH, 2 * HEADS], gl.float32, MMA),)
        s_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, S)))
        s_key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, S)))
        s_key = KEYS * gl.expand_dims(s_warp, 1) + gl.expand_dims(s_key, 0)
        s_key = gl.expand_dims(s_key, 2)
        for start in range(begin, end, STEP):
            key = start + s_key
            s = _scores(keys, k_scales, operands, S, KEYS, BITS, MMA) * scale
            # The next keys and values are fetched as soon as the registers of these are free.
            own += STEP
            keys, k_scales = _load_tile(
                k_ptrs, row, own, oldest, end, key_words, key_scales, HEAD_DIM, KEYS, WARPS, BITS
            )  # fmt: skip
            s = gl.where((key >= oldest) & (key < end), s, LOWEST)
            height = s
            if BITS == 8:
                height += of_keys(_headroom(v_scales, PARTS), KEYS, S, HEADS, WARPS)
            new_max = gl.maximum(row_max, gl.max(height, 1))
            rescale = gl.exp2(row_max - new_max)
            row_max = new_max
            p = gl.exp2(s - gl.expand_dims(row_max, 1))
            row_sum = row_sum * rescale + gl.sum(p, 1)
            sums = ()
            for n in gl.static_range(PARTS):
                weights = p
                if BITS == 8:
                    weights = p * of_keys(scale_of(v_scales[0], n), KEYS, S, HEADS, WARPS)
                v = value_operand(values[n], v_scales[0], KEYS, WARPS, BITS, A)
                sums = sums + (mma_v2(v, weight_operand(weights, B), acc[n] * of_both_terms(rescale, MMA)),)
            acc = sums
            values, v_scales = _load_tile(
                v_ptrs, row, own, oldest, end, value_words, value_scales, HEAD_DIM, KEYS, WARPS, BITS
            )  # fmt: skip
            row = _cache_row(table_ptr, blocks, own + STEP)
        if PDL and not SPLIT.early:
            # Not earlier: early consumer blocks would fill the multiprocessors unevenly.
            tl.extra.cuda.gdc_launch_dependents()

        row_max, row_sum, out = _combine_warps(acc, row_max, row_sum, SHAPE, BITS, F)
        if part == 0:
            row_max, row_sum, out = _with_new_key(
                row_max, row_sum, out, queries, new_rows, scale, sink, sink_ptr is not None, F
            )
        _finish(
            row_max, row_sum, out, workspace, outputs, kv_head, part, splits, sequence, out_stride,
            SHAPE, BITS, SPLITS, HEADS, QUANTIZE, FORM, F,
        )  # fmt: skip


def launch_warps(given: DecodeArguments) -> None:
    """Launches this kernel, with its own KV split sizes.

    Numerics: keys and values as stored; queries and softmax weights in two fp16 terms (22 bits); fp32 sums, in an
    order that follows from the position alone. Source: Dao et al. 2023 (Flash-Decoding).
    """
    held = given.layer.format
    split = split_shape(held.bits, given.coarse)
    _attention_warps_kernel[given.grid(split.least, more=1)](
        *given.inputs(), cache_pointers(given.layer), *given.results(), **given.constants(),
        BITS=held.bits, HEADS=4 if given.shape.group <= 4 else 8, SPLIT=split,
        num_warps=split.warps, maxnreg=_registers(given), launch_pdl=given.pdl,
    )  # fmt: skip


def _registers(given: DecodeArguments) -> int:
    """The most registers per thread; ptxas alone may choose fewer than needed, and spill.

    The allocation does not affect the sums: a row has the same bits either way. 128 registers are enough for a batch on
    Hopper (which has PDL), and a few too few on earlier GPUs. A single sequence's program with 168 leaves room for a
    projection's program (8 warps of 80 registers), so that the end of the previous launch and the early start of the
    next one overlap it.
    """
    programs = given.qkv.shape[0] * given.shape.kv_heads
    shares = programs > FEW_PROGRAMS if given.coarse else not given.layer.format.coded
    if not (shares and given.pdl and given.shape.group <= 4) or given.shape.head_dim > 128:
        return 255
    return 128 if given.coarse else 168
