"""The kernel of latent_store.py."""

from __future__ import annotations

from quengine.kernels.cpu.ir.cache_ir import store_codes
from quengine.kernels.cpu.ir.row_ir import float_at, int64_at, scale_row
from quengine.kernels.cpu.ops.latent_store import LatentStoreArguments
from quengine.kernels.cpu.ops.rms_norm_kernels import norm_row
from quengine.kernels.cpu.ops.rope_store_kernels import rotate, store_halves
from quengine.kernels.cpu.runtime.compiled import compile_kernel
from quengine.kernels.kv.cache_types import CACHE_FORMATS, CacheType
from quengine.kernels.rope import RopeLayout


def latent_store_kernel(layout: RopeLayout, cache_type: CacheType) -> bytes:
    """Task t * (heads + 1) + h: query head h of row t; task t * (heads + 1) + heads: the latent of row t."""

    is_coded = CACHE_FORMATS[cache_type].coded

    def latent_store_part(args: LatentStoreArguments, task: int) -> None:
        heads, rank, plain, rotated = args.heads, args.rank, args.plain, 2 * args.pairs
        token, h = task // (heads + 1), task % (heads + 1)
        position = int64_at(args.positions, token)
        angles = position * 4 * args.pairs
        cos, sin = args.cos + angles, args.sin + angles
        if h < heads:
            head = args.q + token * args.q_stride + h * 4 * (plain + rotated)
            if args.query_scale:
                scale_row(head, float_at(args.query_scale, position), plain + rotated, head)
            rotate(layout, head + 4 * plain, args.pairs, cos, sin)
            out = args.queries + (token * heads + h) * 4 * (rank + rotated)
            scale_row(head + 4 * plain, 1.0, rotated, out + 4 * rank)
            return
        latent, slot = args.latent + token * args.latent_stride, int64_at(args.slots, token)
        norm_row(latent, args.norm, rank, args.eps, latent)
        rotate(layout, latent + 4 * rank, args.pairs, cos, sin)
        row = args.rows.rows + slot * args.rows.row_stride
        if is_coded:
            store_codes(
                cache_type, latent, rank + rotated, row, args.rows.scales + slot * args.rows.scale_row_stride
            )
        else:
            store_halves(latent, rank + rotated, row)

    return compile_kernel(latent_store_part, LatentStoreArguments)
