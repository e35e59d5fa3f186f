"""Experts of more than one row on this GPU: how many rows a block should have, and up to which of them m16n8k16 wins.

    python -m benchmarks.cuda.grouped_blocks [-m MODEL ...] [-o TABLE.json]

Times what a layer's experts launch behind the router (grouping, gate and up, down, the sum with the norm behind it) at
several numbers of rows with random routings, in CUDA graphs over layers of distinct weights, for every size of block:
microseconds a layer, and the part of the memory's copies (4.2 TB/s) that the chosen experts' bytes make. Writes, for
each number of rows that an expert has on average, the best block to the launch table ("grouped_blocks").
"""

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.cuda.cuda_timing import graph_time, random_part
from quengine.kernels.cuda.aot.aot_grouped import MODELS, Experts
from quengine.kernels.cuda.gemm.workspace import FEW_ROWS, MatmulWorkspace
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped import grouped_add, grouped_glu
from quengine.kernels.cuda.rms_norm import rms_norm_fp16
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm

ROWS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCKS = (8, 16, 32, 64, 128, 256)
BYTES_PER_US = 4.2e6
LAYERS = 4


def experts_of(model: Experts) -> tuple[ExpertWeights, ExpertWeights]:
    gate, _, down = model.types
    count, hidden, ffn = model.count, model.hidden, model.ffn
    biases = [torch.randn(count, n, device="cuda") if model.bias else None for n in (2 * ffn, hidden)]
    parts = random_part(gate, count * 2 * ffn, hidden), random_part(down, count * hidden, ffn)
    return (
        ExpertWeights((parts[0],), count, 2 * ffn, True, biases[0]),
        ExpertWeights((parts[1],), count, hidden, False, biases[1]),
    )


def random_routing(rows: int, model: Experts) -> Routing:
    chosen = torch.rand(rows, model.count, device="cuda").topk(model.used).indices.sort().values
    return Routing(chosen.to(torch.int32), torch.full((rows, model.used), 1.0 / model.used, device="cuda"))


def layer_time(
    model: Experts, layers: list[tuple[ExpertWeights, ExpertWeights]], rows: int, block: int, mma: int
) -> tuple[float, float]:
    """Microseconds of a layer, and the bytes of the experts that a layer's rows chose."""
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
        patch("quengine.kernels.cuda.moe.grouped.grouped_fused_limit", lambda: mma),
    ):
        time = graph_time(launches) / len(layers)
    chosen = sum(routing.experts.unique().numel() for routing in routings) / len(layers)
    return time, chosen / model.count * sum(each.nbytes for each in layers[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("-o", "--out", type=Path)
    arguments = parser.parse_args()
    relative: dict[int, dict[int, list[float]]] = {}
    for name in arguments.model:
        model = MODELS[name]
        layers = [experts_of(model) for _ in range(LAYERS)]
        for rows in ROWS:
            mean = -(-rows * model.used // model.count)
            tried = [block for block in BLOCKS if mean / 4 <= block <= max(16, 4 * mean)]
            times = {}
            for block in tried:
                times[block], nbytes = layer_time(model, layers, rows, block, 0)
                part = nbytes / BYTES_PER_US / times[block]
                print(
                    f"{name}, {rows} rows, blocks of {block}: {times[block]:.1f} us, {part:.0%}", flush=True
                )
                if block <= 64:
                    mma, _ = layer_time(model, layers, rows, block, block)
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
        table.setdefault(launch_table.device_name(), {})["grouped_blocks"] = best
        arguments.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
