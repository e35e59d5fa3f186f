"""RMSNorm against torch, torch.compile and liger-kernel, and against the speed of a copy.

    python -m benchmarks.cuda.rms_norm [--dtype float16] [--json FILE] [--sweep]

A call is timed inside a CUDA graph of 24 calls on rotating buffers. `--sweep` times launch shapes instead.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import quengine.kernels.cuda.rms_norm as ours
from benchmarks.cuda.cuda_timing import COPY_BYTES_PER_SECOND, launch_time

ROWS = (1, 10, 100, 200, 2048, 65536)
WIDTHS = (576, 4096, 8192)
CALLS = 24
EPS = 1e-5


def buffers(rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs that together exceed the cache where the shape allows it."""
    count = max(2, min(CALLS, 2**28 // (rows * width * dtype.itemsize)))
    return [torch.randn(rows, width, device="cuda").to(dtype) for _ in range(count)]


def candidates(
    width: int, weight: torch.Tensor, compiled: bool
) -> dict[str, Callable[[torch.Tensor], object]]:
    """Name -> function of x, each allocating its own result."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (width,), weight, EPS)

    found: dict[str, Callable[[torch.Tensor], object]] = {
        "quengine": lambda x: ours.rms_norm(x, weight, EPS),
        "torch": plain,
    }
    if compiled:
        found["compile"] = torch.compile(plain, dynamic=False)
    try:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        found["liger"] = lambda x: rms_norm_forward(x, weight, EPS, 0.0, "llama", None)
    except ImportError:
        print("liger-kernel is not installed: its column is missing")
    return found


def time_calls(function: Callable[[torch.Tensor], object], inputs: list[torch.Tensor]) -> float:
    calls = min(CALLS, max(4, 2**32 // inputs[0].nbytes // 2))
    return launch_time([partial(function, inputs[i % len(inputs)]) for i in range(calls)])


def compare(dtype: torch.dtype, compiled: bool) -> list[dict[str, float]]:
    results = []
    for width, rows in itertools.product(WIDTHS, ROWS):
        weight = torch.rand(width, device="cuda", dtype=dtype) + 0.5
        inputs = buffers(rows, width, dtype)
        torch._dynamo.reset()
        row: dict[str, float] = {"rows": rows, "width": width}
        for name, function in candidates(width, weight, compiled).items():
            row[name] = round(time_calls(function, inputs), 2)
        row["floor"] = round(2 * inputs[0].nbytes / COPY_BYTES_PER_SECOND * 1e6, 2)
        results.append(row)
        print(" ".join(f"{key}={value:g}" for key, value in row.items()), flush=True)
    return results


def sweep(dtype: torch.dtype) -> list[dict[str, float]]:
    """The three best launch shapes of each case."""
    results = []
    original = ours.geometry
    for width, rows in itertools.product(WIDTHS, ROWS):
        weight = torch.rand(width, device="cuda", dtype=dtype) + 0.5
        inputs = buffers(rows, width, dtype)
        base = original(rows, width)
        timed = []
        for block_rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
            per_thread = block_rows * width / (32 * warps)
            if not 4 <= per_thread <= 64 or (block_rows > 1 and rows < 2048):
                continue
            shape = ours.Geometry(block_rows, base.head, base.tail, warps)
            ours.geometry = lambda *_, shape=shape: shape  # type: ignore[assignment]
            timed.append(
                (time_calls(lambda x, w=weight: ours.rms_norm(x, w, EPS), inputs), block_rows, warps)
            )
        ours.geometry = original  # type: ignore[assignment]
        for us, block_rows, warps in sorted(timed)[:3]:
            results.append({"rows": rows, "width": width, "us": us, "block_rows": block_rows, "warps": warps})
        chosen = [f"{us:.2f} ({block_rows}, {warps})" for us, block_rows, warps in sorted(timed)[:3]]
        now = [f"{t[0]:.2f}" for t in timed if t[1:] == (base.block_rows, base.warps)]
        print(rows, width, "best", *chosen, "now", base.block_rows, base.warps, *now, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    results = sweep(dtype) if args.sweep else compare(dtype, not args.no_compile)
    report = {"device": torch.cuda.get_device_name(), "dtype": args.dtype, "unit": "us", "results": results}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"benchmark": "rms_norm", "cases": len(results)}))


if __name__ == "__main__":
    main()
