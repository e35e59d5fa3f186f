"""Latent attention between its projections, at the shapes of released models, against bytes and the definition.

    python -m benchmarks.cuda.latent [decode|prefill|all] [--model NAME] [--cache f16|q8_0] [--json FILE] [--check]

Decode: microseconds of a layer's step inside a CUDA graph of layers with caches of their own, of the attention alone
and with the heads' matrices, and bytes of cached rows a second against a copy's, for batches of 1, 8 and 64 at depths
of 512 and 8192. Prefill: microseconds of a layer, its launches one by one, and products a second. --check compares a
step of each kind with the definition in fp64 first.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda.cuda_timing import COPY_BYTES_PER_SECOND, graph_time, launch_time
from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import KVLayer
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.latent.decode import LatentWorkspace, latent_decode
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_TYPES, CacheType, blocks_for, row_bytes
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rope import RopeSpec, rope_table

DEVICE = torch.device("cuda")
BATCHES, DEPTHS, PROMPTS = (1, 8, 64), (512, 8192), (512, 2048)
CACHE_BYTES = 2 << 30
"""Most bytes of the caches of all layers of a graph: far more than the L2 cache holds."""

MOST_LAYERS = 16
DECODE, PROMPT = 2e-7, 5e-6
"""NMSE to the definition of a row by q-dot, and of rows that are rounded to fp16."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's layer: heads, elements of the latent, of plain and of rotated queries, of values; layers it has."""

    heads: int
    rank: int
    plain: int
    rotated: int
    values: int
    layers: int


SHAPES = {
    "glm-4.7-flash": Shape(20, 512, 192, 64, 256, 47),
    "deepseek-v3": Shape(128, 512, 128, 64, 128, 61),
    "mistral-small-4": Shape(32, 256, 64, 64, 128, 36),
}


def matrix(name: str, rows: int, cols: int, seed: int) -> QuantTensor:
    """Random codes with scales of about a thousandth."""
    form, random = FORMATS[name], torch.Generator().manual_seed(seed)
    blocks = cols // form.block
    data = torch.randint(0, 256, (rows, blocks, form.nbytes), dtype=torch.uint8, generator=random)
    for field in ("d", "dmin"):
        start, stop = form.layout.get(field, (0, 0))
        if stop - start == 2:
            scales = torch.full((rows, blocks, 1), 1e-3, dtype=torch.float16)
            data[..., start:stop] = scales.view(torch.uint8)
    return QuantTensor(name, form, (rows, cols), data.view(rows, -1))


def spec_of(shape: Shape, context: int, backend: Any) -> LatentSpec:
    device = backend.device
    cos, sin = rope_table(RopeSpec(shape.rotated), context, device)
    absorb = [matrix("Q5_0", shape.rank, shape.plain, head) for head in range(shape.heads)]
    expand = [matrix("Q4_K", shape.values, shape.rank, 1000 + head) for head in range(shape.heads)]
    spec = LatentSpec(
        heads=shape.heads, rank=shape.rank, plain=shape.plain, rotated=shape.rotated, values=shape.values,
        scale=(shape.plain + shape.rotated) ** -0.5, rope_layout="pairs", cos=cos, sin=sin,
        mask_band=causal_mask_band(max(PROMPTS), context, device=device),
        norm=torch.ones(shape.rank, device=device), eps=1e-6,
        absorb=backend.down_experts(absorb), expand=backend.down_experts(expand),
    )  # fmt: skip
    backend.check_latent(spec)
    return spec


def layer_of(shape: Shape, sequences: int, depth: int, cache: CacheType) -> KVLayer:
    rows = (1 + sequences * blocks_for(depth)) * BLOCK_SIZE
    layer = allocate_layer(rows, 1, shape.rank + shape.rotated, DEVICE, cache, latent=True)
    for tensor in layer.tensors:
        if tensor.dtype == torch.int8:
            tensor.random_(-127, 128)
        else:
            tensor.normal_(0.0, 1.0).mul_(0.01 if cache == "q8_0" else 1.0)
    return layer


def tables(sequences: int, depth: int) -> list[list[list[int]]]:
    count = blocks_for(depth)
    return [[list(range(1 + n * count, 1 + (n + 1) * count))] for n in range(sequences)]


def inputs(shape: Shape, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(rows, shape.heads * (shape.plain + shape.rotated), device=DEVICE)
    return q, torch.randn(rows, shape.rank + shape.rotated, device=DEVICE)


def decode_rows(name: str, cache: CacheType) -> Iterator[Row]:
    shape, backend = SHAPES[name], CudaBackend(DEVICE)
    for sequences, depth in itertools.product(BATCHES, DEPTHS):
        of_layer = sequences * depth * row_bytes(cache, shape.rank + shape.rotated)
        count = max(2, min(MOST_LAYERS, CACHE_BYTES // of_layer))
        layers = [layer_of(shape, sequences, depth, cache) for _ in range(count)]
        spec, (q, latent) = spec_of(shape, depth, backend), inputs(shape, sequences)
        positions = [depth - 1] * sequences
        batch = decode_batch([0] * sequences, positions, tables(sequences, depth), DEVICE)
        whole = launch_time(
            [partial(backend.latent_attention, batch, q, latent, spec, one) for one in layers]
        )
        kinds = {"": whole}
        if sequences == 1:
            kinds["attention alone"] = launch_time(
                [partial(alone, shape, spec, batch, one) for one in layers]
            )
        for kind, us in kinds.items():
            rate = of_layer / us * 1e6
            print(
                f"decode {name} {cache} {sequences:3} sequences at {depth:5} {kind:16} {us:8.2f} us a layer,",
                f"{us * shape.layers / 1e3:7.3f} ms for all {shape.layers}, rows at {rate / 1e12:.2f} TB/s",
                f"({rate / COPY_BYTES_PER_SECOND:.0%} of a copy's)",
                flush=True,
            )
            yield {
                "decode": name,
                "cache": cache,
                "sequences": sequences,
                "depth": depth,
                "kind": kind,
                "us": us,
            }
        del layers
        torch.cuda.empty_cache()


_HELD: dict[tuple[int, int], tuple[Any, ...]] = {}


def alone(shape: Shape, spec: LatentSpec, batch: ForwardBatch, layer: KVLayer) -> None:
    """The two launches of attention of one row."""
    key = shape.heads, shape.rank
    if key not in _HELD:
        _HELD[key] = (
            torch.randn(shape.heads, shape.rank, device=DEVICE),
            torch.randn(1, shape.heads, shape.rotated, device=DEVICE),
            LatentWorkspace.allocate(1, shape.heads, shape.rank, False, DEVICE),
            QuantizedActivations.empty(shape.heads, shape.rank, DEVICE),
        )
    absorbed, turned, room, out = _HELD[key]
    tables_of = batch.block_tables_of(0)
    latent_decode(absorbed, turned, spec, layer, batch.positions, tables_of, room, out, pdl=True)


def prefill_rows(name: str, cache: CacheType) -> Iterator[Row]:
    shape, backend = SHAPES[name], CudaBackend(DEVICE)
    for rows in PROMPTS:
        layer, spec = layer_of(shape, 1, rows, cache), spec_of(shape, rows, backend)
        q, latent = inputs(shape, rows)
        batch = prefill_batch([[0] * rows], [0], tables(1, rows), DEVICE)
        us = graph_time([partial(backend.latent_attention, batch, q, latent, spec, layer)])
        pairs = rows * (rows + 1) // 2
        matrices = rows * shape.rank * (shape.plain + shape.values)
        products = 2 * shape.heads * (pairs * (2 * shape.rank + shape.rotated) + matrices)
        print(
            f"prefill {name} {cache} {rows:5} rows {us:9.1f} us a layer, {products / us / 1e6:.0f} TFLOP/s,",
            f"{rows / us / shape.layers * 1e6:.0f} rows a second of all {shape.layers}",
            flush=True,
        )
        yield {"prefill": name, "cache": cache, "rows": rows, "us": us, "products": products}


def check(name: str, cache: CacheType) -> None:
    """A step of each kind against the definition in fp64."""
    shape = SHAPES[name]
    for kind, sequences, rows in (("decode", 1, 1), ("decode", 3, 3), ("prefill", 1, 70)):
        depth, ours, exact = 200, CudaBackend(DEVICE), ReferenceBackend(keep=True)
        layer, (q, latent) = layer_of(shape, sequences, depth, cache), inputs(shape, rows)
        found = []
        held = [tensor.cpu().clone() for tensor in layer.tensors]
        theirs = KVLayer(held[0], held[0], *(held[1:] * 2))
        for backend, given, dtype in ((exact, theirs, torch.float64), (ours, layer, torch.float32)):
            device = backend.device
            if kind == "decode":
                at = [depth - 1 - 7 * n for n in range(rows)]
                batch = decode_batch([0] * rows, at, tables(sequences, depth), device)
            else:
                batch = prefill_batch([[0] * rows], [50], tables(1, depth), device)
            spec = spec_of(shape, depth, backend)
            y = backend.latent_attention(batch, q.to(device, dtype), latent.to(device, dtype), spec, given)
            found.append(y.double().cpu())
        wrong = float(((found[1] - found[0]) ** 2).sum() / (found[0] ** 2).sum())
        limit = DECODE if rows == 1 else PROMPT
        print(f"check {name} {cache} {kind} of {rows}: NMSE {wrong:.1e}, limit {limit:.0e}", flush=True)
        assert wrong < limit, f"{name}: {kind} of {rows} rows is wrong"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("decode", "prefill", "all"), default="all")
    parser.add_argument("--model", choices=SHAPES, default="glm-4.7-flash")
    parser.add_argument("--cache", choices=CACHE_TYPES, default="f16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        check(given.model, given.cache)
    rows: list[Row] = []
    if given.what in ("decode", "all"):
        rows += decode_rows(given.model, given.cache)
    if given.what in ("prefill", "all"):
        rows += prefill_rows(given.model, given.cache)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
