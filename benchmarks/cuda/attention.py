"""Decode and prefill attention at Mistral-7B's shapes: 32 query heads over 8 of 128, against bytes and SDPA.

    python -m benchmarks.cuda.attention [decode|prefill|batch|rooms|deep] [--json FILE] [--sweep] [--cache TYPE ...]
        [--depth N ...]

`rooms` are batches of short sequences with block tables of longer contexts. `deep` is decode of one sequence in a long
context with the large heads of other models. Times are per launch inside a CUDA graph of up to 16 layers, each with its
own cache.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

import quengine.kernels.cuda.attention.attention_arguments as arguments
import quengine.kernels.cuda.attention.attention_prefill as prefill
import quengine.kernels.cuda.attention.attention_tiles as tiles
from benchmarks.cuda.cuda_timing import COPY_BYTES_PER_SECOND, launch_time
from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cuda.attention.attention_decode import attention_decode
from quengine.kernels.cuda.attention.output_gate import qkv_width
from quengine.kernels.cuda.attention.rope_store import rope_store
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_FORMATS, CACHE_TYPES, CacheType, row_bytes
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.kernels.rope import RopeSpec, rope_table

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS = 16
DEEP = {
    "qwen3.6-27b": (24, 4, 256, True),
    "qwen3.6-35b-a3b": (16, 2, 256, True),
    "gemma-4-26b-a4b": (16, 2, 512, False),
    "gemma-4-31b": (32, 4, 512, False),
}
"""Query heads, key-value heads, head size and whether heads are gated, of layers that see all of a long context."""
DEPTHS = (2048, 16384, 65536)
CONTEXT = DEPTHS[-1] + 64
CHUNK = 2048
BATCHES = ((8, 192), (32, 192), (64, 130), (64, 192), (128, 192), (8, 2048), (32, 2048), (64, 1024))
ROOMS = (256, 1536, 4096, 32768)
"""Positions that block tables have room for."""
SWEPT_CODES = ((128, 8, 2), (64, 8, 2), (64, 4, 2), (32, 4, 2), (32, 4, 3))
DEVICE = torch.device("cuda")


def mistral_spec() -> AttentionSpec:
    cos, sin = rope_table(RopeSpec(dim=HEAD_DIM, base=1e6), CONTEXT, DEVICE)
    return AttentionSpec(
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        window=None,
        rope_layout="pairs",
        cos=cos,
        sin=sin,
        mask_band=causal_mask_band(CHUNK, CONTEXT, None, DEVICE),
    )


def decode_floor(depth: int, cache_type: CacheType, spec: AttentionSpec | None = None) -> float:
    heads, size = (spec.kv_heads, spec.head_dim) if spec else (KV_HEADS, HEAD_DIM)
    per_key = 2 * heads * row_bytes(cache_type, size)
    return depth * per_key / COPY_BYTES_PER_SECOND * 1e6


def ones_layer(rows: int, cache_type: CacheType, spec: AttentionSpec | None = None) -> KVLayer:
    """A layer's cache of so many rows, of any content that is a number."""
    shape = (spec.kv_heads, spec.head_dim) if spec else (KV_HEADS, HEAD_DIM)
    layer = allocate_layer(rows, *shape, DEVICE, cache_type)
    for tensor in layer.tensors:
        tensor.fill_(1)
    return layer


def time_decode(
    spec: AttentionSpec,
    depth: int,
    batch: int,
    cache_type: CacheType,
    single: bool,
    pdl: bool = True,
    context: int = 0,
) -> float:
    """Microseconds of one launch over blocks in no order, each layer with a cache of its own: quantized activations in
    fine KV splits (`single`), or an fp16 operand in coarse ones. context: positions that the block tables have entries
    for, if they are more than the sequences take."""
    blocks = depth // BLOCK_SIZE + 1
    count = min(LAYERS, max(2, (8 << 30) // (batch * blocks * BLOCK_SIZE * 4096)))
    layers = [ones_layer(batch * blocks * BLOCK_SIZE, cache_type) for _ in range(count)]
    tables = torch.randperm(batch * blocks, device=DEVICE).to(torch.int32).view(batch, blocks)
    tables = torch.nn.functional.pad(tables, (0, max(0, context // BLOCK_SIZE - blocks)))
    qkv = torch.randn(batch, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=DEVICE)
    positions = torch.full((batch,), depth, dtype=torch.int32, device=DEVICE)
    workspace = arguments.DecodeWorkspace.allocate(batch, HEADS, KV_HEADS, HEAD_DIM, DEVICE)
    rounded = QuantizedActivations.empty(batch, HEADS * HEAD_DIM, DEVICE)
    half = Fp16Operand.empty(batch, HEADS * HEAD_DIM, DEVICE, OperandLayout.WGMMA)
    half.row_scale.fill_(1)

    def launch(layer: KVLayer) -> None:
        if single:
            attention_decode(qkv, spec, layer, positions, tables, workspace, rounded, False, pdl)
        else:
            attention_decode(qkv, spec, layer, positions, tables, workspace, half, True, pdl)

    return launch_time([lambda layer=layer: launch(layer) for layer in layers])


def decode_table(
    spec: AttentionSpec, pdl: bool, types: Sequence[CacheType], depths: Sequence[int]
) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for cache_type, depth in itertools.product(types, depths):
        us, floor = time_decode(spec, depth, 1, cache_type, True, pdl), decode_floor(depth, cache_type)
        results.append({"cache_type": cache_type, "depth": depth, "pdl": pdl, "us": us, "floor": floor})
        print(f"decode {cache_type} pdl={pdl} depth={depth}: {us:.2f} us, floor {floor:.2f}", flush=True)
    return results


def batch_table(spec: AttentionSpec, types: Sequence[CacheType]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for cache_type, (batch, depth) in itertools.product(types, BATCHES):
        us, floor = (
            time_decode(spec, depth, batch, cache_type, False),
            batch * decode_floor(depth, cache_type),
        )
        row: dict[str, object] = {
            "cache_type": cache_type, "batch": batch, "depth": depth, "us": us, "floor": floor
        }  # fmt: skip
        print(f"batch {batch} {cache_type} depth={depth}: {us:.2f} us, floor {floor:.2f}", flush=True)
        results.append(row)
    return results


def room_table(spec: AttentionSpec, types: Sequence[CacheType]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for cache_type, batch in itertools.product(types, (64, 128, 256, 512)):
        us = {room: time_decode(spec, 192, batch, cache_type, False, context=room) for room in ROOMS}
        floor = batch * decode_floor(192, cache_type)
        times = ", ".join(f"{room} {us[room]:.1f}" for room in ROOMS)
        print(f"rooms {cache_type}, {batch} sequences of 192: {times} us, floor {floor:.1f}", flush=True)
        results.append({"cache_type": cache_type, "batch": batch, "us": us, "floor": floor})
    return results


def batch_sweep(spec: AttentionSpec, cache_type: CacheType) -> list[dict[str, object]]:
    """Least keys a KV split, tile, warps and stages at four batches."""
    results: list[dict[str, object]] = []
    coarse, launch = tiles.COARSE, tiles.tile_shape
    swept = (
        ((64, 8, 3), (64, 4, 3), (64, 4, 2), (32, 4, 3), (128, 8, 2)) if cache_type == "f16" else SWEPT_CODES
    )
    for least, tile in itertools.product((160, 288, 416, 544), swept):
        tiles.COARSE = least
        tiles.tile_shape = lambda *_, tile=tile: tiles.TileShape(*tile)  # type: ignore[assignment]
        cases = ((8, 256), (32, 256), (64, 256), (8, 2048), (32, 2048))
        us = [time_decode(spec, depth, batch, cache_type, False) for batch, depth in cases]
        results.append({"cache_type": cache_type, "least": least, "tile": tile, "us": us})
        print(f"sweep {cache_type} least {least} tile {tile}:", *(f"{t:.1f}" for t in us), flush=True)
    tiles.COARSE, tiles.tile_shape = coarse, launch
    return results


def decode_sweep(spec: AttentionSpec, cache_type: CacheType) -> list[dict[str, float]]:
    """KV splits, tile, warps and stages at three depths."""
    results = []
    count, launch = arguments.split_count, tiles.tile_shape
    for splits, keys, warps, stages in itertools.product((16, 32), (32, 64, 128), (4, 8), (2, 3)):
        if keys * stages > 256:
            continue
        arguments.split_count = lambda _, n=splits: n  # type: ignore[assignment]
        shape = tiles.TileShape(keys, warps, stages)
        tiles.tile_shape = lambda *_, shape=shape: shape  # type: ignore[assignment]
        try:
            us = [time_decode(spec, depth, 1, cache_type, True) for depth in (0, 100, 512, 4096, 16384)]
        except Exception as error:  # a shape that does not fit this GPU is a result of the sweep
            print("sweep", splits, keys, warps, stages, "failed:", str(error)[:60], flush=True)
            continue
        results.append({"splits": splits, "keys": keys, "warps": warps, "stages": stages, "us": us})
        print(
            f"sweep {cache_type} splits {splits} keys {keys} warps {warps} stages {stages}:",
            *(f"{t:.2f}" for t in us),
            flush=True,
        )
    arguments.split_count, tiles.tile_shape = count, launch
    return results


def time_prefill(
    spec: AttentionSpec, rows: int, start: int, cache_type: CacheType = "f16"
) -> tuple[float, float]:
    """Microseconds of attention alone and of rotation with the cache write, for one chunk."""
    layer = ones_layer(CONTEXT // BLOCK_SIZE * BLOCK_SIZE, cache_type)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=DEVICE, dtype=torch.float16)
    batch = prefill_batch([[0] * rows], [start], [[list(range(CONTEXT // BLOCK_SIZE))]], DEVICE)
    tiles_, tables = prefill.prefill_tiles(batch), batch.block_tables_of(0)
    out = torch.empty(rows, HEADS * HEAD_DIM, dtype=torch.float16, device=DEVICE)

    def rotate() -> torch.Tensor:
        return rope_store(qkv, spec, layer, batch.positions, tables, tiles_.sequences)

    q = rotate()
    attend = launch_time([lambda: prefill.attention_prefill(q, spec, layer, tables, tiles_, out)] * 4)
    return attend, launch_time([rotate] * 8)


def time_sdpa(rows: int, keys: int) -> float:
    """torch's causal attention on the same shape, only where the chunk is the whole sequence."""
    q = torch.randn(1, HEADS, rows, HEAD_DIM, device=DEVICE, dtype=torch.float16)
    k, v = torch.randn(2, 1, KV_HEADS, keys, HEAD_DIM, device=DEVICE, dtype=torch.float16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return launch_time([lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True)] * 4)


def deep_spec(heads: int, kv_heads: int, head_dim: int, gated: bool) -> AttentionSpec:
    """Heads of which a quarter rotates, in halves."""
    cos, sin = rope_table(RopeSpec(dim=head_dim // 4, base=1e7), DEPTHS[-1] + 64, DEVICE)
    norm = torch.ones(head_dim, device=DEVICE)
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=None,
        rope_layout="halves",
        cos=cos,
        sin=sin,
        mask_band=causal_mask_band(16, DEPTHS[-1] + 64, None, DEVICE),
        q_norm=norm,
        k_norm=norm,
        eps=1e-6,
        gated=gated,
    )


def time_deep(spec: AttentionSpec, depth: int, cache_type: CacheType) -> float:
    """Microseconds of one launch for one sequence, over blocks in no order."""
    blocks = depth // BLOCK_SIZE + 1
    layers = [ones_layer(blocks * BLOCK_SIZE, cache_type, spec) for _ in range(4)]
    tables = torch.randperm(blocks, device=DEVICE).to(torch.int32).view(1, blocks)
    qkv = torch.randn(1, qkv_width(spec), device=DEVICE)
    positions = torch.full((1,), depth, dtype=torch.int32, device=DEVICE)
    workspace = arguments.DecodeWorkspace.allocate(1, spec.heads, spec.kv_heads, spec.head_dim, DEVICE)
    out = QuantizedActivations.empty(1, spec.heads * spec.head_dim, DEVICE)

    def launch(layer: KVLayer) -> None:
        attention_decode(qkv, spec, layer, positions, tables, workspace, out, False, True)

    return launch_time([lambda layer=layer: launch(layer) for layer in layers])


def deep_table(types: Sequence[CacheType]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for (name, shape), cache_type in itertools.product(DEEP.items(), types):
        spec = deep_spec(*shape)
        us = [time_deep(spec, depth, cache_type) for depth in DEPTHS]
        floor = [decode_floor(depth, cache_type, spec) for depth in DEPTHS]
        results.append({"model": name, "cache_type": cache_type, "depths": DEPTHS, "us": us, "floor": floor})
        shares = (f"{t:.1f} us ({100 * least / t:.0f}%)" for t, least in zip(us, floor, strict=True))
        print(f"deep {name} {cache_type}:", *shares, flush=True)
    return results


def deep_sweep(types: Sequence[CacheType]) -> list[dict[str, object]]:
    """Programs a sequence, tile, warps and stages at three depths."""
    results: list[dict[str, object]] = []
    target, launch = arguments._TARGET_PROGRAMS, tiles.tile_shape
    shapes = ((16, 4, 3), (16, 8, 2), (32, 4, 2), (32, 4, 3), (32, 8, 2), (32, 8, 3), (64, 4, 2), (64, 8, 2))
    for (name, heads), cache_type in itertools.product(DEEP.items(), types):
        spec = deep_spec(*heads)
        for programs, shape in itertools.product((128, 256), shapes):
            if shape[0] * spec.head_dim * CACHE_FORMATS[cache_type].bits // 4 * shape[2] > 200 << 10:
                continue
            arguments._TARGET_PROGRAMS = programs
            tiles.tile_shape = lambda *_, shape=shape: tiles.TileShape(*shape)  # type: ignore[assignment]
            try:
                us = [time_deep(spec, depth, cache_type) for depth in DEPTHS]
            except Exception as error:  # a shape that does not fit this GPU is a result of the sweep
                print("sweep", name, cache_type, programs, shape, "failed:", str(error)[:60], flush=True)
                continue
            results.append(
                {"model": name, "cache_type": cache_type, "programs": programs, "tile": shape, "us": us}
            )
            print(f"sweep {name} {cache_type} {programs} {shape}:", *(f"{t:.1f}" for t in us), flush=True)
    arguments._TARGET_PROGRAMS, tiles.tile_shape = target, launch
    return results


def prefill_table(spec: AttentionSpec, types: Sequence[CacheType]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    chunks = ((32, 0), (128, 0), (512, 0), (2048, 0), (512, 8192), (2048, 14336))
    for cache_type, (rows, start) in itertools.product(types, chunks):
        attend, store = time_prefill(spec, rows, start, cache_type)
        flop = 4 * HEADS * HEAD_DIM * rows * (start + (rows + 1) / 2)
        row = {"rows": rows, "start": start, "us": attend, "rope_store": store, "tflops": flop / attend / 1e6}
        if start == 0:
            row["sdpa"] = time_sdpa(rows, rows)
        results.append({"cache_type": cache_type, **row})
        print("prefill", cache_type, *(f"{key}={value:.1f}" for key, value in row.items()), flush=True)
    return results


def prefill_sweep(spec: AttentionSpec) -> list[dict[str, float]]:
    results = []
    original = prefill.prefill_shape
    for rows, keys, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3)):
        if rows * keys * stages > 2**15:
            continue
        shape = prefill.PrefillShape(rows, keys, warps, stages)
        prefill.prefill_shape = lambda *_, shape=shape: shape  # type: ignore[assignment]
        try:
            us = [time_prefill(spec, *case)[0] for case in ((128, 0), (2048, 0), (2048, 14336))]
        except Exception as error:  # a shape that does not fit this GPU is a result of the sweep
            print("sweep", rows, keys, warps, stages, "failed:", str(error)[:60], flush=True)
            continue
        results.append({"rows": rows, "keys": keys, "warps": warps, "stages": stages, "us": us})
        print(
            f"sweep prefill {rows}x{keys} warps {warps} stages {stages}:",
            *(f"{t:.1f}" for t in us),
            flush=True,
        )
    prefill.prefill_shape = original
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["decode", "prefill", "batch", "rooms", "deep"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--cache", nargs="+", choices=CACHE_TYPES, default=CACHE_TYPES)
    parser.add_argument("--depth", nargs="+", type=int, default=(0, 128, 512, 2048, 4096, 16384, 65536))
    args = parser.parse_args()
    spec, types = mistral_spec(), args.cache
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "unit": "us"}
    if args.what in (None, "batch"):
        report["batch"] = [batch_sweep(spec, t) for t in types] if args.sweep else batch_table(spec, types)
    if args.what == "rooms":
        report["rooms"] = room_table(spec, types)
    if args.what in (None, "decode"):
        report["decode"] = (
            [decode_sweep(spec, t) for t in types]
            if args.sweep
            else [decode_table(spec, pdl, types, args.depth) for pdl in (False, True)]
        )
    if args.what in (None, "prefill"):
        report["prefill"] = prefill_sweep(spec) if args.sweep else prefill_table(spec, types)
    if args.what == "deep":
        report["deep"] = deep_sweep(types) if args.sweep else deep_table(types)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"benchmark": "attention", "parts": sorted(report)}))


if __name__ == "__main__":
    main()
