"""Find the matvec kernels' launch geometry on this GPU and keep it in kernels/cuda/launch_table.json.

    python benchmarks/cuda/tune_matvec.py                 # every shape below, written to the table
    python benchmarks/cuda/tune_matvec.py -o out.json     # written elsewhere; --only TEXT: shapes whose key holds TEXT

Weights are rotated so that the L2 cache does not serve them; times are per launch in a CUDA graph, with programmatic
dependent launch where the GPU has it. The variants are compiled by several processes first.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.cuda.cuda_timing import compile_ahead, graph_time, random_weights
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_glu import matvec_glu
from quengine.kernels.cuda.gemv.matvec_norm import matvec_norm
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.launch_table import Geometry
from quengine.kernels.cuda.weights.packed import PackedWeight

Shape = tuple[str, tuple[tuple[str, int], ...], int]

# Mistral-7B: merged QKV (attn_v is Q6_K in half of the layers), attn_output, ffn_gate + ffn_up, ffn_down, output.
SHAPES: tuple[Shape, ...] = (
    ("rows", (("Q4_K", 6144),), 4096),
    ("rows", (("Q4_K", 5120), ("Q6_K", 1024)), 4096),
    ("norm", (("Q4_K", 4096),), 4096),
    ("swiglu", (("Q4_K", 28672),), 4096),
    ("norm", (("Q4_K", 4096),), 14336),
    ("norm", (("Q6_K", 4096),), 14336),
    ("rows", (("Q6_K", 32000),), 4096),
)


def geometries(chunks: int) -> Iterator[Geometry]:
    """What is tried: 4 to 32 warps a program, up to 7 rounds (or one warp a chunk), 1 or 2 chunks read ahead, with
    and without a limit on the registers.

    More rounds were tried and lost; their unrolled kernels take a minute to compile.
    """
    for t, k, ahead in itertools.product((1, 2), (4, 8, 16), (1, 2)):
        rounds = -(-chunks // k)
        if k <= chunks and rounds <= 7 and ahead <= rounds:
            for registers, early in itertools.product((0, 64, 72, 80), (False, True)):
                if registers * t * k * 32 <= 65536:
                    yield Geometry(t, k, ahead, registers, early)


def launcher(weight: PackedWeight, kind: str, x: QuantizedActivations, pdl: bool):  # type: ignore[no-untyped-def]
    if kind == "swiglu":
        rounded = QuantizedActivations.empty(x.rows, weight.rows // 2, "cuda")
        scratch = QuantizationScratch.empty(weight.rows, "cuda")
        return lambda: matvec_glu(x, weight, out=rounded, scratch=scratch, pdl=pdl)
    y = torch.zeros(x.rows, weight.rows, device="cuda")
    if kind == "norm":
        norm, scratch = (
            torch.ones(weight.rows, device="cuda"),
            QuantizationScratch.empty(weight.rows, "cuda"),
        )
        return lambda: matvec_norm(x, weight, y, norm, 1e-5, scratch, pdl)
    return lambda: matvec(x, weight, residual=y, out=y, pdl=pdl)


def measure(shape: Shape, pdl: bool, compile_only: tuple[int, int] | None) -> list[tuple[float, Geometry]]:
    """Microseconds of each geometry; with compile_only (i, n), every n-th from i is launched once, untimed."""
    kind, formats, cols = shape
    weights = random_weights(formats, cols, paired=kind == "swiglu", copies=1 if compile_only else None)
    x = quantize_activations(torch.randn(1, cols, device="cuda"))
    results = []
    for number, geometry in enumerate(geometries(weights[0].parts[0].chunks)):  # type: ignore[union-attr]
        if compile_only and number % compile_only[1] != compile_only[0]:
            continue
        module = {"rows": "matvec"}.get(kind, f"matvec_{kind}")
        with patch(f"quengine.kernels.cuda.gemv.{module}.matvec_geometry", lambda *_, g=geometry: g):
            launches = [launcher(weight, kind, x, pdl) for weight in weights]
            if compile_only:
                launches[0]()
            else:
                results.append((graph_time(launches) / len(launches), geometry))
    return sorted(results, key=lambda result: result[0])


def key_of(shape: Shape) -> str:
    kind, formats, cols = shape
    return f"{kind} {' + '.join(f'{name} {rows}' for name, rows in formats)} x {cols}"


def nbytes_of(shape: Shape) -> int:
    from quengine.kernels.block_formats import FORMATS
    from quengine.kernels.cuda.weights.layout import packed_layout

    _, formats, cols = shape
    layouts = [(packed_layout(FORMATS[name], cols), rows) for name, rows in formats]
    return sum(-(-rows // 16) * -(-cols // layout.chunk) * layout.chunk_bytes for layout, rows in layouts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path(launch_table.__file__).with_name("launch_table.json")
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--compile", default="")
    arguments = parser.parse_args()
    shapes = [shape for shape in SHAPES if arguments.only in key_of(shape)]
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    if arguments.compile:
        part, parts = map(int, arguments.compile.split("/"))
        for shape in shapes:
            measure(shape, pdl, (part, parts))
        return
    shares = [f"{i}/{arguments.workers}" for i in range(arguments.workers)]
    compile_ahead("tune_matvec", ["--only", arguments.only], shares)
    table = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    entries = table.setdefault(launch_table.device_name(), {}).setdefault("matvec", {})
    for shape in shapes:
        results = measure(shape, pdl, None)
        best = results[0]
        entries[key_of(shape)] = [
            best[1].tiles,
            best[1].k_warps,
            best[1].ahead,
            best[1].registers,
            best[1].early,
        ]
        rate = nbytes_of(shape) / best[0] / 1e6
        rest = ", ".join(
            f"{time:.2f} {g.tiles}/{g.k_warps}/{g.ahead}/{g.registers}/{int(g.early)}"
            for time, g in results[:7]
        )
        print(f"{key_of(shape)}: {best[0]:.2f} us, {rate:.2f} TB/s  [{rest}]", flush=True)
    arguments.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
