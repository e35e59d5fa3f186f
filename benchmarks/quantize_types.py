"""Every type that `engine quantize` writes against ggml's quantizers: a table of errors, bytes and times.

    python -m benchmarks.quantize_types                      # 262,144 weights in one thread, and a GPU if there is one
    python -m benchmarks.quantize_types --types IQ2_XS,Q4_K --rows 1024 --on cpu
    python -m benchmarks.quantize_types --on gpu             # ours alone, in seconds for 8 billion weights

Weights are normal, their importances log-normal. An error is the weighted sum of squares that ggml's search makes
small, relative to ggml's; "=": the same bytes. Times are processor time, medians of turns of ours and ggml's. ggml is
the library inside xllamacpp; the time that it takes to make its tables of neighbours is not counted.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quantize.quantize import PLAIN, WRITTEN, quantize
from quengine.models.quantize.quantizer import quantizers_on
from tests.kernels.quantize.test_quantize import Floats, ggml_weights, squares
from tests.llama_cpp_quantize import ggml_quantize

NEEDS_IMPORTANCE = ("IQ1_S", "IQ2_XXS", "IQ2_XS")
COLUMNS = 1024
GPU_ROWS = 32768
EIGHT_BILLION = 8.03e9
HEAD = """| type | error | with an imatrix | ns, ours / ggml | with an imatrix | s on the GPU |
|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Sample:
    """Rows and the importances of their columns."""

    rows: Floats
    importance: Floats

    @classmethod
    def drawn(cls, count: int) -> "Sample":
        rng = np.random.default_rng(1)
        values = rng.standard_normal((count, COLUMNS), np.float32) * 0.02
        importance = np.exp(rng.standard_normal(COLUMNS)).astype(np.float32)
        return cls(values.astype(np.float16).astype(np.float32), importance)


def nanoseconds(work: Callable[[], object], weights: int) -> float:
    """Processor time of a weight."""
    start = time.process_time()
    work()
    return (time.process_time() - start) / weights * 1e9


def against_ggml(name: str, sample: Sample, weighted: bool, turns: int) -> tuple[str, str]:
    """The error, and the times of both."""
    rows, importance = sample.rows, sample.importance if weighted else None
    given = None if importance is None else torch.from_numpy(importance)
    tensor = torch.from_numpy(rows)
    quantizers = quantizers_on(tensor.device)

    def ours() -> torch.Tensor:
        return quantize(FORMATS[name], tensor, given, quantizers)

    def theirs() -> Floats:
        return ggml_quantize(name, rows, importance)

    ggml_quantize(name, rows[:1], importance)  # makes its tables
    mine, blocks = ours().numpy(), theirs()
    times = [(nanoseconds(ours, rows.size), nanoseconds(theirs, rows.size)) for _ in range(turns)]
    own, other = (median(each) for each in zip(*times, strict=True))
    weights = ggml_weights(name, rows, importance)
    errors = [float((squares(name, each, rows) * weights).sum()) for each in (mine, blocks)]
    error = "=" if np.array_equal(mine, blocks) else f"{errors[0] / errors[1]:.3f}"
    return error, f"{own:.{0 if own >= 10 else 1}f}/{other:.{0 if other >= 10 else 1}f}"


def on_gpu(name: str, sample: Sample) -> str:
    """Seconds of 8 billion weights with an imatrix."""
    tensor, given = (torch.from_numpy(each).cuda() for each in (sample.rows, sample.importance))
    quantizers = quantizers_on(tensor.device)
    quantize(FORMATS[name], tensor, given, quantizers)
    torch.cuda.synchronize()
    start = time.perf_counter()
    quantize(FORMATS[name], tensor, given, quantizers)
    torch.cuda.synchronize()
    return f"{(time.perf_counter() - start) / tensor.numel() * EIGHT_BILLION:.1f}"


def row(name: str, samples: dict[str, Sample], turns: int) -> str:
    cells = [""] * 5
    if "cpu" in samples:
        if name not in NEEDS_IMPORTANCE:
            cells[0], cells[2] = against_ggml(name, samples["cpu"], False, turns)
        if name not in PLAIN:  # which no importance changes
            cells[1], cells[3] = against_ggml(name, samples["cpu"], True, turns)
    if "gpu" in samples:
        cells[4] = on_gpu(name, samples["gpu"])
    return " | ".join(("| " + name, *cells)).replace("|  ", "| ") + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=",".join(name for name in WRITTEN if FORMATS[name].is_quantized))
    parser.add_argument("--rows", type=int, default=256, help=f"of {COLUMNS} weights, on the CPU (256)")
    parser.add_argument("--turns", type=int, default=5, help="of both, on the CPU (5)")
    parser.add_argument("--on", default="cpu,gpu" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = {"cpu": args.rows, "gpu": GPU_ROWS}
    samples = {place: Sample.drawn(counts[place]) for place in args.on.split(",")}
    print(HEAD, flush=True)
    for name in args.types.split(","):
        print(row(name, samples, args.turns), flush=True)


if __name__ == "__main__":
    main()
