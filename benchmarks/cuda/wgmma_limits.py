"""What limits the matmul of 64 rows on Hopper: other instructions beside the matrix instruction, and the power limit.

    python -m benchmarks.cuda.wgmma_limits [--seconds 1.0]

First, rounds of 8 matrix instructions (m64n64k16, left operand in registers) and 160 others, by four programs of 4
warps on every multiprocessor: the time of a round over that of its matrix instructions alone. Were both done at once,
it would be the larger of the two; one behind the other, their sum.
Then gate and up of a Mistral-7B in Q4_K with SwiGLU, launched without a pause: microseconds a launch in the first
milliseconds and behind `--seconds`, with the clock and the power that nvidia-smi reports there.
"""

import argparse
import json
import statistics
import subprocess
import time
from itertools import pairwise

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from benchmarks.cuda.cuda_timing import random_weights
from quengine.kernels.cuda.gemm.matmul import matmul_glu
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.rms_norm import rms_norm_fp16

INSTRUCTIONS = {
    "byte permute": "prmt.b32 $0, $1, $2, 0x4140;",
    "and, or, xor": "lop3.b32 $0, $1, $2, $1, 0x96;",
    "add": "add.s32 $0, $1, $2;",
    "two fp16 fma": "fma.rn.f16x2 $0, $1, $2, $2;",
    "fp32 fma": "{.reg .f32 a,b; mov.b32 a,$1; mov.b32 b,$2; fma.rn.f32 a,a,b,b; mov.b32 $0,a;}",
}
PROGRAMS = 4 * 132
ROUNDS = 3000


@gluon.jit
def _rounds_kernel(
    out, OP: gl.constexpr, OTHERS: gl.constexpr, MULTIPLIES: gl.constexpr, ROUNDS: gl.constexpr
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    STAGED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    x = gl.allocate_shared_memory(gl.float16, [64, 128], STAGED)
    w = gl.allocate_shared_memory(gl.float16, [64, 128], STAGED)
    x.store(gl.full([64, 128], 0.0, gl.float16, ROWS))
    w.store(gl.full([64, 128], 0.0, gl.float16, ROWS))
    fence_async_shared()
    tl.debug_barrier()
    acc = gl.zeros([64, 64], gl.float32, MMA)
    a = w.load(A)
    t = gl.arange(0, 128, layout=THREAD)
    words = (t, t + 1, t + 2, t + 3, t + 4, t + 5, t + 6, t + 7)
    for _ in range(ROUNDS):
        for _other in gl.static_range(OTHERS // 8):
            made = ()
            for i in gl.static_range(8):
                word = tl.inline_asm_elementwise(OP, "=r,r,r", [words[i], t], gl.int32, is_pure=False, pack=1)
                made = made + (word,)  # noqa: RUF005 - Triton has no unpacking
            words = made
        if MULTIPLIES:
            acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
    total = words[0]
    for i in gl.static_range(1, 8):
        total ^= words[i]
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, MMA))
    gl.store(out + gl.expand_dims(row * 64, 1) + gl.expand_dims(column, 0), acc.to(gl.int32))
    gl.store(out + 4096 + t, total)


def rounds_ms(op: str, others: int, multiplies: bool) -> float:
    """Median milliseconds of ROUNDS rounds on the whole GPU."""
    out = torch.zeros(8192, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        _rounds_kernel[(PROGRAMS,)](out, op, others, multiplies, ROUNDS, num_warps=4, maxnreg=128)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def overlaps() -> dict[str, dict[str, float]]:
    products = rounds_ms(INSTRUCTIONS["add"], 0, True)
    print(f"a round of products alone: {products / ROUNDS * 1e6:.0f} ns")
    found = {}
    for name, op in INSTRUCTIONS.items():
        alone, both = (rounds_ms(op, 160, multiplies) / products for multiplies in (False, True))
        found[name] = {"alone": alone, "both": both}
        print(f"  160 of {name}: alone {alone:.2f}, both {both:.2f} of it", flush=True)
    return found


def _reported() -> str:
    query = "--query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.active"
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.strip()


def sustained(rows: int, seconds: float) -> dict[str, object]:
    """Microseconds a launch of gate and up: of the first replays of a graph, and of the last."""
    room = MatmulWorkspace(1 << 26, "cuda")
    weights = random_weights([("Q4_K", 28672)], 4096, paired=True)
    hidden = torch.randn(rows, 4096, device="cuda")
    x = rms_norm_fp16(hidden, torch.ones(4096, device="cuda"), 1e-5, room.fp16_operand(rows, 4096))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for weight in weights:
            matmul_glu(x, weight, room, pdl=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(10):
                for weight in weights:
                    matmul_glu(x, weight, room, pdl=True)
        time.sleep(1)
        launches = 10 * len(weights)
        count = max(40, int(seconds / (launches * 30e-6)))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for event in events:
            event.record(stream)
            graph.replay()
        said = []
        while not events[-1].query():
            said.append(_reported())
        torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 / launches for a, b in pairwise(events)]
    first, last = statistics.median(times[1:10]), statistics.median(times[-10:])
    print(
        f"{rows} rows, gate and up: first {first:.1f} us, last {last:.1f}; {said[-1] if said else ''}",
        flush=True,
    )
    return {"rows": rows, "first_us": first, "last_us": last, "reported": said[-3:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    seconds = parser.parse_args().seconds
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(machine)
    found = overlaps()
    lasting = [sustained(rows, seconds) for rows in (8, 64)]
    print(
        json.dumps({"benchmark": "wgmma_limits", "machine": machine, "overlap": found, "sustained": lasting})
    )


if __name__ == "__main__":
    main()
