"""Where the fused matmul on packed weights stops paying against dequantize + cuBLAS, on this GPU.

    python -m benchmarks.matmul_crossover [-o TABLE.json]

Times the four matmuls of a Mistral-7B Q4_K layer at several numbers of rows, both ways, from CUDA graphs, and
writes the largest number of rows at which the fused way still wins, summed over the layer, to the launch table
("fused_limit").
"""

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.cuda_timing import graph_time, random_weights
from quengine.kernels.cuda import launch_table
from quengine.kernels.cuda.expand import dequantize_part
from quengine.kernels.cuda.matmul import MatmulWorkspace, matmul
from quengine.kernels.cuda.packed import PackedPart

SHAPES = (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336))
ROWS = (9, 16, 32, 64, 96, 128, 512, 2048)


def layer_times(rows: int, weights: dict[str, list], room: MatmulWorkspace, limit: int) -> dict[str, float]:  # type: ignore[type-arg]
    """Microseconds of each matmul of the layer, with the fused way up to `limit` rows."""
    times = {}
    for name, _, cols in SHAPES:
        x = torch.randn(rows, cols, device="cuda")
        with patch("quengine.kernels.cuda.matmul.fused_limit", lambda: limit):
            launches = [lambda w=w, x=x: matmul(x, w, room) for w in weights[name][:4]]
            times[name] = graph_time(launches, 5) / len(launches)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path(launch_table.__file__).with_name("launch_table.json")
    )
    arguments = parser.parse_args()
    weights = {name: random_weights([("Q4_K", n)], k) for name, n, k in SHAPES}
    room = MatmulWorkspace(28672 * 4096, "cuda")
    for name, parts in weights.items():
        part = parts[0].parts[0]
        assert isinstance(part, PackedPart)
        expanded = room.weights[: part.rows * part.cols].view(part.rows, part.cols)
        time = graph_time([lambda p=part, e=expanded: dequantize_part(p, False, e)] * 4) / 4
        print(
            f"dequantize {name}: {time:.1f} us, {(part.nbytes + 2 * expanded.numel()) / time / 1e6:.2f} TB/s"
        )
    results, limit = [], 8
    for rows in ROWS:
        fused = layer_times(rows, weights, room, rows) if rows <= 128 else {}
        expanded = layer_times(rows, weights, room, 0)
        if (
            fused
            and sum(fused.values()) < sum(expanded.values())
            and limit == max([8, *[r for r in ROWS if r < rows]])
        ):
            limit = rows
        results.append({"rows": rows, "fused": fused, "expanded": expanded})
        for way, times in (("fused", fused), ("expanded", expanded)):
            if times:
                line = "  ".join(f"{name} {time:7.1f}" for name, time in times.items())
                print(f"{rows:5d} rows {way:8s} {line}  layer {sum(times.values()):8.1f} us", flush=True)
    table = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    table.setdefault(launch_table.device_name(), {})["fused_limit"] = limit
    arguments.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(json.dumps({"device": torch.cuda.get_device_name(), "fused_limit": limit, "results": results}))


if __name__ == "__main__":
    main()
