"""Each launch of a layer's experts in batches, beside the time that the bytes of its weights take.

    python -m benchmarks.cuda.expert_kernels [-m MODEL ...] [--rows 8 32 64] [--geometry 8,2,0,96,256,0,1 ...]

For random routings, in a CUDA graph of layers with weights of their own: microseconds of a layer's experts from the
router to the sum with the next norm, then of each launch as torch's profiler sees it (the time that a launch adds, and
in parentheses from its first start to its last end), and what the chosen experts' weights take at 4.2 TB/s. --geometry:
also with programs of other makes, whatever a block's rows: warps, stages, overlap, registers, columns, ring, per_warp
(weights/geometry.py, WgmmaGeometry).
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cuda.cuda_timing import captured, graph_time
from benchmarks.cuda.grouped_blocks import BLOCKS, BYTES_PER_US, MODELS, ExpertSizes, experts_of, geometry_of
from quengine.diagnostics.bench.profile import Profile, read_profile
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemm.workspace import FEW_ROWS, MatmulWorkspace
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.experts import ExpertOperations
from quengine.kernels.cuda.moe.grouped import norms_in_groups
from quengine.kernels.cuda.rms_norm import rms_norm_fp16
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.moe.router_kind import RouterKind
from quengine.kernels.rms_norm import RMSNorm

LAYERS = 4
REPLAYS = 8


@dataclass(frozen=True)
class Layer:
    """router: whose logits for the layer's rows make a uniform choice."""

    router: Router
    gate_up: ExpertWeights
    down: ExpertWeights


class Chain:
    """The experts of `LAYERS` layers of a model on a number of rows, as a step launches them."""

    def __init__(self, model: ExpertSizes, rows: int, layers: list[Layer]) -> None:
        self.model, self.rows, self.layers = model, rows, layers
        self.device = torch.device("cuda")
        self.room = MatmulWorkspace(0, "cuda")
        self.pdl = torch.cuda.get_device_capability() >= (9, 0)
        self.operations = ExpertOperations(self.device, lambda: self.room, self.pdl)
        self.norm = RMSNorm(torch.ones(model.hidden, device="cuda"), 1e-5)
        generator = torch.Generator("cuda").manual_seed(rows)
        self.hidden = torch.randn(rows, model.hidden, device="cuda", generator=generator)
        self.residual = torch.zeros_like(self.hidden)  # apart: sums of random weights would make rows alike

    def run(self, layer: Layer) -> None:
        routing = self.operations.route(self.hidden, self.norm, layer.router, None)
        self.run_experts(layer, routing)

    def run_experts(self, layer: Layer, routing: Routing) -> None:
        exact = self.rows > FEW_ROWS
        if norms_in_groups(self.rows, self.model.used, self.device):
            x: Tensor | Fp16Operand = self.hidden
            norm: RMSNorm | None = self.norm
        else:
            operand = self.room.fp16_operand(self.rows, self.model.hidden)
            x, norm = rms_norm_fp16(self.hidden, self.norm.weight, self.norm.eps, operand, self.pdl), None
        gated = self.operations.glu(x, routing, layer.gate_up, self.model.activation, exact, norm)
        self.operations.add(gated, routing, layer.down, self.residual, self.norm, exact)

    def launches(self) -> list[Callable[[], None]]:
        return [lambda layer=layer: self.run(layer) for layer in self.layers]

    def time(self) -> float:
        """Microseconds of a layer."""
        return graph_time(self.launches()) / len(self.layers)

    def chosen(self) -> float:
        """Experts that a layer's rows choose, on average."""
        found = [self.operations.route(self.hidden, self.norm, layer.router, None) for layer in self.layers]
        return sum(routing.experts.unique().numel() for routing in found) / len(found)

    def profile(self) -> Profile:
        """The profile of a layer."""
        return profile_of(self.launches(), len(self.layers))


def layers_of(model: ExpertSizes, count: int = LAYERS) -> list[Layer]:
    kind = RouterKind(model.used - model.joined)
    made = []
    for number in range(count):
        generator = torch.Generator("cuda").manual_seed(number)
        weight = torch.randn(model.count - model.joined, model.hidden, device="cuda", generator=generator)
        router = Router(kind, weight, joins_shared=model.joined)
        made.append(Layer(router, *experts_of(model)))
    return made


def profile_of(launches: list[Callable[[], None]], steps: int) -> Profile:
    """The launches of one graph as `steps` equal steps, by torch's profiler."""
    stream, graph = captured(launches)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.cuda.stream(stream), torch.profiler.profile(activities=activities) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_profile(json.loads(path.read_text())["traceEvents"], "layer", steps * REPLAYS)


def report(name: str, rows: int, chain: Chain) -> str:
    model, layer = chain.model, chain.layers[0]
    share = chain.chosen() / model.count
    gate_up, down = (share * each.nbytes / BYTES_PER_US for each in (layer.gate_up, layer.down))
    kernels = sorted(chain.profile().kernels, key=lambda kernel: -kernel.step_us)
    parts = [f"{kernel.name} {kernel.step_us:.1f} ({kernel.call_us:.1f})" for kernel in kernels]
    return (
        f"{name}, {rows} rows: {chain.time():.1f} us; bytes: gate and up {gate_up:.1f}, down {down:.1f}; "
        f"{', '.join(parts)}"
    )


def made_as(geometry: str) -> ExitStack:
    """A context in which every block's programs have this geometry, as of the command line."""
    warps, stages, overlap, registers, columns, ring, per_warp = map(int, geometry.split(","))
    stack = ExitStack()
    for block in BLOCKS:
        made = [warps, 1, stages, bool(overlap), registers, columns, ring, bool(per_warp)]
        stack.enter_context(geometry_of(block, made))
    return stack


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--geometry", nargs="+", default=[], metavar="WARPS,STAGES,...")
    arguments = parser.parse_args()
    for name in arguments.model:
        layers = layers_of(MODELS[name])
        for rows in arguments.rows:
            print(report(name, rows, Chain(MODELS[name], rows, layers)), flush=True)
            for geometry in arguments.geometry:
                with made_as(geometry):
                    print(geometry, report(name, rows, Chain(MODELS[name], rows, layers)), flush=True)
        del layers


if __name__ == "__main__":
    main()
