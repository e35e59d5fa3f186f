"""Time what LoRA adapters add to a layer's products of one row.

    python -m benchmarks.cuda.adapted_row [--adapters 1 4] [--rank 16]

Prints microseconds a layer for the products of Mistral-7B's layers in Q4_K_M, launched one after the other as in a
decode step without attention: without adapters, and with so many loaded, of which the row has one.
"""

import argparse
from dataclasses import replace

import torch

from benchmarks.cuda.cuda_timing import graph_time, random_weights
from quengine.kernels.cuda.gemv.activations import quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_glu import matvec_glu
from quengine.kernels.cuda.gemv.matvec_norm import matvec_norm
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.lora.low_rank import CudaChanges
from quengine.kernels.cuda.weights.packed import PackedWeight
from quengine.kernels.lora.low_rank import Changes

LAYERS = 4
MATRICES = (
    ([("Q4_K", 5120), ("Q6_K", 1024)], (4096, 1024, 1024), 4096),
    ([("Q4_K", 4096)], (4096,), 4096),
    ([("Q4_K", 28672)], (14336, 14336), 4096),
    ([("Q4_K", 4096)], (4096,), 14336),
)
"""Types and rows of a weight's parts, rows of its matrices, and columns."""


def layer(adapters: int, rank: int, scales: torch.Tensor) -> list[PackedWeight]:
    """The weights of a layer, with changes if there are adapters."""
    made = []
    for parts, rows, cols in MATRICES:
        (weight,) = random_weights(parts, cols, len(rows) == 2, 1)
        if adapters:
            a = torch.randn(len(rows), adapters, rank, cols, device="cuda") * 0.01
            b = torch.randn(sum(rows), adapters, rank, device="cuda") * 0.1
            changes = CudaChanges.of(Changes(rows, a.half(), b.half()), torch.device("cuda"))
            weight = replace(weight, change=changes.of_row(scales))
        made.append(weight)
    return made


def time_of(adapters: int, rank: int) -> float:
    """Microseconds a layer."""
    scales = torch.zeros(max(adapters, 1), 1, device="cuda")
    scales[-1] = 1.0
    layers = [layer(adapters, rank, scales) for _ in range(LAYERS)]
    heads, stream = (
        quantize_activations(torch.randn(1, 4096, device="cuda")),
        torch.randn(1, 4096, device="cuda"),
    )
    norm, scratch = torch.ones(4096, device="cuda"), QuantizationScratch.empty(2 * 28672, "cuda")

    def chain() -> None:
        x = matvec_norm(heads, layers[-1][1], stream, norm, 1e-5, scratch, True)
        for qkv, output, gate_up, down in layers:
            matvec(x.rms_normed, qkv, pdl=True)
            x = matvec_norm(heads, output, x.hidden, norm, 1e-5, scratch, True)
            gated = matvec_glu(x.rms_normed, gate_up, scratch=scratch, pdl=True)
            x = matvec_norm(gated, down, x.hidden, norm, 1e-5, scratch, True)

    return graph_time([chain], 15) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args()
    plain = time_of(0, given.rank)
    print(f"without adapters  {plain:7.2f} us a layer")
    for adapters in given.adapters:
        time = time_of(adapters, given.rank)
        print(f"one of {adapters:3} loaded  {time:7.2f} us a layer {time / plain:6.3f}", flush=True)


if __name__ == "__main__":
    main()
