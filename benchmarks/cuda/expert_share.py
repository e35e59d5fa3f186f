"""The experts of one of several ranks that have some experts each, simulated on one GPU: no other rank is needed.

    python -m benchmarks.cuda.expert_share [-m MODEL ...] [--rows 1 8 64 512] [--ranks 2] [--kernels]

Microseconds of a layer's experts (gate and up, down, the sum), for random routings, in CUDA graphs over layers with
weights of their own: with all experts; with the first rank's, where experts of others are skipped; and, as a base, with
an expert of zeros after the rank's own that computes the rows of all others. Then the time that the bytes of the rank's
chosen experts take at 4.2 TB/s. --kernels: also each launch of the last two, as torch's profiler sees it.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.cuda.cuda_timing import graph_time
from benchmarks.cuda.expert_kernels import profile_of
from benchmarks.cuda.grouped_blocks import BYTES_PER_US, MODELS, ExpertSizes, experts_of, random_routing
from quengine.kernels.cuda.gemm.workspace import FEW_ROWS, MatmulWorkspace
from quengine.kernels.cuda.gemv.activations import quantize_activations
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.experts import ExpertOperations
from quengine.kernels.cuda.moe.grouped import norms_in_groups
from quengine.kernels.cuda.rms_norm import rms_norm_fp16
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.router import Routing
from quengine.kernels.rms_norm import RMSNorm

LAYERS = 4
FEW, REPEATS = 4, 8
"""Rows up to which every layer runs with several routings: its few experts would stay in the L2 cache."""

Layer = tuple[ExpertWeights, ExpertWeights]


class Runner:
    """Layers' experts on a number of rows."""

    def __init__(self, model: ExpertSizes, rows: int) -> None:
        self.model, self.rows = model, rows
        self.device = torch.device("cuda")
        self.room = MatmulWorkspace(0, "cuda")
        self.pdl = torch.cuda.get_device_capability() >= (9, 0)
        self.operations = ExpertOperations(self.device, lambda: self.room, self.pdl)
        self.norm = RMSNorm(torch.ones(model.hidden, device="cuda"), 1e-5)
        self.hidden = torch.randn(rows, model.hidden, device="cuda")
        self.row = quantize_activations(self.hidden[:1])
        self.residual = torch.zeros_like(self.hidden)

    def run(self, layer: Layer, routing: Routing) -> None:
        gate_up, down = layer
        exact, x, norm = self.rows > FEW_ROWS, self.hidden, None
        if self.rows == 1:
            gated = self.operations.glu(self.row, routing, gate_up, self.model.activation, exact)
        elif norms_in_groups(self.rows, self.model.used, self.device):
            gated = self.operations.glu(x, routing, gate_up, self.model.activation, exact, self.norm)
        else:
            operand = self.room.fp16_operand(self.rows, self.model.hidden)
            normed = rms_norm_fp16(x, self.norm.weight, self.norm.eps, operand, self.pdl)
            gated = self.operations.glu(normed, routing, gate_up, self.model.activation, exact, norm)
        self.operations.add(gated, routing, down, self.residual, None, exact)

    def launches(self, layers: list[Layer], routings: list[Routing]) -> list[Callable[[], None]]:
        pairs = [(layers[number % len(layers)], routing) for number, routing in enumerate(routings)]
        return [lambda pair=pair: self.run(*pair) for pair in pairs]  # type: ignore[misc]


def share_of(model: ExpertSizes, count: int, zeros: bool) -> Layer:
    """The first `count` experts, with one of zeros after them or as a share."""
    made = experts_of(replace(model, count=count + zeros))
    if not zeros:
        share = ExpertShare(0, model.count)
        return replace(made[0], share=share), replace(made[1], share=share)
    for weights in made:
        for part in weights.parts:
            assert isinstance(part, PackedPart)
            for plane in part.planes:
                plane[-weights.expert_tiles :] = 0
    return made


def own_numbers(routing: Routing, count: int) -> Routing:
    """The routing with `count` in place of all experts from number `count` on."""
    return replace(routing, experts=routing.experts.clamp(max=count).contiguous())


def own_bytes(layer: Layer, routings: list[Routing], count: int) -> float:
    """Bytes of a layer's own experts that a routing chooses, on average."""
    chosen: list[Tensor] = [routing.experts.unique() for routing in routings]
    used = sum(int((experts < count).sum()) for experts in chosen) / len(routings)
    return used / count * sum(each.nbytes for each in layer)


def report(name: str, all_rows: list[int], ranks: int, kernels: bool) -> None:
    model = MODELS[name]
    count = model.count // ranks
    ways = {
        "all": [experts_of(model) for _ in range(LAYERS)],
        "skipped": [share_of(model, count, False) for _ in range(LAYERS)],
        "zeros": [share_of(model, count, True) for _ in range(LAYERS)],
    }
    for rows in all_rows:
        runner = Runner(model, rows)
        routings = [random_routing(rows, model) for _ in range(LAYERS * (REPEATS if rows <= FEW else 1))]
        of_zeros = [own_numbers(routing, count) for routing in routings]
        launches = {
            way: runner.launches(layers, of_zeros if way == "zeros" else routings)
            for way, layers in ways.items()
        }
        found = dict.fromkeys(launches, float("inf"))
        for _ in range(3):
            for way, some in launches.items():
                found[way] = min(found[way], graph_time(some) / len(routings))
        least = own_bytes(ways["skipped"][0], routings, count) / BYTES_PER_US
        times = ", ".join(f"{way} {time:.1f}" for way, time in found.items())
        print(f"{name}, {ranks} ranks, {rows} rows: {times} us; bytes of the rank's {least:.1f}", flush=True)
        for way in ("skipped", "zeros") if kernels else ():
            profile = profile_of(launches[way], len(routings))
            listed = sorted(profile.kernels, key=lambda kernel: -kernel.step_us)
            parts = [f"{kernel.name} {kernel.step_us:.1f} ({kernel.call_us:.1f})" for kernel in listed]
            print(f"    {way}: {', '.join(parts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", nargs="+", default=["qwen3-30b-a3b"], choices=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.model:
        report(name, arguments.rows, arguments.ranks, arguments.kernels)


if __name__ == "__main__":
    main()
