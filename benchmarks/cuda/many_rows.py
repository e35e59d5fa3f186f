"""Times of the matmul of more than 128 rows on a Hopper GPU: what the table takes, two warp groups that take turns,
and blocks whose columns several programs share.

    python -m benchmarks.cuda.many_rows [--only TEXT] [--hot]

Microseconds of a launch in a CUDA graph with dependent launch, and how the result compares with the table's: `=` for
the same bits, else the relative error. `--hot`: after a second of the same launches, with the clock and the power that
nvidia-smi then reports. Kernels are compiled by several processes first.
"""

import argparse
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch

from benchmarks.cuda.cuda_timing import compile_ahead, graph_time, matmul_launch, random_weights
from quengine.kernels.cuda.gemm.fp16_operand import to_fp16_operand
from quengine.kernels.cuda.gemm.matmul_fused import SplitScratch
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry

# Mistral-7B, Llama-3-70B and Llama-3.2-1B: kind ("added": rows with a residual), type, rows and columns of the weight,
# rows of x.
_ALL = (192, 256, 384, 512, 768, 1024, 2048)
SHAPES = (
    ("qkv", "rows", "Q4_K", 6144, 4096, _ALL),
    ("o", "added", "Q4_K", 4096, 4096, _ALL),
    ("gate+up", "swiglu", "Q4_K", 28672, 4096, _ALL),
    ("down", "added", "Q4_K", 4096, 14336, _ALL),
    ("down", "added", "Q6_K", 4096, 14336, _ALL),
    ("70B qkv", "rows", "Q4_K", 10240, 8192, (256, 512, 2048)),
    ("70B o", "added", "Q4_K", 8192, 8192, (256, 512, 2048)),
    ("70B gate+up", "swiglu", "Q4_K", 57344, 8192, (256, 512, 2048)),
    ("70B down", "added", "Q4_K", 8192, 28672, (256, 512, 2048)),
    ("1B qkv", "rows", "Q4_K", 3072, 2048, (256, 512, 2048)),
    ("1B gate+up", "swiglu", "Q4_K", 16384, 2048, (256, 512, 2048)),
    ("1B down", "added", "Q6_K", 2048, 8192, (256, 512, 2048)),
)
Shape = tuple[str, str, str, int, int, tuple[int, ...]]
_MULTIPROCESSORS = 132
PROGRAMS = {
    "8x256": WgmmaGeometry(8, 1, 3, block=256),
    "groups": WgmmaGeometry(8, 1, 3, block=256, groups=True),
    "8x128": WgmmaGeometry(8, 1, 3, block=128),
    "4x128": WgmmaGeometry(4, 1, 3, block=128),
}


def variants(rows: int, tokens: int) -> Iterator[tuple[str, WgmmaGeometry | None]]:
    """The table's choice (None), and others by name, for weights of so many rows."""
    yield "table", None
    for name, program in PROGRAMS.items():
        places = _MULTIPROCESSORS * (2 if program.warps == 4 else 1)
        blocks = -(-rows // (16 * program.warps)) * -(-tokens // program.block)
        yield name, replace(program, whole=blocks)
        whole = blocks // places * places
        for splits in (2, 3, 4):
            if 0 < (blocks - whole) * splits <= 2.2 * places:
                yield f"{name}/{splits}", replace(program, whole=whole, splits=splits)


def chosen(geometry: WgmmaGeometry | None) -> AbstractContextManager[object]:
    """Within it, launches have this geometry."""
    if geometry is None:
        return nullcontext()
    return patch("quengine.kernels.cuda.gemm.matmul_wgmma.wgmma_geometry", lambda *_: geometry)


def compile_kernels(shapes: Sequence[Shape], share: int, shares: int) -> None:
    """Launch, once, every `shares`-th of the kernels that `measure` takes."""
    scratch, seen, number = SplitScratch("cuda"), set[tuple[object, ...]](), 0
    for shape in shapes:
        _, kind, kept, rows, cols, tokens = shape
        weight = random_weights([(kept, rows)], cols, kind == "swiglu", 1)[0]
        for count in tokens:
            x = to_fp16_operand(torch.randn(count, cols, device="cuda")).as_wgmma()
            for label, geometry in variants(rows, count):
                key = (shape, label.split("/")[0] if geometry else count)
                if key in seen:
                    continue
                seen.add(key)
                number += 1
                if number % shares == share:
                    with chosen(geometry):
                        matmul_launch(kind, weight, x, scratch)[0]()


def measure(shape: Shape) -> None:
    """Print the times of a shape."""
    name, kind, kept, rows, cols, tokens = shape
    weights = random_weights([(kept, rows)], cols, kind == "swiglu")
    scratch = SplitScratch("cuda")
    for count in tokens:
        x = to_fp16_operand(torch.randn(count, cols, device="cuda")).as_wgmma()
        line, expected = [], None
        for label, geometry in variants(rows, count):
            with chosen(geometry):
                launches = [matmul_launch(kind, weight, x, scratch) for weight in weights]
                us = graph_time([launch for launch, _ in launches]) / len(launches)
            y = launches[0][1].float()
            expected = y if expected is None else expected
            off = (
                "=" if torch.equal(y, expected) else f"~{float((y - expected).norm() / expected.norm()):.0e}"
            )
            line.append(f"{label} {us:.1f}{off}")
        print(f"{name} {kept} {rows} x {cols} by {count}: {'  '.join(line)}", flush=True)


def measure_hot(shape: Shape, seconds: float = 1.2) -> None:
    """Print the rate under a second of the same launches, in turns."""
    name, kind, kept, rows, cols, tokens = shape
    weight = random_weights([(kept, rows)], cols, kind == "swiglu", 1)[0]
    x = to_fp16_operand(torch.randn(tokens[-1], cols, device="cuda")).as_wgmma()
    scratch, operations = SplitScratch("cuda"), 2 * rows * cols * tokens[-1]
    whole = {label: geometry for label, geometry in variants(rows, tokens[-1]) if "/" not in label}
    for label, geometry in 2 * list(whole.items()):
        with chosen(geometry):
            launch, _ = matmul_launch(kind, weight, x, scratch)
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            count = int(seconds * 600e12 / operations)
            for number in range(2 * count):
                if number == count:
                    began.record()
                launch()
            ended.record()
            query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
            state = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
            ended.synchronize()
        us = began.elapsed_time(ended) * 1000 / count
        print(
            f"hot {name} by {tokens[-1]}: {label} {us:.1f} us, {operations / us / 1e6:.0f} TFLOP/s, {state[:1]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--hot", action="store_true")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--compile", default="")
    arguments = parser.parse_args()
    shapes = [shape for shape in SHAPES if arguments.only in f"{shape[0]} {shape[2]}"]
    if arguments.compile:
        share, number = map(int, arguments.compile.split("/"))
        compile_kernels(shapes, share, number)
        return
    shares = [f"{i}/{arguments.workers}" for i in range(arguments.workers)]
    compile_ahead("cuda.many_rows", ["--only", arguments.only], shares)
    for shape in shapes:
        if arguments.hot:
            measure_hot(shape)
        else:
            measure(shape)


if __name__ == "__main__":
    main()
