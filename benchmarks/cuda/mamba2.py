"""Mamba2's layer between its projections, at the shapes of Nemotron 3 Nano and Granite 4.0 H-Tiny.

    python -m benchmarks.cuda.mamba2 [decode|prefill|all] [--check] [--sweep]

Decode: microseconds of a layer's step, without projections, in layers with states of their own, and bytes of states a
second against a copy's. Prefill: tokens a second of one layer, in chunks and row by row, and its launches one by one.
--check compares a step of each kind with the definition in fp64 first. --sweep tries other shapes of programs.
"""

import argparse
import itertools
import math
from dataclasses import dataclass

import torch

from benchmarks.cuda.cuda_timing import COPY_BYTES_PER_SECOND, graph_time, launch_time
from benchmarks.cuda.state_layers import (
    DEVICE,
    HOST,
    decode_step,
    layers_in_a_graph,
    moved,
    nmse,
    out_of,
    prompt_step,
    replaced,
    step_of,
)
from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda.mamba2 import decode, scan
from quengine.kernels.cuda.mamba2.arithmetic import net_of
from quengine.kernels.cuda.mamba2.convolve import convolve
from quengine.kernels.cuda.mamba2.decode import TokenShape
from quengine.kernels.cuda.mamba2.gated_norm import gated_norm
from quengine.kernels.cuda.mamba2.mamba2 import mamba2_decode, mamba2_rows
from quengine.kernels.cuda.mamba2.scan import ScanShape, scan_by_chunks
from quengine.kernels.mamba2 import Mamba2Spec, mamba2

TAPS, BATCHES, PROMPTS = 4, (1, 8, 64), (512, 2048)
VECTORS = ("conv", "conv_bias", "decay", "bias", "skip", "norm")
"""Fields of a spec that are tensors on the device."""

SWEPT_DECODE = tuple(TokenShape(*shape) for shape in ((16, 2), (16, 4), (32, 4), (32, 8), (64, 8)))
SWEPT_CHUNKS = tuple(
    ScanShape(*shape)
    for shape in ((32, 32, 32, 4, 1), (32, 32, 64, 8, 1), (64, 32, 32, 8, 1), (64, 64, 64, 8, 1))
)


@dataclass(frozen=True)
class Shape:
    """A model's layer. layers: how many of them it has."""

    name: str
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    layers: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def columns(self) -> int:
        """Columns of the input."""
        return self.inner + self.channels + self.heads

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's S, which a step reads and writes; its history is a hundredth of that."""
        return 4 * self.inner * self.state_dim


SHAPES = (
    Shape("nemotron-3-nano", 64, 64, 8, 128, 23),
    Shape("granite-4.0-h-tiny", 48, 64, 1, 128, 36),
)


def spec_of(shape: Shape) -> Mamba2Spec:
    """On the host."""
    random, heads = torch.Generator().manual_seed(1), shape.heads
    return Mamba2Spec(
        conv=torch.randn(TAPS, shape.channels, generator=random) / 2,
        conv_bias=torch.randn(shape.channels, generator=random) / 4,
        decay=-torch.empty(heads).uniform_(0.01, 4.0, generator=random),
        bias=torch.randn(heads, generator=random) - 2.0,
        skip=torch.randn(heads, generator=random), norm=torch.ones(shape.inner),
        heads=heads, head_dim=shape.head_dim, groups=shape.groups, state_dim=shape.state_dim,
        step_limits=(0.0, math.inf), eps=1e-5, cache_group=0,
    )  # fmt: skip


def states(shape: Shape, sequences: int) -> SlotLayer:
    history = torch.randn(1 + sequences, TAPS, shape.channels, device=DEVICE)
    memory = torch.randn(1 + sequences, shape.heads, shape.head_dim, shape.state_dim, device=DEVICE)
    return SlotLayer((history, memory * 0.1))


def time_decode(shape: Shape, sequences: int, pdl: bool = True) -> float:
    spec, step = moved(spec_of(shape), *VECTORS), step_of(decode_step(sequences), shape.columns)
    out = out_of(sequences, shape.inner)
    count = layers_in_a_graph(shape.state_bytes * sequences)
    layers = [states(shape, sequences) for _ in range(count)]
    return launch_time(
        [lambda layer=layer: mamba2_decode(step, spec, layer, out, pdl, pdl) for layer in layers]
    )


def decode_table(sweep: bool) -> None:
    for shape, sequences in itertools.product(SHAPES, BATCHES):
        kinds: list[tuple[str, float]] = [
            ("", time_decode(shape, sequences)),
            ("without dependent launch", time_decode(shape, sequences, pdl=False)),
        ]
        for tried in SWEPT_DECODE if sweep else ():
            with replaced(decode, "decode_shape", lambda *_, tried=tried: tried):
                kinds.append((str(tuple(tried)), time_decode(shape, sequences)))
        for kind, us in kinds:
            rate = 2 * shape.state_bytes * sequences / us * 1e6
            print(
                f"decode {shape.name} {sequences:3} sequences {kind:24} {us:8.2f} us a layer,",
                f"{us * shape.layers / 1e3:6.3f} ms for all {shape.layers}, states at {rate / 1e12:.2f} TB/s",
                f"({rate / COPY_BYTES_PER_SECOND:.0%} of a copy's)",
                flush=True,
            )


def time_prefill(shape: Shape, rows: int, batch_invariant: bool = False) -> float:
    spec, step, out = (
        moved(spec_of(shape), *VECTORS),
        step_of(prompt_step(rows), shape.columns),
        out_of(rows, shape.inner),
    )
    layer = states(shape, 1)
    return graph_time([lambda: mamba2_rows(step, spec, layer, out, batch_invariant, True)])


def prefill_parts(shape: Shape, rows: int) -> dict[str, float]:
    """Microseconds of each launch alone."""
    spec, step, out = (
        moved(spec_of(shape), *VECTORS),
        step_of(prompt_step(rows), shape.columns),
        out_of(rows, shape.inner),
    )
    history, memory = states(shape, 1).parts
    net = net_of(spec, TAPS)
    xbc, gates = convolve(step, spec, net, history, False)
    launches = {
        "convolve": lambda: convolve(step, spec, net, history, False),
        "by chunks": lambda: scan_by_chunks(step, spec, xbc, gates, net, history, memory, False),
        "gated norm": lambda: gated_norm(xbc[:, : net.width], step, spec, net, out, False),
    }
    return {name: graph_time([launch]) for name, launch in launches.items()}


def prefill_table(sweep: bool) -> None:
    for shape, rows in itertools.product(SHAPES, PROMPTS):
        kinds = [("", time_prefill(shape, rows)), ("row by row", time_prefill(shape, rows, True))]
        for tried in SWEPT_CHUNKS if sweep else ():
            with replaced(scan, "chunk_shape", lambda *_, tried=tried: tried):
                kinds.append((str(tuple(tried)), time_prefill(shape, rows)))
        for kind, us in kinds:
            print(
                f"prefill {shape.name} {rows:5} tokens {kind:20} {us:9.1f} us a layer,",
                f"{rows / us * 1e3 / shape.layers:7.1f} k tokens/s for all {shape.layers}",
                flush=True,
            )
        print("   ", *(f"{name} {us:.1f} us;" for name, us in prefill_parts(shape, rows).items()), flush=True)


def check() -> None:
    """A prompt and a batch of tokens against the definition in fp64, on the CPU: NMSE of results and of S."""
    for shape in SHAPES:
        for name, batch, host in (
            ("prompt", prompt_step(200), prompt_step(200, HOST)),
            ("tokens", decode_step(3), decode_step(3, HOST)),
        ):
            spec, layer, step = spec_of(shape), states(shape, 3), step_of(batch, shape.columns)
            parts = tuple(part.cpu().clone() for part in layer.parts)
            wanted = mamba2(host, step.x.cpu().double(), spec, *parts)
            out = torch.empty(len(batch), shape.inner, device=DEVICE)
            run = mamba2_rows if batch.phase == "prefill" else mamba2_decode
            run(step, moved(spec, *VECTORS), layer, out)
            errors = [nmse(out, wanted), nmse(layer.parts[1], parts[1])]
            print(f"check {shape.name}, {name}: NMSE of results {errors[0]:.2e}, of S {errors[1]:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("decode", "prefill", "all"), default="all")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    if args.check:
        check()
    if args.what in ("decode", "all"):
        decode_table(args.sweep)
    if args.what in ("prefill", "all"):
        prefill_table(args.sweep)


if __name__ == "__main__":
    main()
