"""A matmul with the residual and the norm that follow it, where programs share the columns: partial sums added by the
program of a block that arrives last, or by the norm.

    python -m benchmarks.cuda.matmul_norm [--rows 8,16,32,64,128] [--only TEXT] [--exact]

Microseconds of both launches, the ways in turns, in a CUDA graph of dependent launches on weights that the L2 cache
does not hold. `=`: the sums and the normalised rows have the same bits both ways. Kernels are compiled by several
processes first.
"""

import argparse
import json
import statistics
from contextlib import nullcontext
from unittest.mock import patch

import torch

from benchmarks.cuda.cuda_timing import compile_ahead, graph_time, random_weights
from quengine.kernels.cuda.gemm.fp16_operand import to_fp16_operand
from quengine.kernels.cuda.gemm.matmul import matmul_norm
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.weights.packed import PackedWeight
from quengine.kernels.rms_norm import RMSNorm

SHAPES = {
    "o": ("Q4_K", 4096, 4096),
    "down Q4_K": ("Q4_K", 4096, 14336),
    "down Q6_K": ("Q6_K", 4096, 14336),
}
ROUNDS = 3


def last_program():  # type: ignore[no-untyped-def]
    """Within it, the program that arrives last adds a block's partial sums."""
    return patch("quengine.kernels.cuda.gemm.matmul._rows_of_splits", lambda *_: None)


def measure(name: str, rows: int, weights: list[PackedWeight], exact: bool) -> dict[str, object]:
    _, width, cols = SHAPES[name]
    room = MatmulWorkspace(1 << 26, "cuda")
    x = to_fp16_operand(torch.randn(rows, cols, device="cuda")).as_wgmma()
    norm, residual = RMSNorm(torch.ones(width, device="cuda"), 1e-5), torch.randn(rows, width, device="cuda")
    ways, times, bits = {"last": last_program, "norm": nullcontext}, dict[str, list[float]](), []
    for way in ways.values():
        with way():
            hidden, normed = matmul_norm(x, weights[0], room, residual.clone(), norm, True, exact)
            bits.append((hidden.clone(), normed.dequantize()))
    same = all(torch.equal(a, b) for a, b in zip(*bits, strict=True))
    for _ in range(ROUNDS):
        for label, way in ways.items():
            with way():
                launches = [lambda w=w: matmul_norm(x, w, room, residual, norm, True, exact) for w in weights]
                times.setdefault(label, []).append(graph_time(launches * 2) / len(launches) / 2)
    last, after = (statistics.median(times[label]) for label in ways)
    print(
        f"{name:10} {rows:5} rows{' exact' if exact else '      '}: last program {last:6.1f}, norm {after:6.1f} us "
        f"({last - after:+.1f}) {'=' if same else 'other bits'}",
        flush=True,
    )
    return {"shape": name, "rows": rows, "exact": exact, "last": last, "norm": after, "same": same}


def compile_kernels(names: list[str], rows: list[int], exact: bool, share: int, shares: int) -> None:
    """Launch, once, every `shares`-th of the kernels that `measure` takes."""
    cases = [(name, count, way) for name in names for count in rows for way in (last_program, nullcontext)]
    for name, count, way in cases[share::shares]:
        kept, width, cols = SHAPES[name]
        weight = random_weights([(kept, width)], cols, copies=1)[0]
        x = to_fp16_operand(torch.randn(count, cols, device="cuda")).as_wgmma()
        norm, residual = (
            RMSNorm(torch.ones(width, device="cuda"), 1e-5),
            torch.randn(count, width, device="cuda"),
        )
        with way():
            matmul_norm(x, weight, MatmulWorkspace(1 << 26, "cuda"), residual, norm, True, exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="8,16,32,64,128")
    parser.add_argument("--only", default="")
    parser.add_argument("--exact", action="store_true", help="weights are rounded once, as in prompts")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--compile", default="")
    arguments = parser.parse_args()
    names = [name for name in SHAPES if arguments.only in name]
    rows = [int(count) for count in arguments.rows.split(",")]
    if arguments.compile:
        share, shares = map(int, arguments.compile.split("/"))
        compile_kernels(names, rows, arguments.exact, share, shares)
        return
    given = ["--rows", arguments.rows, "--only", arguments.only, *(["--exact"] if arguments.exact else [])]
    compile_ahead("cuda.matmul_norm", given, [f"{i}/{arguments.workers}" for i in range(arguments.workers)])
    results = []
    for name in names:
        kept, width, cols = SHAPES[name]
        weights = random_weights([(kept, width)], cols)
        results += [measure(name, count, weights, arguments.exact) for count in rows]
    print(json.dumps({"benchmark": "matmul_norm", "results": results}))


if __name__ == "__main__":
    main()
