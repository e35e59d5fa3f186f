"""Time the matvecs of one decode step for every quant type: a model's layers, all matrices of a layer in one type.

    python -m benchmarks.cuda.matvec_types                     # Mistral-7B's shapes in every type
    python -m benchmarks.cuda.matvec_types mistral-7b/Q3_K llama-3.2-1b/Q4_K_M --tune [--write]

For each matrix: microseconds alone and percent of COPY_BYTES_PER_SECOND; then all of a layer in the step's order.
Distinct layers follow each other in one CUDA graph, so that the L2 cache holds none of their weights. In Q4_K_M half
of the layers have v and down in Q6_K; MODEL/output is the output matrix alone, in Q6_K. `--tune` tries launch
geometries for the matrices that launch_table.json lacks, one after the other, by the time of the layers (see
tune_matvec_chain.py for why), and `--write` keeps them there.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.cuda.cuda_timing import (
    COPY_BYTES_PER_SECOND,
    compile_ahead,
    copies_past_l2,
    graph_time,
    random_part,
)
from benchmarks.cuda.matvec_chain import layer_calls
from quengine.kernels.cuda.gemv.activations import quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.layout import PACKED_FORMATS
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight

Layer = dict[str, PackedWeight]
Calls = dict[str, Callable[[Layer], object]]
Candidate = tuple[int, int, int, int, bool]
Entries = dict[str, list[int | bool]]

MODELS = {
    "mistral-7b": (4096, 14336, 4096, 1024, 32000),
    "qwen3-8b": (4096, 12288, 4096, 1024, 151936),
    "llama-3.2-1b": (2048, 8192, 2048, 512, 128256),
    "gemma3-4b": (2560, 10240, 2048, 1024, 262144),
}
"""Width of the model, of the feed-forward network, of the queries, and of the keys and the values; the vocabulary."""

POST_NORMS = ("gemma3-4b",)
"""Models whose results of o and down have norms of their own, and whose gates are GELUs."""

KINDS = {"qkv": "rows", "o": "norm", "gate_up": "swiglu", "down": "norm", "output": "rows"}
SHORT: tuple[Candidate, ...] = (
    (1, 8, 1, 80, True), (1, 8, 1, 64, True), (1, 4, 1, 80, True), (1, 4, 2, 80, True), (1, 16, 1, 64, True),
    (2, 8, 1, 64, True), (1, 2, 2, 80, True), (2, 4, 2, 80, True),
)  # fmt: skip
CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "qkv": SHORT,
    "o": SHORT,
    "gate_up": (
        (1, 4, 1, 64, True), (1, 4, 1, 80, True), (1, 4, 2, 96, True), (1, 8, 1, 64, True), (2, 4, 1, 72, True),
        (1, 2, 1, 64, True), (1, 2, 1, 72, True), (1, 2, 1, 80, True), (1, 4, 2, 128, True),
    ),
    "down": (
        (1, 16, 1, 64, True), (1, 8, 1, 80, True), (1, 8, 1, 112, True), (1, 8, 1, 128, True), (1, 8, 2, 128, True),
        (1, 8, 3, 128, True), (2, 8, 1, 64, True), (2, 8, 1, 88, True), (2, 8, 1, 128, True), (1, 32, 1, 64, True),
        (1, 16, 2, 80, True), (1, 8, 5, 128, True), (1, 4, 2, 80, True),
    ),
    "output": (
        (1, 8, 1, 80, True), (1, 8, 1, 72, True), (1, 4, 1, 80, True), (1, 4, 1, 72, True), (1, 4, 2, 96, True),
    ),
}  # fmt: skip
"""What is tried: launch_table.Geometry."""
WORKERS = 15


def layer_of(model: str, name: str, number: int) -> Layer:
    """Layer `number` of random matrices in a type; the output matrix alone for "output"."""
    width, inner, queries, keys, vocabulary = MODELS[model]
    if name == "output":
        return {"output": PackedWeight((random_part("Q6_K", vocabulary, width),))}
    mixed = name == "Q4_K_M"
    base, rich = ("Q4_K", ("Q6_K", "Q4_K")[number % 2]) if mixed else (name, name)

    def weight(parts: Iterable[tuple[str, int]], cols: int, paired: bool = False) -> PackedWeight:
        return PackedWeight(tuple(random_part(of, rows, cols) for of, rows in parts), paired)

    qkv = [(base, queries + 2 * keys)] if rich == base else [(base, queries + keys), (rich, keys)]
    return {
        "qkv": weight(qkv, width),
        "o": weight([(base, width)], queries),
        "gate_up": weight([(base, 2 * inner)], width, paired=True),
        "down": weight([(rich, width)], inner),
    }


def calls_of(model: str, layer: Layer, pdl: bool) -> Calls:
    """The launches of a layer, or of the output matrix."""
    if "output" not in layer:
        post_norms = model in POST_NORMS
        return layer_calls(layer, pdl, None, post_norms, "gelu_tanh" if post_norms else "silu")
    x = quantize_activations(torch.randn(1, MODELS[model][0], device="cuda"))
    return {"output": lambda w: matvec(x, w["output"], pdl=pdl)}


def keys_of(layers: list[Layer]) -> dict[str, tuple[str, PackedWeight]]:
    """Keys of the launch table in some layers, with the matrix, its name first."""
    return {
        launch_table.matvec_key([p for p in weight.parts if isinstance(p, PackedPart)], KINDS[matrix]): (
            matrix,
            weight,
        )
        for layer in layers
        for matrix, weight in layer.items()
    }


def geometries(matrix: str, weight: PackedWeight) -> Iterator[Candidate]:
    chunks = min(part.chunks for part in weight.parts if isinstance(part, PackedPart))
    return (g for g in CANDIDATES[matrix] if g[1] <= chunks)


def layers_time(layers: list[Layer], calls: Calls) -> float:
    """Microseconds of the mean layer's launches in the step's order."""
    launches = [lambda w=layer, c=call: c(w) for layer in layers for call in calls.values()]
    return min(graph_time(launches) for _ in range(2)) / len(layers)


def measure(title: str, layers: list[Layer], calls: Calls) -> None:
    """Print a line: each matrix alone, then the layer; means over the layers."""
    figures = []
    for matrix, call in calls.items():
        time = graph_time([lambda w=layer, c=call: c(w) for layer in layers]) / len(layers)
        figures.append((matrix, sum(layer[matrix].nbytes for layer in layers) / len(layers), time))
    figures.append(("layer", sum(nbytes for _, nbytes, _ in figures), layers_time(layers, calls)))
    rate = COPY_BYTES_PER_SECOND / 1e6
    columns = (f"{m} {time:6.2f} us {100 * nbytes / rate / time:3.0f}%" for m, nbytes, time in figures)
    print(f"{title:17s} {figures[-1][1] / 1e6:6.1f} MB  " + "  ".join(columns), flush=True)


def tune(layers: list[Layer], calls: Calls, entries: Entries, only: str) -> None:
    """Choose a geometry for each matrix by the time of the layers; no entry where the default is the fastest."""
    for key, (matrix, weight) in keys_of(layers).items():
        if key in entries or only not in matrix:
            continue
        default = layers_time(layers, calls)
        results = []
        for geometry in geometries(matrix, weight):
            entries[key] = list(geometry)
            results.append((layers_time(layers, calls), geometry))
            del entries[key]
        results.sort()
        if results and results[0][0] < default:
            entries[key] = list(results[0][1])
        listed = ", ".join(f"{t:.2f} {'/'.join(str(int(v)) for v in g)}" for t, g in results[:5])
        print(f"  {key}: default {default:.2f}; {listed}", flush=True)


def compile_share(jobs: list[tuple[str, str]], share: int, tuned: str | None, entries: Entries) -> None:
    """Launch one of WORKERS shares of the variants once. tuned: of which matrices, part of the name."""
    variants = []
    for model, name in jobs:
        layers = [layer_of(model, name, number) for number in range(2)]
        for key, (matrix, weight) in keys_of(layers).items():
            layer = next(layer for layer in layers if layer[matrix] is weight)
            sought = tuned is not None and tuned in matrix and key not in entries
            tried = geometries(matrix, weight) if sought else ()
            variants += [(model, layer, key, matrix, geometry) for geometry in (None, *tried)]
    first, last = (place * len(variants) // WORKERS for place in (share, share + 1))
    for model, layer, key, matrix, geometry in variants[first:last]:
        calls = calls_of(model, layer, torch.cuda.get_device_capability() >= (9, 0))
        if geometry is not None:
            entries[key] = list(geometry)
        calls[matrix](layer)
        if geometry is not None:
            del entries[key]
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="MODEL/TYPE", help="of " + ", ".join(MODELS))
    parser.add_argument("--tune", nargs="?", const="", metavar="MATRIX", help="one matrix, or all")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    listed = arguments.jobs or [f"mistral-7b/{name}" for name in PACKED_FORMATS]
    jobs = [(model, name) for model, _, name in (job.partition("/") for job in listed)]
    table = launch_table._table()
    entries = table.setdefault(launch_table.table_key(), {}).setdefault("matvec", {})
    if arguments.compile is not None:
        compile_share(jobs, arguments.compile, arguments.tune, entries)
        return
    flags = [*listed, *([] if arguments.tune is None else [f"--tune={arguments.tune}"])]
    compile_ahead("cuda.matvec_types", flags, [str(i) for i in range(WORKERS)])
    for title, (model, name) in zip(listed, jobs, strict=True):
        first = layer_of(model, name, 0)
        count = 2 * copies_past_l2(2 * sum(weight.nbytes for weight in first.values()))
        layers = [first, *(layer_of(model, name, number) for number in range(1, count))]
        calls = calls_of(model, first, torch.cuda.get_device_capability() >= (9, 0))
        measure(title, layers, calls)
        if arguments.tune is not None:
            tune(layers, calls, entries, arguments.tune)
            measure(title, layers, calls)
            print(
                f"  {json.dumps({key: entries[key] for key in keys_of(layers) if key in entries})}",
                flush=True,
            )
        del layers, first
    if arguments.write:
        path = Path(launch_table.__file__).with_name("launch_table.json")
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
