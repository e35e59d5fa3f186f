"""Time what LoRA adapters add to a layer's products of several rows.

    python -m benchmarks.cuda.low_rank [--rows 8 64] [--rank 16] [--adapters 4]

Prints microseconds for each matrix of a Mistral-7B layer in Q4_K: the product alone, with rows that all have one
adapter, and with rows that have one of all in turn; gate and up with their activation, output and down with the
residual and its norm. The last two columns are the product with A, without B. Weights pass the L2 cache. Up to 128
rows.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cuda.cuda_timing import launch_time, random_weights
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, to_fp16_operand
from quengine.kernels.cuda.gemm.matmul import matmul, matmul_glu, matmul_norm
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.lora.from_rank import add_from_rank, glu_from_rank, norm_from_rank
from quengine.kernels.cuda.lora.low_rank import CudaChanges, LowRankScratch
from quengine.kernels.cuda.lora.rank_matmul import rank_matmul
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.lora.low_rank import Changes
from quengine.kernels.rms_norm import RMSNorm

MATRICES = {
    "qkv": ((4096, 1024, 1024), 4096),
    "output": ((4096,), 4096),
    "gate, up": ((14336, 14336), 4096),
    "down": ((4096,), 14336),
}


@dataclass(frozen=True)
class Launches:
    """The launches of one matrix of a layer, for rows x: paired, gate and up; with a residual, output or down."""

    x: Fp16Operand
    room: MatmulWorkspace
    changes: CudaChanges
    scratch: LowRankScratch
    residual: Tensor | None
    norm: RMSNorm
    out: Fp16Operand

    def plain(self, weight: PackedWeight) -> None:
        if weight.paired:
            matmul_glu(self.x, weight, self.room, pdl=True)
        elif self.residual is not None:
            matmul_norm(self.x, weight, self.room, self.residual, self.norm, True)
        else:
            matmul(self.x, weight, self.room, pdl=True)

    def with_a(self, weight: PackedWeight, scales: Tensor) -> tuple[Tensor, Tensor]:
        return rank_matmul(
            self.x, weight, self.changes, scales, self.room, self.scratch, self.residual, pdl=True
        )

    def changed(self, weight: PackedWeight, scales: Tensor) -> None:
        y, sums = self.with_a(weight, scales)
        part = weight.parts[0]
        if weight.paired:
            assert isinstance(part, PackedPart)
            glu_from_rank(y, sums, self.changes, scales, "silu", self.x, part, self.out, True)
        elif self.residual is not None:
            norm_from_rank(y, sums, self.changes, scales, self.norm, self.out, True)
        else:
            add_from_rank(y, sums, self.changes, scales, True)


def times_of(rows: int, parts: tuple[int, ...], cols: int, adapters: int, rank: int) -> list[float]:
    """Microseconds of a matrix: alone, one adapter, all in turn; one and all without B."""
    device, paired, width = torch.device("cuda"), len(parts) == 2, sum(parts)
    weights = random_weights([("Q4_K", width)], cols, paired)
    room = MatmulWorkspace(1 << 28, device)
    layout = room.layout(rows)
    x = to_fp16_operand(torch.randn(rows, cols, device=device), Fp16Operand.empty(rows, cols, device, layout))
    made = Changes(
        parts, torch.randn(len(parts), adapters, rank, cols) * 0.01, torch.randn(width, adapters, rank) * 0.1
    )
    launches = Launches(
        x,
        room,
        CudaChanges.of(made.to(torch.float16), device),
        LowRankScratch(device),
        torch.zeros(rows, width, device=device) if len(parts) == 1 else None,
        RMSNorm(torch.ones(width, device=device), 1e-5),
        Fp16Operand.empty(rows, width // 2 if paired else width, device, layout),
    )
    one = torch.zeros(adapters, rows, device=device)
    one[0] = 1.0
    each = torch.zeros_like(one)
    each[torch.arange(rows) % adapters, torch.arange(rows)] = 1.0
    kinds: list[Callable[[PackedWeight], object]] = [
        launches.plain,
        lambda weight: launches.changed(weight, one),
        lambda weight: launches.changed(weight, each),
        lambda weight: launches.with_a(weight, one),
        lambda weight: launches.with_a(weight, each),
    ]
    return [launch_time([lambda w=weight, kind=kind: kind(w) for weight in weights]) for kind in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    given = parser.parse_args()
    print(f"{'rows':>5} {'matrix':>10} {'alone':>8} {'one':>8} {'all':>8} {'one, A':>8} {'all, A':>8} us")
    for rows in given.rows:
        totals = [0.0] * 5
        for name, (parts, cols) in MATRICES.items():
            times = times_of(rows, parts, cols, given.adapters, given.rank)
            totals = [total + time for total, time in zip(totals, times, strict=True)]
            print(_line(rows, name, times), flush=True)
        print(_line(rows, "all", totals), flush=True)


def _line(rows: int, name: str, times: list[float]) -> str:
    return f"{rows:5} {name:>10} " + " ".join(f"{time:8.2f}" for time in times)


if __name__ == "__main__":
    main()
