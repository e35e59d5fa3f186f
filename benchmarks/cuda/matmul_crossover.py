"""Matmuls of 2 rows and more on this GPU: fused on packed weights, against dequantize + cuBLAS, and where they cross.

    python -m benchmarks.cuda.matmul_crossover [-o TABLE.json] [--json RESULTS.json]

Times the matmuls of a Mistral-7B Q4_K_M layer at several numbers of rows, both ways, from CUDA graphs that rotate
through more weights than the L2 cache holds, and writes the largest number of rows at which the fused way still wins,
summed over the layer, to the launch table ("fused_limit"; on Hopper "wgmma_limit", twice the most that was tried where
it always wins). Then the matmuls, norms and roundings of a whole step,
32 layers of distinct weights and the output matrix, without attention.
"""

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.cuda.cuda_timing import graph_time, random_weights
from quengine.kernels.cuda.attention.attention_prefill import is_hopper
from quengine.kernels.cuda.gemm.matmul import matmul, matmul_glu, matmul_norm
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.rms_norm import rms_norm_fp16
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.dequantize import dequantize_part
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.rms_norm import RMSNorm

SHAPES = {
    "qkv": ("Q4_K", 6144, 4096),
    "o": ("Q4_K", 4096, 4096),
    "gate_up": ("Q4_K", 28672, 4096),
    "down Q4_K": ("Q4_K", 4096, 14336),
    "down Q6_K": ("Q6_K", 4096, 14336),
    "output": ("Q6_K", 32000, 4096),
}
SHARES = {"down Q4_K": 0.5, "down Q6_K": 0.5, "output": 0.0}
"""How often a layer has the shape, where that is not once."""

ROWS = (2, 4, 8, 16, 32, 64, 96, 127, 128, 192, 256, 384, 512, 768, 1024, 2048)
MOST_FUSED = 128
"""Rows up to which the fused way is tried before Hopper, and a step is timed."""
LAYERS = 32


def weight(name: str, copies: int | None = None) -> list[PackedWeight]:
    name_of_format, rows, cols = SHAPES[name]
    return random_weights([(name_of_format, rows)], cols, paired=name == "gate_up", copies=copies)


def limited(limit: int):  # type: ignore[no-untyped-def]
    return patch("quengine.kernels.cuda.gemm.workspace.fused_limit", lambda _: limit)


def shape_times(
    rows: int, weights: dict[str, list[PackedWeight]], room: MatmulWorkspace, limit: int
) -> dict[str, float]:
    """Microseconds of each shape, with the fused way up to `limit` rows; gate and up with SwiGLU. Rows are rounded
    beforehand, as a norm in front does."""
    times = {}
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    for name, (_, _, cols) in SHAPES.items():
        hidden, norm = torch.randn(rows, cols, device="cuda"), torch.ones(cols, device="cuda")
        with limited(limit):
            x = rms_norm_fp16(hidden, norm, 1e-5, room.fp16_operand(rows, cols))
            run = matmul_glu if name == "gate_up" else matmul
            launches = [lambda w=w, x=x, run=run: run(x, w, room, pdl=pdl) for w in weights[name]]
            repeats = max(1, 12 // len(launches))
            times[name] = graph_time(launches * repeats, 7) / len(launches) / repeats
    return times


def layer(times: dict[str, float]) -> float:
    return sum(time * SHARES.get(name, 1.0) for name, time in times.items())


def step_time(rows: int, layers: list[list[PackedWeight]], output: PackedWeight) -> float:
    """Microseconds of a step's matmuls, norms and roundings in one graph."""
    room = MatmulWorkspace(1 << 26, "cuda")
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    hidden, norm = torch.randn(rows, 4096, device="cuda"), torch.ones(4096, device="cuda")

    def step() -> None:
        stream = hidden
        normed = rms_norm_fp16(stream, norm, 1e-5, room.fp16_operand(rows, 4096), pdl=pdl)
        for qkv, o, gate_up, down in layers:
            matmul(normed, qkv, room, pdl=pdl)
            stream, normed = matmul_norm(hidden, o, room, stream, RMSNorm(norm, 1e-5), pdl=pdl)
            gated = matmul_glu(normed, gate_up, room, pdl=pdl)
            stream, normed = matmul_norm(gated, down, room, stream, RMSNorm(norm, 1e-5), pdl=pdl)
        matmul(normed, output, room, pdl=pdl)

    return graph_time([step], 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path(launch_table.__file__).with_name("launch_table.json")
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    weights = {name: weight(name) for name in SHAPES}
    room = MatmulWorkspace(28672 * 4096, "cuda")
    for name in SHAPES:
        part = weights[name][0].parts[0]
        assert isinstance(part, PackedPart)
        if part.rows * part.cols <= room.max_weights:
            dequantized = room.dequantized(part.rows, part.cols)
            time = graph_time([lambda p=part, e=dequantized: dequantize_part(p, False, e)] * 4) / 4
            rate = (part.nbytes + 2 * dequantized.numel()) / time / 1e6
            print(f"dequantize {name}: {time:.1f} us, {rate:.2f} TB/s")
    hopper = is_hopper(torch.device("cuda"))
    results, limit, crossed = [], 1, False
    for rows in ROWS:
        fused = shape_times(rows, weights, room, rows) if hopper or rows <= MOST_FUSED else {}
        dequantized = shape_times(rows, weights, room, 0)
        crossed = crossed or not fused or layer(fused) > layer(dequantized)
        limit = limit if crossed else rows
        results.append({"rows": rows, "fused": fused, "dequantized": dequantized})
        for way, times in (("fused", fused), ("dequantized", dequantized)):
            if times:
                line = "  ".join(f"{name} {time:6.1f}" for name, time in times.items())
                print(f"{rows:5d} rows {way:8s} {line}  layer {layer(times):7.1f} us", flush=True)
    limit = limit if crossed else 2 * ROWS[-1]
    name_of_limit = "wgmma_limit" if hopper else "fused_limit"
    weights.clear()
    layers = [
        [weight(name, 1)[0] for name in ("qkv", "o", "gate_up", f"down Q{4 + number % 2 * 2}_K")]
        for number in range(LAYERS)
    ]
    output, steps = weight("output", 1)[0], {}
    for rows in ROWS:
        if rows <= MOST_FUSED:
            with limited(limit):
                steps[rows] = step_time(rows, layers, output)
            print(f"{rows:5d} rows: a step's matmuls, norms and roundings {steps[rows]:8.1f} us", flush=True)
    table = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    table.setdefault(launch_table.table_key(), {})[name_of_limit] = limit
    arguments.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    report = {
        "device": torch.cuda.get_device_name(), name_of_limit: limit, "results": results, "steps": steps
    }  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
