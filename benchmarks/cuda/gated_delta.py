"""The gated delta net between its projections, at the shapes of Qwen3.6-35B-A3B and 27B, against bytes and products.

    python -m benchmarks.cuda.gated_delta [decode|prefill|all] [--json FILE] [--sweep] [--check]

Decode: microseconds of a layer's step, without projections, inside a CUDA graph of layers with states of their own, and
bytes of states a second against a copy's. Prefill: tokens a second of one layer, its launches one by one, and the
products of its chunks a second. Both next to flash-linear-attention (`fla`) where that is installed: its fused
recurrent kernel and its chunked one, without convolution, gates and norm, over bf16 inputs, as models call it.
--check compares a step of each kind with the definition in fp64 first. --sweep tries other shapes of programs.
"""

import argparse
import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from quengine.kernels.cuda.gated_delta import decode, recurrence
from quengine.kernels.cuda.gated_delta import gated_delta as operations
from quengine.kernels.cuda.gated_delta.arithmetic import net_of
from quengine.kernels.cuda.gated_delta.chunks import chunk_matrices, chunk_rows
from quengine.kernels.cuda.gated_delta.convolve import convolve
from quengine.kernels.cuda.gated_delta.decode import DecodeShape
from quengine.kernels.cuda.gated_delta.gated_delta import gated_delta_decode, gated_delta_rows
from quengine.kernels.cuda.gated_delta.gated_norm import gated_norm
from quengine.kernels.cuda.gated_delta.recurrence import ChunkShape, carry_by_chunks, carry_by_rows
from quengine.kernels.gated_delta import GatedDeltaSpec, gated_delta

TAPS = 4
VECTORS = ("conv", "decay", "bias", "norm")
"""Fields of a spec that are tensors on the device."""

BATCHES = (1, 8, 32, 64)
PROMPTS = (512, 2048, 16384)
SWEPT_DECODE = tuple(
    DecodeShape(*shape)
    for shape in ((32, 2, False), (32, 4, False), (64, 4, False), (64, 8, False), (128, 8, False))
)
SWEPT_CHUNKS = tuple(
    ChunkShape(*shape)
    for shape in ((16, 64, 4, 2), (32, 64, 4, 1), (32, 64, 4, 2), (32, 64, 8, 2), (64, 64, 4, 1))
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's layer. layers: how many of them it has."""

    name: str
    key_heads: int
    value_heads: int
    head_dim: int
    layers: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.value_heads * self.head_dim

    @property
    def columns(self) -> int:
        """Columns of the input."""
        return self.channels + self.width + 2 * self.value_heads

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's S, which a step reads and writes; its history is a hundredth of that."""
        return 4 * self.value_heads * self.head_dim**2

    def chunk_products(self, rows: int) -> int:
        """Operations of the products of `rows` rows, counted once: two matrices a chunk, S read twice and summed to."""
        d, c = self.head_dim, chunk_rows(self.head_dim)
        of_chunks = 2 * 2 * c * d + 2 * 2 * 2 * c * c // 3
        of_states = 3 * 2 * d * d + 2 * 2 * c * d
        return rows * self.value_heads * (of_chunks + of_states)


SHAPES = (Shape("35b-a3b", 16, 32, 128, 30), Shape("27b", 16, 48, 128, 48))


def spec_of(shape: Shape) -> GatedDeltaSpec:
    random = torch.Generator().manual_seed(1)
    spec = GatedDeltaSpec(
        conv=torch.randn(TAPS, shape.channels, generator=random) / 2,
        decay=-torch.empty(shape.value_heads).uniform_(0.01, 4.0, generator=random),
        bias=torch.randn(shape.value_heads, generator=random) - 2.0,
        norm=torch.ones(shape.head_dim), key_heads=shape.key_heads, value_heads=shape.value_heads,
        head_dim=shape.head_dim, tiled=True, eps=1e-6, cache_group=0,
    )  # fmt: skip
    return moved(spec, *VECTORS)


def states(shape: Shape, sequences: int) -> SlotLayer:
    history = torch.randn(1 + sequences, TAPS, shape.channels, device=DEVICE)
    memory = torch.randn(1 + sequences, shape.value_heads, shape.head_dim, shape.head_dim, device=DEVICE)
    return SlotLayer((history, memory * 0.1))


def time_decode(shape: Shape, sequences: int, pdl: bool = True) -> float:
    spec, step, out = (
        spec_of(shape),
        step_of(decode_step(sequences), shape.columns),
        out_of(sequences, shape.width),
    )
    count = layers_in_a_graph(shape.state_bytes * sequences)
    layers = [states(shape, sequences) for _ in range(count)]
    return launch_time(
        [lambda layer=layer: gated_delta_decode(step, spec, layer, out, pdl, pdl) for layer in layers]
    )


def decode_table(sweep: bool) -> Iterator[Row]:
    for shape, sequences in itertools.product(SHAPES, BATCHES):
        moved = 2 * shape.state_bytes * sequences
        yield decode_row(shape, sequences, moved, time_decode(shape, sequences), "")
        yield decode_row(
            shape, sequences, moved, time_decode(shape, sequences, pdl=False), "without dependent launch"
        )
        if sweep and sequences == 1:  # the norm in a launch of its own, S in parts
            for tried in SWEPT_DECODE:
                with (
                    replaced(operations, "can_norm", lambda _: False),
                    replaced(decode, "decode_shape", lambda *_, tried=tried: tried),
                ):
                    us = time_decode(shape, sequences)
                yield decode_row(shape, sequences, moved, us, f"in parts {tuple(tried)}")
        if sweep and sequences > 1:
            for tried in SWEPT_DECODE:
                with replaced(decode, "decode_shape", lambda *_, tried=tried: tried):
                    us = time_decode(shape, sequences)
                yield decode_row(shape, sequences, moved, us, str(tuple(tried)))
        theirs = fla_decode(shape, sequences)
        if theirs is not None:
            yield decode_row(shape, sequences, moved, theirs, "fla, recurrence alone")


def decode_row(shape: Shape, sequences: int, moved: int, us: float, kind: str) -> Row:
    rate, of_all = moved / us * 1e6, us * shape.layers / 1e3
    share = rate / COPY_BYTES_PER_SECOND
    print(
        f"decode {shape.name} {sequences:3} sequences {kind:24}",
        f"{us:8.2f} us a layer, {of_all:6.3f} ms for all {shape.layers},",
        f"states at {rate / 1e12:.2f} TB/s ({share:.0%} of a copy's)",
        flush=True,
    )
    return {"decode": shape.name, "sequences": sequences, "kind": kind, "us": us, "bytes": moved}


def time_prefill(shape: Shape, rows: int, batch_invariant: bool = False) -> float:
    spec, step, out = spec_of(shape), step_of(prompt_step(rows), shape.columns), out_of(rows, shape.width)
    layer = states(shape, 1)
    return graph_time([lambda: gated_delta_rows(step, spec, layer, out, batch_invariant, True)])


def prefill_parts(shape: Shape, rows: int) -> dict[str, float]:
    """Microseconds of each launch alone."""
    spec, step, out, (history, memory) = (
        spec_of(shape),
        step_of(prompt_step(rows), shape.columns),
        out_of(rows, shape.width),
        states(shape, 1).parts,
    )
    net = net_of(spec, TAPS)
    qkv, gates = convolve(step, spec, net, history, False)
    assert step.tiles is not None
    tiles, matrices = step.tiles, chunk_matrices(qkv, gates, net, step.tiles)
    launches: dict[str, Callable[[], object]] = {
        "convolve": lambda: convolve(step, spec, net, history, False),
        "chunks": lambda: chunk_matrices(qkv, gates, net, tiles),
        "by chunks": lambda: carry_by_chunks(step, qkv, gates, matrices, net, history, memory, False),
        "gated norm": lambda: gated_norm(qkv[:, net.channels - net.width :], step, spec, net, out, False),
    }
    if rows <= 2048:
        launches["by rows"] = lambda: carry_by_rows(step, qkv, gates, net, history, memory, False)
    return {name: graph_time([launch]) for name, launch in launches.items()}


def prefill_table(sweep: bool) -> Iterator[Row]:
    for shape, rows in itertools.product(SHAPES, PROMPTS):
        yield prefill_row(shape, rows, time_prefill(shape, rows), "")
        parts = prefill_parts(shape, rows)
        print("   ", *(f"{name} {us:.1f} us;" for name, us in parts.items()), flush=True)
        yield {"prefill": shape.name, "rows": rows, "kind": "parts", **parts}
        if sweep:
            for tried in SWEPT_CHUNKS:
                with replaced(recurrence, "chunk_shape", lambda *_, tried=tried: tried):
                    us = time_prefill(shape, rows)
                yield prefill_row(shape, rows, us, str(tuple(tried)))
        if rows <= 2048:
            yield prefill_row(shape, rows, time_prefill(shape, rows, batch_invariant=True), "row by row")
        theirs = fla_prefill(shape, rows)
        if theirs is not None:
            yield prefill_row(shape, rows, theirs, "fla, chunks alone")


def prefill_row(shape: Shape, rows: int, us: float, kind: str) -> Row:
    rate, of_all = shape.chunk_products(rows) / us / 1e6, rows / us * 1e3 / shape.layers
    print(
        f"prefill {shape.name} {rows:5} tokens {kind:20}",
        f"{us:9.1f} us a layer, {rows / us:6.2f} M tokens/s,",
        f"{of_all:7.1f} k tokens/s for all {shape.layers}, products at {rate:6.1f} TFLOP/s",
        flush=True,
    )
    return {"prefill": shape.name, "rows": rows, "kind": kind, "us": us}


def fla_inputs(shape: Shape, batch: int, rows: int) -> dict[str, Tensor]:
    """Keys and queries of each value head, since fla's kernels have as many of one as of the other."""
    heads = (batch, rows, shape.value_heads)
    q, k, v = (torch.randn(*heads, shape.head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    q, k = (torch.nn.functional.normalize(each.float(), dim=-1).bfloat16() for each in (q, k))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": -torch.rand(heads, device=DEVICE),
        "beta": torch.rand(heads, device=DEVICE).bfloat16(),
    }


def fla_operation(name: str) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """An operation of flash-linear-attention; None: the package is not installed."""
    try:
        operation: Callable[..., tuple[Tensor, Tensor]] = getattr(
            importlib.import_module("fla.ops.gated_delta_rule"), name
        )
    except ImportError as error:
        print(f"    flash-linear-attention is not here: {error}", flush=True)
        return None
    return operation


def fla_decode(shape: Shape, sequences: int) -> float | None:
    operation = fla_operation("fused_recurrent_gated_delta_rule")
    if operation is None:
        return None
    given = fla_inputs(shape, sequences, 1)
    count = layers_in_a_graph(2 * shape.state_bytes * sequences)
    size = (sequences, shape.value_heads, shape.head_dim, shape.head_dim)
    held = [torch.randn(size, device=DEVICE) for _ in range(count)]
    return launch_time(
        [
            lambda state=state: operation(**given, initial_state=state, output_final_state=True)
            for state in held
        ]
    )


def fla_prefill(shape: Shape, rows: int) -> float | None:
    operation = fla_operation("chunk_gated_delta_rule")
    if operation is None:
        return None
    given = fla_inputs(shape, 1, rows)
    return graph_time([lambda: operation(**given, output_final_state=True)])


def check() -> None:
    """A prompt and a batch of tokens against the definition in fp64, on the CPU: NMSE of results and of S."""
    shape = replace(SHAPES[0], key_heads=2, value_heads=4)
    for name, batch, host in (
        ("prompt", prompt_step(200), prompt_step(200, HOST)),
        ("tokens", decode_step(3), decode_step(3, HOST)),
    ):
        spec, layer, step = spec_of(shape), states(shape, 3), step_of(batch, shape.columns)
        parts = tuple(part.cpu().clone() for part in layer.parts)
        exact = replace(spec, **{n: getattr(spec, n).cpu().double() for n in VECTORS})
        wanted = gated_delta(host, step.x.cpu().double(), exact, *parts)
        out = torch.empty(len(batch), shape.width, device=DEVICE)
        run = gated_delta_rows if batch.phase == "prefill" else gated_delta_decode
        run(step, spec, layer, out)
        errors = [nmse(out, wanted), nmse(layer.parts[1], parts[1])]
        print(f"check {name}: NMSE of results {errors[0]:.2e}, of S {errors[1]:.2e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("decode", "prefill", "all"), default="all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    if args.check:
        check()
    results: list[Row] = []
    if args.what in ("decode", "all"):
        results += decode_table(args.sweep)
    if args.what in ("prefill", "all"):
        results += prefill_table(args.sweep)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
