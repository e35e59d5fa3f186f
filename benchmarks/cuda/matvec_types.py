"""Time the matvecs of one decode step of Mistral-7B's layers for every quant type, all matrices of a layer in one type.

    python -m benchmarks.cuda.matvec_types                     # every type
    python -m benchmarks.cuda.matvec_types --types Q8_0,Q3_K --tune [--write]

Per type and matrix: microseconds alone and percent of COPY_BYTES_PER_SECOND; then all of a layer in the step's order.
Distinct layers follow each other in one CUDA graph, so that the L2 cache holds none of their weights. `--tune` tries
launch geometries, one matrix after the other, by the time of the whole layer (see tune_matvec_chain.py for why), and
`--write` keeps them in launch_table.json.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.cuda.cuda_timing import COPY_BYTES_PER_SECOND, compile_ahead, graph_time, random_part
from benchmarks.cuda.matvec_chain import layer_calls
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.layout import PACKED_FORMATS
from quengine.kernels.cuda.weights.packed import PackedWeight

Layer = dict[str, PackedWeight]
Call = Callable[[PackedWeight], object]

SHAPES = {
    "qkv": ("rows", 6144, 4096),
    "o": ("norm", 4096, 4096),
    "gate_up": ("swiglu", 28672, 4096),
    "down": ("norm", 4096, 14336),
}
LAYERS = 6
WORKERS = 15
ROUNDS = 1
WARPS = {"qkv": (4, 8, 16), "o": (4, 8, 16), "gate_up": (4, 8), "down": (8, 16)}
"""Warps a tile that are tried."""


def key_of(name: str, matrix: str) -> str:
    kind, rows, cols = SHAPES[matrix]
    return f"{kind} {name} {rows} x {cols}"


def geometries(matrix: str) -> Iterator[list[int | bool]]:
    for k_warps in WARPS[matrix]:
        for tiles, ahead in ((1, 1), (1, 2), (2, 1)):
            for registers in (0, 64, 80, 96, 128):
                if tiles * k_warps <= 16 and registers * tiles * k_warps * 32 <= 65536:
                    yield [tiles, k_warps, ahead, registers, True]


def layer_of(name: str) -> Layer:
    """One layer's matrices in a type, random."""

    def weight(matrix: str) -> PackedWeight:
        _, rows, cols = SHAPES[matrix]
        return PackedWeight((random_part(name, rows, cols),), paired=matrix == "gate_up")

    return {matrix: weight(matrix) for matrix in SHAPES}


def layer_time(layers: list[Layer], calls: dict[str, Call]) -> float:
    """Microseconds of a layer's launches in the step's order."""
    launches = [lambda w=layer[m], c=call: c(w) for layer in layers for m, call in calls.items()]
    return min(graph_time(launches) for _ in range(2)) / len(layers)


def measure(name: str, layers: list[Layer], calls: dict[str, Call]) -> None:
    """Print a line for a type: each matrix alone, then the layer."""
    first, figures = layers[0], []
    for matrix, call in calls.items():
        time = graph_time([lambda w=layer[matrix], c=call: c(w) for layer in layers]) / len(layers)
        figures.append((matrix, first[matrix].nbytes, time))
    figures.append(("layer", sum(weight.nbytes for weight in first.values()), layer_time(layers, calls)))
    rate = COPY_BYTES_PER_SECOND / 1e6
    columns = (f"{m} {time:6.2f} us {100 * nbytes / rate / time:3.0f}%" for m, nbytes, time in figures)
    print(f"{name:7s} {figures[-1][1] / 1e6:6.1f} MB  " + "  ".join(columns), flush=True)


def tune(
    name: str, layers: list[Layer], calls: dict[str, Call], entries: dict[str, list[int | bool]]
) -> None:
    """Choose a geometry for each matrix by the time of the layer."""
    for matrix in [matrix for _ in range(ROUNDS) for matrix in calls]:
        key = key_of(name, matrix)
        before, times = entries.pop(key, None), [(layer_time(layers, calls), None)]
        for geometry in geometries(matrix):
            entries[key] = geometry
            times.append((layer_time(layers, calls), geometry))
        times.sort(key=lambda result: result[0])
        entries.pop(key)
        if times[0][1] is not None:
            entries[key] = times[0][1]
        listed = (f"{t:.1f} {'/'.join(str(int(v)) for v in g) if g else 'default'}" for t, g in times[:4])
        print(f"{key} (was {before}): {', '.join(listed)}", flush=True)


def compile_share(names: list[str], share: int, tuned: bool, entries: dict[str, list[int | bool]]) -> None:
    """Launch one of WORKERS shares of the variants once."""
    variants = [
        (name, matrix, geometry)
        for name in names
        for matrix in SHAPES
        for geometry in [None, *(geometries(matrix) if tuned else ())]
    ]
    chosen = variants[share * len(variants) // WORKERS : (share + 1) * len(variants) // WORKERS]
    for name in dict.fromkeys(name for name, _, _ in chosen):
        layer = layer_of(name)
        calls = layer_calls(layer, torch.cuda.get_device_capability() >= (9, 0))
        for _, matrix, geometry in [variant for variant in chosen if variant[0] == name]:
            if geometry is not None:
                entries[key_of(name, matrix)] = geometry
            calls[matrix](layer[matrix])
            entries.pop(key_of(name, matrix), None)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--types", default=",".join(PACKED_FORMATS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--compile", type=int)
    arguments = parser.parse_args()
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    names = arguments.types.split(",")
    table = launch_table._table()
    entries = table.setdefault(launch_table.device_name(), {}).setdefault("matvec", {})
    if arguments.compile is not None:
        compile_share(names, arguments.compile, arguments.tune, entries)
        return
    flags = ["--types", arguments.types, *(["--tune"] if arguments.tune else [])]
    compile_ahead("matvec_types", flags, [str(i) for i in range(WORKERS)])
    for name in names:
        layers = [layer_of(name) for _ in range(LAYERS)]
        calls = layer_calls(layers[0], pdl)
        measure(name, layers, calls)
        if arguments.tune:
            tune(name, layers, calls, entries)
            measure(name, layers, calls)
        del layers
    print(json.dumps({key: value for key, value in entries.items() if key.split()[1] in names}))
    if arguments.write:
        path = Path(launch_table.__file__).with_name("launch_table.json")
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
