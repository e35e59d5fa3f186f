"""Experts of more than one row on this GPU: how programs should be made up, and how many rows a block should have.

    python -m benchmarks.cuda.grouped_blocks [-m MODEL ...] [-o TABLE.json]

Times what a layer's experts launch behind the router (grouping, gate and up, down, the sum with the norm behind it) at
several numbers of rows with random routings, in CUDA graphs over layers of distinct weights, for every size of block:
microseconds a layer, and the part of the memory's copies (4.2 TB/s) that the chosen experts' bytes make; small blocks
on m16n8k16 too, for comparison. Writes to the launch table the best program of Hopper's kernel for each block
("grouped_wgmma"), and for each number of rows that an expert has on average the best block ("grouped_blocks").
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.cuda.cuda_timing import compile_ahead, graph_time, random_part
from quengine.kernels.cuda.attention.attention_prefill import is_hopper
from quengine.kernels.cuda.gemm.workspace import FEW_ROWS, MatmulWorkspace
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped import grouped_add, grouped_glu
from quengine.kernels.cuda.rms_norm import rms_norm_fp16
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm


@dataclass(frozen=True)
class ExpertSizes:
    """One layer's experts: hidden size, feed-forward length, number of experts, experts per row; the types of
    gate, up and down. joined: the last of them is a shared one, which every row has.
    """

    hidden: int
    ffn: int
    count: int
    used: int
    types: tuple[str, str, str] = ("Q4_K", "Q4_K", "Q6_K")
    activation: Activation = "silu"
    bias: bool = False
    joined: bool = False


MODELS = {
    "qwen3-30b-a3b": ExpertSizes(2048, 768, 128, 8),
    "mixtral-8x7b": ExpertSizes(4096, 14336, 8, 2),
    "gpt-oss-20b": ExpertSizes(2880, 2880, 32, 4, ("MXFP4", "MXFP4", "MXFP4"), "clamped_swish", True),
    "qwen3.6-35b-a3b": ExpertSizes(2048, 512, 257, 9, joined=True),
}
GEOMETRIES: dict[int, list[list[int]]] = {
    8: [
        [4, 1, 2, True, 0, 256], [4, 1, 2, False, 128, 256], [4, 1, 2, False, 96, 256], [4, 1, 2, False, 80, 256],
        [4, 1, 2, True, 128, 256], [8, 1, 2, False, 128, 256], [4, 1, 4, False, 128, 128], [4, 1, 3, True, 104, 128],
        [4, 1, 2, False, 128, 256, 3], [4, 1, 2, False, 96, 256, 3], [4, 1, 2, False, 128, 256, 4],
    ],
    32: [
        [4, 1, 3, False, 128, 128], [4, 1, 2, False, 128, 256], [4, 1, 2, False, 104, 256], [4, 1, 3, True, 128, 128],
        [8, 1, 2, False, 128, 256], [4, 1, 2, False, 128, 256, 3],
    ],
    64: [
        [4, 1, 3, True, 0, 128], [4, 1, 3, False, 128, 128], [4, 1, 3, True, 168, 128], [8, 1, 2, False, 128, 256],
        [8, 1, 3, True, 0, 128],
    ],
    128: [[4, 1, 3, True, 0, 128], [8, 1, 3, True, 0, 128], [4, 1, 4, True, 0, 128]],
}  # fmt: skip
"""WgmmaGeometry without its block, which is the key; blocks of 16 have those of 8."""

GEOMETRY_ROWS = {8: (8, 32, 64), 16: (64, 128), 32: (128, 256), 64: (512, 1024), 128: (2048, 4096)}
"""The rows that each block's geometries are timed with."""

ROWS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCKS = (8, 16, 32, 64, 128, 256)
BYTES_PER_US = 4.2e6
LAYERS = 4
WORKERS = 14
MMA_BLOCKS = 16
"""Rows of the largest block that is timed on m16n8k16 too."""


def experts_of(model: ExpertSizes) -> tuple[ExpertWeights, ExpertWeights]:
    gate, _, down = model.types
    count, hidden, ffn = model.count, model.hidden, model.ffn
    biases = [torch.randn(count, n, device="cuda") if model.bias else None for n in (2 * ffn, hidden)]
    parts = random_part(gate, count * 2 * ffn, hidden), random_part(down, count * hidden, ffn)
    return (
        ExpertWeights((parts[0],), count, 2 * ffn, True, biases[0]),
        ExpertWeights((parts[1],), count, hidden, False, biases[1]),
    )


def random_routing(rows: int, model: ExpertSizes) -> Routing:
    scores = torch.rand(rows, model.count, device="cuda")
    if model.joined:
        scores[:, -1] = 1.0
    chosen = scores.topk(model.used).indices.sort().values
    return Routing(chosen.to(torch.int32), torch.full((rows, model.used), 1.0 / model.used, device="cuda"))


def layer_time(
    model: ExpertSizes,
    layers: list[tuple[ExpertWeights, ExpertWeights]],
    rows: int,
    block: int,
    mma: bool = False,
) -> tuple[float, float]:
    """Microseconds of a layer, and the bytes of the experts that a layer's rows chose. mma: on m16n8k16."""
    wgmma = is_hopper(torch.device("cuda")) and not mma
    room, pdl = MatmulWorkspace(0, "cuda"), torch.cuda.get_device_capability() >= (9, 0)
    norm = RMSNorm(torch.ones(model.hidden, device="cuda"), 1e-5)
    hidden = 1e-3 * torch.randn(rows, model.hidden, device="cuda")
    routings = [random_routing(rows, model) for _ in layers]
    exact = rows > FEW_ROWS

    def run(weights: tuple[ExpertWeights, ExpertWeights], routing: Routing) -> None:
        x = rms_norm_fp16(hidden, norm.weight, norm.eps, room.fp16_operand(rows, model.hidden), pdl)
        gated = grouped_glu(x, routing, weights[0], room, model.activation, pdl, exact)
        grouped_add(gated, routing, weights[1], room, hidden, norm, pdl, exact)

    launches = [lambda w=w, r=r: run(w, r) for w, r in zip(layers, routings, strict=True)]
    with (
        patch("quengine.kernels.cuda.moe.grouped.grouped_block", lambda *_: block),
        patch("quengine.kernels.cuda.moe.grouped.is_hopper", lambda *_: wgmma),
    ):
        time = graph_time(launches) / len(layers)
    chosen = sum(routing.experts.unique().numel() for routing in routings) / len(layers)
    return time, chosen / model.count * sum(each.nbytes for each in layers[0])


def rows_of_expert(model: ExpertSizes, rows: int) -> int:
    """On average, rounded up."""
    return -(-rows * model.used // model.count)


def tried_blocks(model: ExpertSizes, rows: int) -> list[int]:
    mean = rows_of_expert(model, rows)
    return [block for block in BLOCKS if mean / 4 <= block <= max(16, 4 * mean)]


def geometries(block: int) -> list[list[int]]:
    return GEOMETRIES.get(8 if block == 16 else block, [])


@contextmanager
def geometry_of(block: int, geometry: list[int]) -> Iterator[None]:
    """Blocks of so many rows are launched with `geometry`."""
    entries = launch_table._table().setdefault(launch_table.table_key(), {}).setdefault("grouped_wgmma", {})
    before = entries.get(str(block))
    entries[str(block)] = geometry
    try:
        yield
    finally:
        del entries[str(block)]
        if before is not None:
            entries[str(block)] = before


def tune_geometries(names: list[str]) -> dict[str, list[int]]:
    """By block: the geometry that is best over the models and numbers of rows."""
    relative: dict[int, list[list[float]]] = {}
    for name in names:
        layers = [experts_of(MODELS[name]) for _ in range(LAYERS)]
        for block, rows in ((block, rows) for block, some in GEOMETRY_ROWS.items() for rows in some):
            times = []
            for geometry in geometries(block):
                with geometry_of(block, geometry):
                    times.append(layer_time(MODELS[name], layers, rows, block)[0])
            print(f"{name}, {rows} rows, geometries of {block}: {[round(t, 1) for t in times]}", flush=True)
            relative.setdefault(block, []).append([time / min(times) for time in times])
    best = {}
    for block, found in relative.items():
        means = [sum(column) for column in zip(*found, strict=True)]
        best[str(block)] = geometries(block)[means.index(min(means))]
    return best


def compile_share(names: list[str], worker: int) -> None:
    runs = [
        (MODELS[name], rows, block, mma)
        for name in names
        for rows in ROWS
        for block in tried_blocks(MODELS[name], rows)
        for mma in (False, True)
        if block <= MMA_BLOCKS or not mma
    ]
    for model, rows, block, mma in runs[worker::WORKERS]:
        layer_time(model, [experts_of(model)], rows, block, mma)
    tried = [
        (MODELS[name], rows, block, geometry)
        for name in names
        for block, some in GEOMETRY_ROWS.items()
        for rows in (some[0], some[-1])
        for geometry in geometries(block)
    ]
    for model, rows, block, geometry in tried[worker::WORKERS]:
        with geometry_of(block, geometry):
            layer_time(model, [experts_of(model)], rows, block)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile is not None:
        compile_share(arguments.model, arguments.compile)
        return
    compile_ahead("cuda.grouped_blocks", ["-m", *arguments.model], [str(i) for i in range(WORKERS)])
    found = tune_geometries(arguments.model) if is_hopper(torch.device("cuda")) else {}
    print(json.dumps({"grouped_wgmma": found}), flush=True)
    launch_table._table().setdefault(launch_table.table_key(), {})["grouped_wgmma"] = found
    relative: dict[int, dict[int, list[float]]] = {}
    for name in arguments.model:
        model = MODELS[name]
        layers = [experts_of(model) for _ in range(LAYERS)]
        for rows in ROWS:
            mean, times = rows_of_expert(model, rows), {}
            for block in tried_blocks(model, rows):
                times[block], nbytes = layer_time(model, layers, rows, block)
                part = nbytes / BYTES_PER_US / times[block]
                print(
                    f"{name}, {rows} rows, blocks of {block}: {times[block]:.1f} us, {part:.0%}", flush=True
                )
                if block <= MMA_BLOCKS:
                    mma, _ = layer_time(model, layers, rows, block, True)
                    print(f"{name}, {rows} rows, blocks of {block} on m16n8k16: {mma:.1f} us", flush=True)
            for block, time in times.items():
                relative.setdefault(mean, {}).setdefault(block, []).append(time / min(times.values()))
    best = [
        [mean, min(found, key=lambda block: sum(found[block]) / len(found[block]))]
        for mean, found in sorted(relative.items())
    ]
    print(json.dumps({"device": torch.cuda.get_device_name(), "grouped_blocks": best}))
    if arguments.out:
        table = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        entries = table.setdefault(launch_table.table_key(), {})
        entries["grouped_blocks"], entries["grouped_wgmma"] = best, found
        arguments.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
