"""LayerNorm against torch, and against the speed of a copy: 1 to 200 rows, where latency decides, and many.

    python -m benchmarks.cuda.layer_norm [--dtype float16] [--no-bias] [--json FILE]

A call is timed inside a CUDA graph of 24 calls on rotating buffers, both sides allocating their results. The last line
says at how many of the cases of up to 200 rows torch was faster.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch

from benchmarks.cuda.cuda_timing import COPY_BYTES_PER_SECOND
from benchmarks.cuda.rms_norm import buffers, time_calls
from quengine.kernels.cuda.layer_norm import layer_norm
from quengine.kernels.layer_norm import LayerNorm

ROWS = (1, 10, 50, 100, 200, 2048, 16384)
WIDTHS = (384, 768, 1024, 4096, 8192)
FEW = 200
EPS = 1e-5


def compare(dtype: torch.dtype, has_bias: bool) -> list[dict[str, float]]:
    results = []
    for width, rows in itertools.product(WIDTHS, ROWS):
        weight = torch.rand(width, device="cuda", dtype=dtype) + 0.5
        bias = torch.rand(width, device="cuda", dtype=dtype) if has_bias else None
        norm, inputs = LayerNorm(weight, bias, EPS), buffers(rows, width, dtype)

        def theirs(x: torch.Tensor, w: torch.Tensor = weight, b: torch.Tensor | None = bias) -> torch.Tensor:
            return torch.nn.functional.layer_norm(x, w.shape, w, b, EPS)

        row: dict[str, float] = {
            "rows": rows,
            "width": width,
            "quengine": round(time_calls(lambda x, n=norm: layer_norm(x, n), inputs), 2),
            "torch": round(time_calls(theirs, inputs), 2),
            "floor": round(2 * inputs[0].nbytes / COPY_BYTES_PER_SECOND * 1e6, 2),
        }
        results.append(row)
        print(" ".join(f"{key}={value:g}" for key, value in row.items()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--no-bias", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = compare(getattr(torch, args.dtype), not args.no_bias)
    report = {"device": torch.cuda.get_device_name(), "dtype": args.dtype, "unit": "us", "results": results}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    few = [row for row in results if row["rows"] <= FEW]
    slower = sum(row["quengine"] > row["torch"] for row in few)
    print(json.dumps({"benchmark": "layer_norm", "cases of few rows": len(few), "slower than torch": slower}))


if __name__ == "__main__":
    main()
