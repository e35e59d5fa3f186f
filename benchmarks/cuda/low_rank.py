"""Time what LoRA adapters add to a layer's products of several rows.

    python -m benchmarks.cuda.low_rank [--rows 8 64 512] [--rank 16] [--adapters 4]

Prints microseconds for each matrix of a Mistral-7B layer in Q4_K: the product alone, with rows that all have one
adapter, and with rows that have one of all in turn. Weights pass the L2 cache. The product of gate and up alone is the
gated unit, whose adapters take a launch for the product too.
"""

import argparse
from collections.abc import Callable

import torch

from benchmarks.cuda.cuda_timing import launch_time, random_weights
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, to_fp16_operand
from quengine.kernels.cuda.gemm.matmul import matmul, matmul_glu
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.lora.low_rank import CudaChanges, LowRankScratch, add_low_rank
from quengine.kernels.cuda.weights.packed import PackedWeight
from quengine.kernels.lora.low_rank import Changes

MATRICES = {
    "qkv": ((4096, 1024, 1024), 4096),
    "output": ((4096,), 4096),
    "gate, up": ((14336, 14336), 4096),
    "down": ((4096,), 14336),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    given = parser.parse_args()
    device, scratch = torch.device("cuda"), LowRankScratch("cuda")
    print(f"{'rows':>5} {'matrix':>10} {'alone':>8} {'one':>8} {'all':>8} us")
    for rows in given.rows:
        totals = [0.0, 0.0, 0.0]
        for name, (parts, cols) in MATRICES.items():
            paired = name == "gate, up"
            weights = random_weights([("Q4_K", sum(parts))], cols, paired)
            room = MatmulWorkspace(1 << 28, device)
            layout = room.layout(rows)
            x = to_fp16_operand(
                torch.randn(rows, cols, device=device), Fp16Operand.empty(rows, cols, device, layout)
            )
            made = Changes(
                parts,
                torch.randn(len(parts), given.adapters, given.rank, cols),
                torch.randn(sum(parts), given.adapters, given.rank),
            )
            changes = CudaChanges.of(made.to(torch.float16), device)
            one = torch.zeros(given.adapters, rows, device=device)
            one[0] = 1.0
            each = torch.zeros_like(one)
            each[torch.arange(rows) % given.adapters, torch.arange(rows)] = 1.0
            times = [
                launch_time(
                    [_launch(weight, x, room, paired, changes, scales, scratch) for weight in weights]
                )
                for scales in (None, one, each)
            ]
            totals = [total + time for total, time in zip(totals, times, strict=True)]
            print(f"{rows:5} {name:>10} {times[0]:8.2f} {times[1]:8.2f} {times[2]:8.2f}", flush=True)
        print(f"{rows:5} {'all':>10} {totals[0]:8.2f} {totals[1]:8.2f} {totals[2]:8.2f}", flush=True)


def _launch(
    weight: PackedWeight,
    x: Fp16Operand,
    room: MatmulWorkspace,
    paired: bool,
    changes: CudaChanges,
    scales: torch.Tensor | None,
    scratch: LowRankScratch,
) -> Callable[[], None]:
    """A product, and unless scales are None what adapters add to it."""

    def run() -> None:
        if scales is None:
            if paired:
                matmul_glu(x, weight, room, pdl=True)
            else:
                matmul(x, weight, room, pdl=True)
            return
        y = matmul(x, weight, room, pdl=True, followed=True)
        activation = "silu" if paired else None
        add_low_rank(y, x, changes, scales, scratch, activation=activation, early=True, pdl=True)

    return run


if __name__ == "__main__":
    main()
