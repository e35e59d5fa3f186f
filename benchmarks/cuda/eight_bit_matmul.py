"""Products of 8-bit activations on this GPU, beside the fp16 product of packed weights that batches and prompts take.

    python -m benchmarks.cuda.eight_bit_matmul [--rows 64,256,512,2048] [--check]

The four matmuls of a layer of Mistral-7B, microseconds in a CUDA graph that rotates through more weights than the L2
cache holds, for int8 and e4m3:

    fp16      what runs today, on Q4_K
    bytes     weights that are 8-bit numbers already, without any scale: the most that the matrix units give
    codes     codes of 4 bits, exact in both types, unpacked in registers, without any scale
    groups    the same with a scale for each 32 columns of a weight's row and of an activation's row, as the stored
              types have them

`--check` compares the three with torch on small sizes instead, also in Triton's interpreter.
"""

import argparse
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336)}
FORMS = ("bytes", "codes", "groups")
TYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
GROUP = 32


@triton.jit
def _product(
    weights, x, out, weight_scales, x_scales, rows, weight_rows, cols: tl.constexpr, form: tl.constexpr,
    block: tl.constexpr, tokens: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """out [rows, weight_rows] = x [rows, cols] times the weights' rows, a tile of both a program.

    A byte of codes has those of columns c (low) and c + step (high) of its 2 * step columns.
    """
    first = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.program_id(0) * tokens + tl.arange(0, tokens)
    kind: tl.constexpr = x.dtype.element_ty
    sum_kind: tl.constexpr = tl.int32 if kind == tl.int8 else tl.float32
    k = tl.arange(0, step)
    sums = tl.zeros((block, tokens), tl.float32 if form == "groups" else sum_kind)
    x_at = x + row[None, :] * cols + k[:, None]
    is_row = (row < rows)[None, :]
    if form == "bytes":
        at = weights + first[:, None] * cols + k[None, :]
        for _ in range(cols // step):
            sums = tl.dot(tl.load(at), tl.load(x_at, is_row), sums, out_dtype=sum_kind)
            at += step
            x_at += step
    else:
        at = weights + first[:, None] * (cols // 2) + k[None, :]
        of_row = weight_scales + first
        of_x = x_scales + row
        for _ in range(cols // (2 * step)):
            pair = tl.load(at)
            low, high = (pair & 15).to(tl.float16).to(kind), (pair >> 4).to(tl.float16).to(kind)
            x_low, x_high = tl.load(x_at, is_row), tl.load(x_at + step, is_row)
            if form == "groups":
                by = tl.load(of_row)[:, None] * tl.load(of_x, row < rows, other=0.0)[None, :]
                sums += tl.dot(low, x_low, out_dtype=sum_kind).to(tl.float32) * by
                by = tl.load(of_row + weight_rows)[:, None] * tl.load(of_x + rows, row < rows, other=0.0)
                sums += tl.dot(high, x_high, out_dtype=sum_kind).to(tl.float32) * by
                of_row += 2 * weight_rows
                of_x += 2 * rows
            else:
                sums = tl.dot(low, x_low, sums, out_dtype=sum_kind)
                sums = tl.dot(high, x_high, sums, out_dtype=sum_kind)
            at += step
            x_at += 2 * step
    tl.store(out + row[None, :] * weight_rows + first[:, None], sums.to(tl.float32), is_row)


def launch(form: str, weights: Tensor, x: Tensor, scales: tuple[Tensor, Tensor], out: Tensor) -> None:
    """One product. scales: of groups, fp32 [cols / 32, weight rows] and [cols / 32, rows]."""
    rows, cols = x.shape
    tokens = 64 if rows <= 64 else 128 if form == "groups" else 256
    block, step = 128, GROUP if form == "groups" else 128
    grid = -(-rows // tokens), weights.shape[0] // block
    warps = 4 if tokens == 64 else 8
    _product[grid](
        weights, x, out, *scales, rows, weights.shape[0], cols, form, block, tokens, step,
        num_warps=warps, num_stages=4 if form == "bytes" else 3,
    )  # fmt: skip


def operands(
    form: str, kind: torch.dtype, rows: int, weight_rows: int, cols: int, device: str
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
    """Random weights, activations, their scales, and where the result goes."""
    wide = form == "bytes"
    codes = torch.randint(0, 16 if wide else 256, (weight_rows, cols if wide else cols // 2), device=device)
    x = torch.randint(-8, 9, (rows, cols), device=device).to(kind)
    scales = (
        torch.rand(cols // GROUP, weight_rows, device=device),
        torch.rand(cols // GROUP, rows, device=device),
    )
    return codes.to(kind if wide else torch.uint8), x, scales, torch.empty(rows, weight_rows, device=device)


def expected(form: str, weights: Tensor, x: Tensor, scales: tuple[Tensor, Tensor]) -> Tensor:
    """By torch, in float64."""
    x, step = x.double(), GROUP if form == "groups" else 128
    if form == "bytes":
        return x @ weights.double().T
    pairs = weights.unflatten(1, (-1, step))
    codes = torch.cat((pairs & 15, pairs >> 4), dim=2).flatten(1).double()
    if form == "codes":
        return x @ codes.T
    of_row, of_x = (each.double().T.repeat_interleave(GROUP, dim=1) for each in scales)
    return (x * of_x) @ (codes * of_row).T


def check() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, kind in TYPES.items():
        for form in FORMS:
            weights, x, scales, out = operands(form, kind, 70, 256, 512, device)
            launch(form, weights, x, scales, out)
            found = expected(form, weights, x, scales)
            print(f"{name} {form}: relative error {float((out - found).norm() / found.norm()):.1e}")


def fp16_launches(weight_rows: int, cols: int, rows: int) -> list[Callable[[], None]]:
    """The product that runs today, on as many weights as the L2 cache cannot hold."""
    from benchmarks.cuda.cuda_timing import matmul_launch, random_weights
    from quengine.kernels.cuda.gemm.fp16_operand import to_fp16_operand
    from quengine.kernels.cuda.gemm.matmul_fused import SplitScratch

    x = to_fp16_operand(torch.randn(rows, cols, device="cuda")).as_wgmma()
    scratch = SplitScratch("cuda")
    weights = random_weights([("Q4_K", weight_rows)], cols)
    return [matmul_launch("rows", weight, x, scratch)[0] for weight in weights]


def eight_bit_launches(
    form: str, kind: torch.dtype, weight_rows: int, cols: int, rows: int
) -> list[Callable[[], None]]:
    from benchmarks.cuda.cuda_timing import copies_past_l2

    weights, x, scales, out = operands(form, kind, rows, weight_rows, cols, "cuda")
    copies = [weights, *(weights.clone() for _ in range(copies_past_l2(weights.nbytes) - 1))]
    return [lambda each=each: launch(form, each, x, scales, out) for each in copies]  # type: ignore[misc]


def measure(rows: int) -> None:
    from benchmarks.cuda.cuda_timing import graph_time

    totals: dict[str, float] = {}
    for weight_rows, cols in SHAPES.values():
        ways = {"fp16": fp16_launches(weight_rows, cols, rows)} | {
            f"{name} {form}": eight_bit_launches(form, kind, weight_rows, cols, rows)
            for name, kind in TYPES.items()
            for form in FORMS
        }
        for name, launches in ways.items():
            totals[name] = totals.get(name, 0.0) + graph_time(launches) / len(launches)
        ways.clear()
    operations = sum(2 * weight_rows * cols * rows for weight_rows, cols in SHAPES.values())
    line = (f"{name} {us:.0f} us, {operations / us / 1e6:.0f} Top/s" for name, us in totals.items())
    print(f"{rows} rows: {'; '.join(line)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="64,256,512,2048")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        check()
        return
    for rows in map(int, given.rows.split(",")):
        measure(rows)


if __name__ == "__main__":
    sys.exit(main())
