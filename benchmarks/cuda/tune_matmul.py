"""Find the geometry of the matmul of 2 to 128 rows on a Hopper GPU and keep it in kernels/cuda/launch_table.json.

    python -m benchmarks.cuda.tune_matmul [-o OUT.json] [--only TEXT] [--keep-splits] [--json TIMES.json]

One number of shares of the columns for each shape, so that a row has the same sums at every number of rows up to 64
(and, where kernels are batch-invariant, at all): the one whose best times, summed over the numbers of rows, are least.
Weights are rotated so that the L2 cache does not serve them; times are per launch in a CUDA graph with dependent
launch. Variants are compiled by several processes first.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.cuda.cuda_timing import compile_ahead, graph_time, matmul_launch, random_weights
from quengine.kernels.cuda.gemm.fp16_operand import to_fp16_operand
from quengine.kernels.cuda.gemm.matmul_fused import SplitScratch
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry
from quengine.kernels.cuda.weights.packed import PackedWeight

# Mistral-7B: merged QKV (attn_v is Q6_K in half of the layers), attn_output, ffn_gate + ffn_up, ffn_down, output. The
# kind is the table's; "added" stands for "rows" with a residual.
SHAPES = (
    ("rows", "Q4_K", 6144, 4096),
    ("rows", "Q4_K", 5120, 4096),
    ("rows", "Q6_K", 1024, 4096),
    ("added", "Q4_K", 4096, 4096),
    ("swiglu", "Q4_K", 28672, 4096),
    ("added", "Q4_K", 4096, 14336),
    ("added", "Q6_K", 4096, 14336),
    ("rows", "Q6_K", 32000, 4096),
)
BLOCKS = (8, 16, 32, 64, 128)
Shape = tuple[str, str, int, int]


def shares(shape: Shape, keep: bool) -> tuple[int, ...]:
    """What is tried for `splits`: what the table has, or enough programs for the machine, two chunks for each."""
    _, _, rows, cols = shape
    entry = launch_table.wgmma_entry(launch_table.table_key(), key_of(shape))
    if keep and entry is not None:
        return (int(entry["splits"]),)
    return tuple(n for n in (1, 2, 4, 8) if n * rows >= 12288 and n <= max(1, cols // 512)) or (8,)


_TRIED = {
    8: [(4, 2, True, 0, 256), (4, 3, True, 0, 256), (4, 3, False, 0, 256), (4, 2, False, 128, 256)],
    16: [(4, 2, True, 0, 256), (4, 3, True, 0, 256), (4, 3, False, 0, 256), (4, 2, False, 128, 256)],
    32: [(4, 3, False, 0, 256), (4, 2, False, 128, 256), (4, 4, False, 128, 128), (4, 4, True, 0, 128)],
    64: [
        (4, 2, False, 128, 128),
        (4, 3, False, 128, 128),
        (4, 4, True, 0, 128),
        (4, 4, False, 128, 128),
        (8, 3, False, 128, 256),
    ],
    128: [(4, 3, True, 0, 128), (4, 3, False, 0, 128), (8, 3, True, 0, 128), (8, 3, True, 0, 256)],
}
"""Warps, stages, overlap, registers, columns. Every instruction that a set of columns costs beside dequantizing shows
in a launch, so sets are large where there is room; from 32 rows on 16 warps on a multiprocessor, few registers each."""


def geometries(shape: Shape, block: int, keep: bool) -> Iterator[WgmmaGeometry]:
    wide = [(8, 2, False, 128, 256), (8, 2, True, 0, 256)] if block <= 64 else []
    for splits, tried in product(shares(shape, keep), [*_TRIED[block], *wide]):
        warps, *rest = tried
        yield WgmmaGeometry(warps, splits, *rest)


def key_of(shape: Shape) -> str:
    kind, name, rows, cols = shape
    return f"{'rows' if kind == 'added' else kind} {name} {rows} x {cols}"


def launcher(shape: Shape, weight: PackedWeight, block: int, scratch: SplitScratch) -> Callable[[], None]:
    kind, _, _, cols = shape
    x = to_fp16_operand(torch.randn(block, cols, device="cuda")).as_wgmma()
    return matmul_launch(kind, weight, x, scratch)[0]


def measure(
    shape: Shape, keep: bool, compile_only: tuple[int, int] | None
) -> list[tuple[int, float, WgmmaGeometry]]:
    """(block, microseconds, geometry) of every variant; with compile_only (i, n), every n-th is launched once."""
    kind, name, rows, cols = shape
    paired = kind == "swiglu"
    weights = random_weights([(name, rows)], cols, paired, 1 if compile_only else None)
    scratch, results = SplitScratch("cuda"), []
    variants = [(block, geometry) for block in BLOCKS for geometry in geometries(shape, block, keep)]
    for number, (block, geometry) in enumerate(variants):
        if compile_only and number % compile_only[1] != compile_only[0]:
            continue
        with patch("quengine.kernels.cuda.gemm.matmul_wgmma.wgmma_geometry", lambda *_, g=geometry: g):
            launches = [launcher(shape, weight, block, scratch) for weight in weights]
            if compile_only:
                launches[0]()
            else:
                results.append((block, graph_time(launches) / len(launches), geometry))
    return results


def choose(results: list[tuple[int, float, WgmmaGeometry]]) -> dict[str, object]:
    """The table's entry for a shape."""

    def best(block: int, splits: int) -> tuple[float, WgmmaGeometry]:
        found = [(us, g) for b, us, g in results if b == block and g.splits == splits]
        return min(found, key=lambda result: result[0])

    tried = sorted({geometry.splits for _, _, geometry in results})
    splits = min(tried, key=lambda n: sum(best(block, n)[0] for block in BLOCKS))
    entry: dict[str, object] = {"splits": splits}
    for block in BLOCKS:
        geometry = best(block, splits)[1]
        entry[str(block)] = [
            geometry.warps, geometry.stages, geometry.overlap, geometry.registers, geometry.columns
        ]  # fmt: skip
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path(launch_table.__file__).with_name("launch_table.json")
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--keep-splits", action="store_true", help="the numbers of shares that the table has")
    parser.add_argument("--compile", default="")
    arguments = parser.parse_args()
    shapes = [shape for shape in SHAPES if arguments.only in key_of(shape)]
    if arguments.compile:
        part, parts = map(int, arguments.compile.split("/"))
        for shape in shapes:
            measure(shape, arguments.keep_splits, (part, parts))
        return
    given = ["--only", arguments.only, *(["--keep-splits"] if arguments.keep_splits else [])]
    compile_ahead("cuda.tune_matmul", given, [f"{i}/{arguments.workers}" for i in range(arguments.workers)])
    table = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    entries = table.setdefault(launch_table.table_key(), {}).setdefault("wgmma", {})
    times = []
    for shape in shapes:
        results = measure(shape, arguments.keep_splits, None)
        entries[key_of(shape)] = choose(results)
        for block, us, g in sorted(results, key=lambda result: result[:2]):
            times.append({"shape": key_of(shape), "rows": block, "us": us, "geometry": vars(g)})
        print(key_of(shape), entries[key_of(shape)], flush=True)
    arguments.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(times, indent=0) + "\n")


if __name__ == "__main__":
    main()
