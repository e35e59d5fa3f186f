"""Dense matmuls of a 7B model's shapes in Q4_K against the experts' kernels with one expert, on this GPU.

    python -m benchmarks.cuda.mixture_of_one [--rows N ...] [--json RESULTS.json]

Where a mixture of one expert takes no longer, its kernel could replace the dense one. One row is multiplied by the
matvec kernels, with what decode joins to them: the gated unit to gate and up, the residual and the norm to o and down.
More rows are multiplied by Hopper's matmuls, the mixture's with the best block size; its rows are in their places
already, so neither the grouping of rows by expert nor the sum over experts is counted. The two are timed in turns, in
CUDA graphs over more weights than the L2 cache holds. Printed are medians in microseconds, the ratio in each turn, and
whether both have the same bits.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cuda.cuda_timing import compile_ahead, launch_time, matmul_launch, random_weights
from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    to_fp16_operand,
    to_wgmma_layout,
)
from quengine.kernels.cuda.gemm.matmul_fused import MatmulMode, SplitScratch
from quengine.kernels.cuda.gemm.workspace import FEW_ROWS
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_glu import matvec_glu
from quengine.kernels.cuda.gemv.matvec_norm import matvec_norm
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped_program import Blocks, GroupedOutput
from quengine.kernels.cuda.moe.grouped_wgmma import launch_grouped_wgmma
from quengine.kernels.cuda.moe.matvec_expert_rows import matvec_expert_rows
from quengine.kernels.cuda.moe.matvec_experts_add import matvec_experts_add
from quengine.kernels.cuda.moe.matvec_experts_glu import matvec_experts_glu
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Rows and columns of a Mistral-7B layer's matrices."""

ROWS = (1, 8, 64, 256, 512, 2048)
BLOCKS = (8, 16, 32, 64, 128, 256)
TURNS = 5
WORKERS = 12

Launch = Callable[[], tuple[Tensor, ...]]
"""One launch; returns its results, which the next one may overwrite."""


def one_expert(weight: PackedWeight) -> ExpertWeights:
    return ExpertWeights(weight.parts, 1, weight.rows, weight.paired)


def of_one_row(name: str, weights: list[PackedWeight]) -> tuple[list[Launch], dict[str, list[Launch]]]:
    """The dense launches, and the mixture's."""
    rows, cols = weights[0].rows, weights[0].cols
    x = quantize_activations(torch.randn(1, cols, device="cuda"))
    routing = Routing(torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.ones(1, 1, device="cuda"))
    room = QuantizationScratch.empty(2 * rows, "cuda")
    residual, norm = torch.randn(1, rows, device="cuda"), RMSNorm(torch.ones(rows, device="cuda"), 1e-5)

    def quantized(y: QuantizedActivations) -> tuple[Tensor, ...]:
        return y.high, y.low, y.scale, y.sums

    def normed(y: Tensor | RmsNormed) -> tuple[Tensor, ...]:
        assert isinstance(y, RmsNormed) and isinstance(y.rms_normed, QuantizedActivations)
        return y.hidden, *quantized(y.rms_normed)

    def dense(weight: PackedWeight) -> tuple[Tensor, ...]:
        if name == "qkv":
            return (matvec(x, weight, pdl=True),)
        if name == "gate_up":
            return quantized(matvec_glu(x, weight, scratch=room, pdl=True))
        return normed(matvec_norm(x, weight, residual, norm.weight, norm.eps, room, True))

    def mixture(weight: PackedWeight) -> tuple[Tensor, ...]:
        expert = one_expert(weight)
        if name == "qkv":
            return (matvec_expert_rows(x, routing, expert, True),)
        if name == "gate_up":
            return quantized(matvec_experts_glu(x, routing, expert, "silu", room, True))
        return normed(matvec_experts_add(x, routing, expert, residual, norm, room, True))

    return [lambda w=w: dense(w) for w in weights], {"": [lambda w=w: mixture(w) for w in weights]}  # type: ignore[misc]


def of_rows(
    name: str, rows: int, weights: list[PackedWeight]
) -> tuple[list[Launch], dict[str, list[Launch]]]:
    """The dense launches, and the mixture's by block size. Above FEW_ROWS rows, those of a prompt."""
    kind, scratch = "swiglu" if name == "gate_up" else "rows", SplitScratch("cuda")
    x = operand(torch.randn(rows, weights[0].cols, device="cuda"))

    def of(launch: Callable[[], None], out: Tensor) -> Launch:
        def run() -> tuple[Tensor, ...]:
            launch()
            return (out[:rows],)

        return run

    dense = [of(*matmul_launch(kind, weight, x, scratch)) for weight in weights]
    smallest, largest = min(64, rows), max(8, 2 * rows)
    mixtures = {
        f"blocks of {block}": [of(*grouped_launch(name, weight, x, block)) for weight in weights]
        for block in BLOCKS
        if smallest <= block <= largest
    }
    return dense, mixtures


def grouped_launch(
    name: str, weight: PackedWeight, x: Fp16Operand, block: int
) -> tuple[Callable[[], None], Tensor]:
    """A launch of the experts' matmul with one expert, and where its result goes."""
    count, part, experts = -(-x.rows // block), weight.parts[0], one_expert(weight)
    assert isinstance(part, PackedPart)
    placed = padded(x, count * block)
    of_block = torch.tensor([count, *[0] * count], dtype=torch.int32, device="cuda")
    blocks = Blocks(of_block, block, 0, count, early=False)
    if name == "gate_up":
        gated = Fp16Operand.empty(count * block, weight.rows // 2, "cuda", OperandLayout.WGMMA)
        output = GroupedOutput(gated.values, 0, None, "silu", gated.row_scale)
    else:
        output = GroupedOutput(torch.zeros(count * block, weight.rows, device="cuda"), 0, None)
    mode = MatmulMode(exact=x.rows > FEW_ROWS, pdl=True)
    return lambda: launch_grouped_wgmma(placed, experts, part, blocks, output, mode), output.out


def operand(x: Tensor) -> Fp16Operand:
    """Rows in the WGMMA layout."""
    plain = to_fp16_operand(x)
    shape = Fp16Operand.empty(*x.shape, "cuda", OperandLayout.WGMMA).values
    return to_wgmma_layout(plain, shape)


def padded(x: Fp16Operand, rows: int) -> Fp16Operand:
    """The operand with zeros after its rows, up to `rows` of them."""
    whole = Fp16Operand.empty(rows, x.values.shape[1], "cuda", x.layout)
    whole.values.zero_()
    whole.values[: x.rows] = x.values[: x.rows]
    whole.row_scale.fill_(1.0)
    whole.row_scale[: x.rows] = x.row_scale
    return whole


def launches_of(
    name: str, rows: int, copies: int | None = None
) -> tuple[list[Launch], dict[str, list[Launch]]]:
    height, cols = SHAPES[name]
    weights = random_weights([("Q4_K", height)], cols, paired=name == "gate_up", copies=copies)
    return of_one_row(name, weights) if rows == 1 else of_rows(name, rows, weights)


@dataclass(frozen=True)
class Compared:
    """Medians in microseconds of a launch, the median ratio and that of each turn. block: the mixture's rows."""

    shape: str
    rows: int
    block: str
    dense_us: float
    mixture_us: float
    ratio: float
    ratios: list[float]
    same_bits: bool


def compared(name: str, rows: int) -> Compared:
    """Both timed in turns; of the mixture's block sizes the quickest."""
    dense, mixtures = launches_of(name, rows)
    first = {block: launch_time(launches) for block, launches in mixtures.items()}
    block = min(first, key=lambda each: first[each])
    turns = [(launch_time(dense), launch_time(mixtures[block])) for _ in range(TURNS)]
    ratios = [mixture / alone for alone, mixture in turns]
    expected = [each.clone() for each in dense[0]()]
    same = all(torch.equal(*both) for both in zip(expected, mixtures[block][0](), strict=True))
    medians = [statistics.median(times) for times in zip(*turns, strict=True)]
    return Compared(name, rows, block, *medians, statistics.median(ratios), ratios, same)


def compile_share(rows: list[int], worker: int) -> None:
    runs = [(name, count) for count in rows for name in SHAPES]
    for name, count in runs[worker::WORKERS]:
        dense, mixtures = launches_of(name, count, 1)
        for launches in (dense, *mixtures.values()):
            launches[0]()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile is not None:
        compile_share(arguments.rows, arguments.compile)
        return
    given = ["--rows", *map(str, arguments.rows)]
    compile_ahead("cuda.mixture_of_one", given, [str(i) for i in range(WORKERS)])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Q4_K")
    print(f"{'rows':>5} {'shape':8} {'dense us':>9} {'mixture us':>11} {'ratio':>6}  turns")
    results = []
    for rows in arguments.rows:
        for name in SHAPES:
            found = compared(name, rows)
            results.append(found)
            turns = " ".join(f"{ratio:.3f}" for ratio in found.ratios)
            print(
                f"{rows:5} {name:8} {found.dense_us:9.2f} {found.mixture_us:11.2f} {found.ratio:6.3f}  {turns}  "
                f"{'same bits' if found.same_bits else 'other bits'} {found.block}",
                flush=True,
            )
    if arguments.json:
        report = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "results": [asdict(each) for each in results],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
