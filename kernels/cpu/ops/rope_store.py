"""Q/K norms, rotary embedding and the KV store on the CPU, compiled; defined in kernels/rope_store.py.

Positions and cache rows are read from memory when the kernels run, so that a compiled list of kernels serves every
token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cpu.attention.attention import CacheArguments, check_types, hadamard_log
from quengine.kernels.cpu.ops.rms_norm import rms_norm_launch
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp32
from quengine.kernels.cpu.runtime.kernel_table import rope_store_kernel
from quengine.kernels.cpu.runtime.threads import Launch, get_threads, run
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.kv.kv_rows import slot_mapping
from quengine.kernels.rope_store import row_tables

_TASKS = 4  # rows per thread from which on a task is a whole row


@dataclass
class RopeStoreArguments(Arguments):
    """qkv: fp32 rows of heads. positions, slots, angle_rows: int64, one per row.

    cos, sin: fp32 tables, `pairs` per row. queries: fp32 [rows, heads, width], where the queries that lie between gates
    in qkv are moved; 0: there are no gates.
    q_norm, k_norm, v_norm: fp32 [width], or 0. norms_rotated: 1 where q_norm and k_norm apply to rotated heads.
    query_scale: fp32 by position, or 0. hadamard: `hadamard_log` of queries, keys and values. all_heads: heads of all
    rows; task_heads: how many of them a task takes.
    """

    qkv: int
    queries: int
    heads: int
    kv_heads: int
    width: int
    positions: int
    slots: int
    angle_rows: int
    cos: int
    sin: int
    pairs: int
    q_norm: int
    k_norm: int
    v_norm: int
    norms_rotated: int
    eps: Fp32
    query_scale: int
    hadamard: int
    all_heads: int
    task_heads: int
    k: CacheArguments
    v: CacheArguments


def rope_store_launches(
    qkv: Tensor,
    spec: AttentionSpec,
    layer: KVLayer,
    positions: Tensor,
    slots: Tensor,
    queries: Tensor | None = None,
    angle_rows: Tensor | None = None,
) -> list[Launch]:
    """Norms, rotates and scales queries and keys in place in qkv, and stores keys and values to the cache.

    qkv: fp32 [T, (heads + 2 * kv_heads) * head_dim], for a shared attention heads * head_dim, contiguous. Afterwards
    the first heads * head_dim elements of a row are its queries, but the queries of a gated attention go to `queries`,
    fp32 [T, heads * head_dim], contiguous. layer: of any type. positions, slots: int64 [T], each token's position in
    its sequence and its row of the cache, read when the kernel runs. angle_rows: int64 [T], each token's row of the
    rotary tables; None: its position.
    """
    angle_rows = positions if angle_rows is None else angle_rows
    kv_heads = 0 if spec.shared else spec.kv_heads
    assert spec.cos.is_contiguous() and spec.sin.is_contiguous() and (queries is not None) == spec.gated
    norms, launches, column = [0, 0], [], 0
    ones = torch.ones(spec.head_dim) if spec.v_norm else None
    for i, (norm, heads) in enumerate(((spec.q_norm, spec.heads), (spec.k_norm, kv_heads))):
        width = heads * spec.head_dim
        if norm is not None and norm.numel() == spec.head_dim:
            norms[i] = norm.data_ptr()
        elif norm is not None and spec.gated:
            raise NotImplementedError("a norm of all query heads together, of an attention with output gates")
        elif norm is not None:
            row = qkv[:, column : column + width]
            launches.append(rms_norm_launch(row, norm, spec.eps, row))
        column += width
    # To compute a head takes less time than to take a task: with many rows, a task is a whole row.
    row_heads = spec.heads + 2 * kv_heads
    task_heads = row_heads if qkv.shape[0] >= _TASKS * get_threads() else 1
    arguments = RopeStoreArguments(
        qkv=qkv.data_ptr(),
        queries=0 if queries is None else queries.data_ptr(),
        heads=spec.heads,
        kv_heads=kv_heads,
        width=spec.head_dim,
        positions=positions.data_ptr(),
        slots=slots.data_ptr(),
        angle_rows=angle_rows.data_ptr(),
        cos=spec.cos.data_ptr(),
        sin=spec.sin.data_ptr(),
        pairs=spec.cos.shape[1],
        q_norm=norms[0],
        k_norm=norms[1],
        v_norm=0 if ones is None else ones.data_ptr(),
        norms_rotated=int(spec.norms_rotated),
        eps=spec.eps,
        query_scale=0 if spec.query_scale is None else spec.query_scale.data_ptr(),
        hadamard=hadamard_log(layer),
        all_heads=qkv.shape[0] * row_heads,
        task_heads=task_heads,
        k=CacheArguments.of(layer.k, layer.k_scale),
        v=CacheArguments.of(layer.v, layer.v_scale),
    )
    kernel = rope_store_kernel(spec.rope_layout, layer.cache_type)
    tasks = -(-arguments.all_heads // task_heads)
    launches.append(
        Launch(kernel, arguments, tasks, keep=(qkv, spec, layer, positions, slots, queries, ones, angle_rows))
    )
    return launches


def rope_store(qkv: Tensor, spec: AttentionSpec, layer: KVLayer, batch: ForwardBatch) -> Tensor:
    """The rotated queries [T, heads, head_dim] of qkv fp32 [T, ...], which is overwritten; see `rope_store_launches`.

    Raises ValueError for a position or row outside the cache, or a cache of another type.
    """
    positions, slots = checked_slots(batch, spec.cache_group, spec.cos.shape[0], layer)
    rows, qkv = qkv.shape[0], qkv.contiguous()
    width = spec.heads * spec.head_dim
    queries = torch.empty(rows, width) if spec.gated else None
    run(rope_store_launches(qkv, spec, layer, positions, slots, queries, checked_angles(batch, spec)))
    return (qkv[:, :width] if queries is None else queries).view(rows, spec.heads, spec.head_dim)


def checked_angles(batch: ForwardBatch, spec: AttentionSpec) -> Tensor | None:
    """The rows of the rotary tables of a step's tokens, int64 [T], or None. Raises ValueError for one outside them."""
    if batch.angle_rows is None:
        return None
    rows, held = batch.angle_rows.long().contiguous(), len(spec.cos)
    if not 0 <= int(rows.min()) <= int(rows.max()) < held:
        raise ValueError(f"rows {int(rows.min())} to {int(rows.max())} are not in rotary tables of {held}")
    return rows


def checked_slots(batch: ForwardBatch, group: int, context: int, layer: KVLayer) -> tuple[Tensor, Tensor]:
    """The positions of a step's tokens, and the cache rows of a layer of cache group `group`: int64 [T] both.

    Raises ValueError for a position outside the cache or tables of `context` positions, a row outside the cache, or a
    cache of another type.
    """
    rows, table = layer.k.shape[0], row_tables(batch, group)
    check_types(layer)
    positions = batch.positions.long().contiguous()
    first, last = int(positions.min()), int(positions.max())
    held = min(context, table.shape[-1] * BLOCK_SIZE)
    if not 0 <= first <= last < held:
        raise ValueError(f"positions {first} to {last} are not in a cache of {held}")
    slots = slot_mapping(positions, table).contiguous()
    if not 0 <= int(slots.min()) <= int(slots.max()) < rows:
        raise ValueError(f"rows {int(slots.min())} to {int(slots.max())} are not in a cache of {rows}")
    return positions, slots
