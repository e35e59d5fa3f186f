"""Every type that `engine quantize` writes against ggml's quantizers: errors, bytes and processor time of a weight.

    python -m benchmarks.quantize_types                      # 262,144 weights with an imatrix, in one thread
    python -m benchmarks.quantize_types --types IQ2_XS,Q4_K --plain --rows 1024
    python -m benchmarks.quantize_types --device cuda        # ours alone, in seconds for 8 billion weights

Weights are normal, their importances log-normal. An error is the weighted sum of squares that ggml's search makes
small. ggml is the library inside xllamacpp; the time that it takes to make its tables of neighbours is not counted.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quantize.quantize import WRITTEN, quantize
from quengine.models.quantize.quantizer import quantizers_on
from tests.kernels.quantize.test_quantize import Floats, ggml_weights, squares
from tests.llama_cpp_quantize import ggml_quantize

NEEDS_IMPORTANCE = ("IQ1_S", "IQ2_XXS", "IQ2_XS")
COLUMNS = 1024
EIGHT_BILLION = 8.03e9


def nanoseconds(work: Callable[[], np.ndarray], weights: int) -> tuple[np.ndarray, float]:
    start = time.process_time()
    result = work()
    return result, (time.process_time() - start) / weights * 1e9


def against_ggml(name: str, rows: Floats, importance: Floats | None) -> str:
    given = None if importance is None else torch.from_numpy(importance)
    fmt, tensor = FORMATS[name], torch.from_numpy(rows)
    quantize(fmt, tensor[:1], given, quantizers_on(tensor.device))
    ggml_quantize(name, rows[:1], importance)
    mine, ours = nanoseconds(
        lambda: quantize(fmt, tensor, given, quantizers_on(tensor.device)).numpy(), rows.size
    )
    blocks, theirs = nanoseconds(lambda: ggml_quantize(name, rows, importance), rows.size)
    weights = ggml_weights(name, rows, importance)
    errors = [float((squares(name, each, rows) * weights).sum()) for each in (mine, blocks)]
    error = "same bytes" if np.array_equal(mine, blocks) else f"{errors[0] / errors[1]:.3f}"
    return f"{error:>10}  {ours:6.0f} ns, ggml {theirs:6.0f} ns"


def on_gpu(name: str, rows: Floats, importance: Floats | None) -> str:
    tensor = torch.from_numpy(rows).cuda()
    given = None if importance is None else torch.from_numpy(importance).cuda()
    quantizers = quantizers_on(tensor.device)
    quantize(FORMATS[name], tensor, given, quantizers)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    quantizers = quantizers_on(tensor.device)
    quantize(FORMATS[name], tensor, given, quantizers)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated() / 1e9
    return f"{seconds / rows.size * EIGHT_BILLION:7.1f} s for 8.03e9 weights, {memory:.2f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=",".join(name for name in WRITTEN if FORMATS[name].is_quantized))
    parser.add_argument("--rows", type=int, help=f"of {COLUMNS} weights; default 256, on a GPU 65536")
    parser.add_argument("--plain", action="store_true", help="without an imatrix")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    count = args.rows or (256 if args.device == "cpu" else 65536)
    rows = (rng.standard_normal((count, COLUMNS), np.float32) * 0.02).astype(np.float16).astype(np.float32)
    importance = np.exp(rng.standard_normal(COLUMNS)).astype(np.float32)
    for name in args.types.split(","):
        if args.plain and name in NEEDS_IMPORTANCE:
            continue
        measure = against_ggml if args.device == "cpu" else on_gpu
        print(f"{name:8}{measure(name, rows, None if args.plain else importance)}", flush=True)


if __name__ == "__main__":
    main()
