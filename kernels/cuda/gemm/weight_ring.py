"""A ring buffer in shared memory for packed weights on their way to the matrix instructions.

A slot holds one chunk of a tile for each warp. cp.async copies its words a few iterations before they are used, so
that loads in flight take no registers; a thread reads only what it copied itself.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quengine.kernels.cuda.gemm.fragments import chunk_words, stored_planes, stored_words, with_book
from quengine.kernels.cuda.gemm.wgmma_store import tile_of

_ROWS = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.jit
def allocate_ring(planes, SLOTS: gl.constexpr, P: gl.constexpr):
    """Shared memory for SLOTS chunks: for each stored plane, int64 or int32 [slots, words of a chunk,
    threads]. The planes are allocated separately, as the compiler puts a barrier between two copies to the
    same memory.
    """
    WARPS: gl.constexpr = P.warps
    THREADS: gl.constexpr = 32 * WARPS
    FMT: gl.constexpr = P.layout
    WORDS: gl.constexpr = stored_words(FMT)
    firsts = stored_planes(planes, 0, 0, 0, FMT)  # for their types only
    ring = ()
    for plane in gl.static_range(len(WORDS)):
        if firsts[plane].dtype.element_ty.primitive_bitwidth == 64:
            ring = ring + (gl.allocate_shared_memory(gl.int64, [SLOTS, WORDS[plane], THREADS], _ROWS),)
        else:
            ring = ring + (gl.allocate_shared_memory(gl.int32, [SLOTS, WORDS[plane], THREADS], _ROWS),)
    return ring


@triton.constexpr_function
def _together(count: int, bits: int) -> int:
    """Adjacent words per copy of a thread: 16 bytes, which bypass the L1 cache, if there are enough words."""
    return 128 // bits if count >= 128 // bits else 1


@gluon.jit
def _copy_plane(memory, planes, tiles, block, c, plane: gl.constexpr, BITS: gl.constexpr, P: gl.constexpr):
    """Starts copying chunk c of a block of tiles, of one stored plane, to memory [words of a chunk, threads]."""
    FMT: gl.constexpr = P.layout
    WORDS: gl.constexpr = stored_words(FMT)
    COUNT: gl.constexpr = WORDS[plane]
    WARPS: gl.constexpr = P.warps
    V: gl.constexpr = _together(COUNT, BITS)
    L: gl.constexpr = gl.BlockedLayout([1, V], [V, 32 // V], [1, WARPS], [1, 0])
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(0, L))
    tile = gl.minimum(tile_of(block, thread // 32, P), tiles - 1)  # tiles past the end are not stored
    lane = thread % 32
    first = stored_planes(planes, tile * P.chunks + c, 0, lane, FMT)[plane]
    step = 32
    if BITS < 32:  # copies are at least 4 bytes: the words of two or four lanes
        first = (first - (lane & (32 // BITS - 1))).to(gl.pointer_type(gl.int32), bitcast=True)
        step = BITS
    number = gl.expand_dims(gl.arange(0, COUNT, layout=gl.SliceLayout(1, L)), 1)
    pointers = gl.expand_dims(first, 0) + number * step
    if V > 1:
        pointers = gl.multiple_of(gl.max_contiguous(pointers, [1, V]), [1, 16])
    async_copy.async_copy_global_to_shared(memory, pointers)


@gluon.jit
def copy_chunk(ring, slot, planes, tiles, block, c, P: gl.constexpr):
    """Starts copying chunk c of a block of tiles to a slot."""
    FMT: gl.constexpr = P.layout
    WORDS: gl.constexpr = stored_words(FMT)
    firsts = stored_planes(planes, 0, 0, 0, FMT)  # for their types only
    for plane in gl.static_range(len(WORDS)):
        _copy_plane(
            ring[plane].index(slot), planes, tiles, block, c, plane,
            firsts[plane].dtype.element_ty.primitive_bitwidth, P,
        )  # fmt: skip


@gluon.jit
def _read_words(slot, lane, COUNT: gl.constexpr, BITS: gl.constexpr, WARPS: gl.constexpr):
    """A lane's words in a slot [COUNT, threads]; BITS: their size in global memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    words = ()
    for i in gl.static_range(COUNT):
        word = gl.reshape(slot.slice(i, 1, 0).load(L), [32 * WARPS])
        word = gl.convert_layout(word, lane.type.layout, assert_trivial=True)
        if BITS == 16:
            word = (word >> ((lane & 1) * 16)).to(gl.int16)
        elif BITS == 8:
            word = (word >> ((lane & 3) * 8)).to(gl.int8)
        words = words + (word,)
    return words


@gluon.jit
def read_chunk(ring, slot, planes, lane, P: gl.constexpr):
    """The words of the chunk in a slot, in the form of `load_chunk`."""
    WARPS: gl.constexpr = P.warps
    FMT: gl.constexpr = P.layout
    WORDS: gl.constexpr = stored_words(FMT)
    firsts = stored_planes(planes, 0, 0, 0, FMT)  # for their types only
    stored = ()
    for plane in gl.static_range(len(WORDS)):
        stored = stored + _read_words(
            ring[plane].index(slot), lane, WORDS[plane], firsts[plane].dtype.element_ty.primitive_bitwidth, WARPS
        )  # fmt: skip
    return with_book(chunk_words(stored, FMT), planes[1], FMT)
