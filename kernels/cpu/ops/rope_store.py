"""Between the QKV matmul and attention, in compiled code: the twin of kernels/rope_store.py.

Positions, and the rows of the cache where they lie, are read from memory, so that a list of kernels made once serves
every token.

Does not know: the attention that follows.
"""

from __future__ import annotations

from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cpu.attention.attention import check_types, scale_strides, strides
from quengine.kernels.cpu.ops.rms_norm import rms_norm_launch
from quengine.kernels.cpu.runtime.kernel_table import rope_store_kernel
from quengine.kernels.cpu.runtime.threads import Launch, fp32_bits, run
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.kv.kv_rows import slot_mapping
from quengine.kernels.rope_store import row_tables


def rope_store_launches(
    qkv: Tensor, spec: AttentionSpec, layer: KVLayer, positions: Tensor, slots: Tensor
) -> list[Launch]:
    """Norms, rotation and query scale in place in qkv; keys and values go to the cache.

    qkv: fp32 [T, (heads + 2 * kv_heads) * head_dim], contiguous; the first heads * head_dim elements of a row are its
    queries afterwards. layer: fp16 or q8_0. positions, slots: int64 [T], where each token is in its sequence and
    which row of the cache it has, read when the kernel runs.
    """
    assert spec.cos.is_contiguous() and spec.sin.is_contiguous()
    norms, launches, column = [0, 0], [], 0
    for i, (norm, heads) in enumerate(((spec.q_norm, spec.heads), (spec.k_norm, spec.kv_heads))):
        width = heads * spec.head_dim
        if norm is not None and norm.numel() == spec.head_dim:
            norms[i] = norm.data_ptr()
        elif norm is not None:
            row = qkv[:, column : column + width]
            launches.append(rms_norm_launch(row, norm, spec.eps, row))
        column += width
    parameters = (
        *(qkv.data_ptr(), spec.heads, spec.kv_heads, spec.head_dim, positions.data_ptr()),
        *(spec.cos.data_ptr(), spec.sin.data_ptr(), spec.cos.shape[1]),
        *strides(layer.k),
        *strides(layer.v),
        *(*norms, fp32_bits(spec.eps), 0 if spec.query_scale is None else spec.query_scale.data_ptr()),
        *scale_strides(layer.k_scale),
        *scale_strides(layer.v_scale),
        slots.data_ptr(),
    )
    kernel = rope_store_kernel(spec.rope_layout, layer.k_scale is not None)
    tasks = qkv.shape[0] * (spec.heads + 2 * spec.kv_heads)
    launches.append(Launch(kernel, parameters, tasks, keep=(qkv, spec, layer, positions, slots)))
    return launches


def rope_store(qkv: Tensor, spec: AttentionSpec, layer: KVLayer, batch: ForwardBatch) -> Tensor:
    """The rotated queries [T, heads, head_dim] of qkv fp32 [T, ...], which they overwrite; see `rope_store_launches`.

    Raises ValueError when a position is not in the cache, or the cache is neither fp16 nor q8_0.
    """
    rows, ctx, table = qkv.shape[0], layer.k.shape[0], row_tables(batch, spec.cache_group)
    check_types(layer)
    positions = batch.positions.long()
    first, last = int(positions.min()), int(positions.max())
    held = min(spec.cos.shape[0], table.shape[-1] * BLOCK_SIZE)
    if not 0 <= first <= last < held:
        raise ValueError(f"positions {first} to {last} are not in a cache of {held}")
    slots = slot_mapping(positions, table)
    if not 0 <= int(slots.min()) <= int(slots.max()) < ctx:
        raise ValueError(f"rows {int(slots.min())} to {int(slots.max())} are not in a cache of {ctx}")
    qkv = qkv.contiguous()
    run(rope_store_launches(qkv, spec, layer, positions.contiguous(), slots.contiguous()))
    return qkv[:, : spec.heads * spec.head_dim].view(rows, spec.heads, spec.head_dim)
