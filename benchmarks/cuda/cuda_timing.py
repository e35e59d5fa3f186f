"""Device times of launches, from CUDA graphs: what the benchmarks of the CUDA kernels share."""

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.gemm.matmul_fused import MatmulMode, SplitScratch
from quengine.kernels.cuda.gemm.matmul_wgmma import launch_wgmma, launch_wgmma_glu
from quengine.kernels.cuda.weights.book_planes import device_book
from quengine.kernels.cuda.weights.layout import ScaleKind, packed_layout
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight

L2_BYTES = 64 << 20
COPY_BYTES_PER_SECOND = 4.3e12
"""What a large device-to-device copy reaches on an H200, bytes read and written counted."""


def captured(
    launches: Sequence[Callable[[], object]],
) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """All of `launches`, in order, as one CUDA graph, replayed once, and the stream to replay it on."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes what the launches read
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        graph.replay()
        torch.cuda.synchronize()
    return stream, graph


def graph_time(launches: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Median microseconds for all of `launches`, in order, replayed from one CUDA graph."""
    stream, graph = captured(launches)
    with torch.cuda.stream(stream):
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def launch_time(launches: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of one of `launches`, run one after the other; several on different data pass the caches."""
    return graph_time(launches, 20) / len(launches)


def matmul_launch(
    kind: str, weight: PackedWeight, x: Fp16Operand, scratch: SplitScratch
) -> tuple[Callable[[], None], torch.Tensor]:
    """A launch of Hopper's matmul of rows in the WGMMA layout, and where its result goes. kind: "rows", "added" (to a
    residual) or "swiglu"."""
    part, mode = weight.parts[0], MatmulMode(pdl=True)
    assert isinstance(part, PackedPart)
    if kind == "swiglu":
        gated = Fp16Operand.empty(x.rows, part.rows // 2, "cuda", OperandLayout.WGMMA)
        return lambda: launch_wgmma_glu(x, part, "silu", gated, scratch, mode), gated.values
    out = torch.zeros(x.rows, part.rows, device="cuda")
    residual = torch.zeros_like(out) if kind == "added" else None
    return lambda: launch_wgmma(x, part, False, out, 0, scratch, mode, residual), out


def compile_ahead(benchmark: str, arguments: Sequence[str], shares: Sequence[str]) -> None:
    """Run a module of benchmarks once for each share with `--compile SHARE`, all at a time: compiling takes long, and
    timing does not wait for it then. Raises SystemExit where one fails."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments, "--compile"]
    running = [subprocess.Popen([*command, share]) for share in shares]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit("a compile worker failed")


def random_part(name: str, rows: int, cols: int, device: str = "cuda") -> PackedPart:
    """A packed part with random codes and scales of ordinary size, made on the device."""
    layout = packed_layout(FORMATS[name], cols)
    tiles, chunks = -(-rows // 16), -(-cols // layout.chunk)

    def random_bytes(size: int) -> torch.Tensor:
        return torch.randint(0, 256, (tiles, chunks, size), dtype=torch.uint8, device=device)

    scales, supers = random_bytes(layout.scale_bytes), random_bytes(layout.super_bytes)
    for plane, halves in ((scales, layout.scales in (0, 1)), (supers, True)):
        if halves and plane.numel():
            plane.view(torch.float16).uniform_(1e-4, 1e-3)
    if layout.scales == ScaleKind.E8M0:
        scales.random_(112, 120)
    if layout.scales == ScaleKind.E4M3:
        scales.random_(16, 64)
        if supers.numel():
            supers.view(torch.float32).fill_(1.0)
    book = FORMATS[name].book
    high = device_book(book, device) if book else random_bytes(layout.high_bytes)
    planes = (random_bytes(layout.low_bytes), high, scales, supers)
    return PackedPart(layout, rows, cols, *planes, weight_scale=1.0, norm=float(cols))


def copies_past_l2(nbytes: int) -> int:
    """How many copies of a weight to rotate through so that none is still in the L2 cache."""
    return max(3, min(16, -(-3 * L2_BYTES // nbytes)))


def random_weights(
    formats: Sequence[tuple[str, int]], cols: int, paired: bool = False, copies: int | None = None
) -> list[PackedWeight]:
    """`copies` random weights of (format, rows) parts; by default as many as the L2 cache cannot hold."""

    def make() -> PackedWeight:
        return PackedWeight(tuple(random_part(name, rows, cols) for name, rows in formats), paired)

    first = make()
    count = copies_past_l2(first.nbytes) if copies is None else copies
    return [first, *(make() for _ in range(count - 1))]
