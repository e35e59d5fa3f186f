"""Time what hands a row from one kernel to the next: dependent launches, words that say whether they have arrived, and
the same inside one kernel that stays.

    python -m benchmarks.cuda.boundaries

A link reads a whole row that the programs of the link before it have written, 16 values each, adds it up, and writes
16 values of its own. Prints the microseconds of a link, the median of 15 chains of LINKS links:

launch      launches one after the other
dependent   programmatic dependent launch: a program starts early, and waits until the launch before it has ended
words       the same, but a program waits for the values themselves, each of which comes with the number of its link;
            it waits for the end of the launch before only in front of its own writes
flags       the same with plain values, and a flag of each program, stored behind its values
stays       one kernel of all links: values with numbers
stays/flags one kernel of all links: plain values and flags
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from benchmarks.cuda.cuda_timing import graph_time

LINKS, REPLAYS = 160, 15
OWN = tl.constexpr(16)
WAIT, WORDS, FLAGS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _await_words(words_ptr, at, number):
    word = tl.load(words_ptr + at, volatile=True)
    while tl.max(((word >> 32).to(tl.int32) != number).to(tl.int32), 0) != 0:
        word = tl.load(words_ptr + at, volatile=True)
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _flag(flag_ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l",
        [flag_ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _await_flags(flags_ptr, number, PROGRAMS: tl.constexpr):
    at = flags_ptr + tl.arange(0, PROGRAMS)
    while tl.max((_flag(at) != number).to(tl.int32), 0) != 0:
        pass
    tl.debug_barrier()


@triton.jit
def _link(x_ptr, y_ptr, flags_in, flags_out, number, K: tl.constexpr, HOW: tl.constexpr, PDL: tl.constexpr):
    """One link, number `number` of the chain."""
    at = tl.arange(0, K)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    if HOW == WORDS:
        x = _await_words(x_ptr, at, number - 1)
    else:
        if HOW == FLAGS:
            _await_flags(flags_in, number - 1, K // OWN)
        x = tl.load(x_ptr + at, cache_modifier=".cg")
    total = tl.sum(x * x, 0) * (1.0 / K)
    y = tl.zeros([OWN], tl.float32) + total * 0.5 + 0.25
    if PDL and HOW != WAIT:
        tl.extra.cuda.gdc_wait()
    if HOW == WORDS:
        bits = y.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.store(y_ptr + own, (number.to(tl.int64) << 32) | bits)
    else:
        tl.store(y_ptr + own, y)
    if HOW == FLAGS:
        tl.debug_barrier()
        tl.atomic_xchg(flags_out + tl.program_id(0), number, sem="release", scope="gpu")


@triton.jit
def _launched(
    x_ptr, y_ptr, flags_in, flags_out, base_ptr, index, K: tl.constexpr, HOW: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(base_ptr) + index
    if PDL and HOW == WAIT:
        tl.extra.cuda.gdc_wait()
    _link(x_ptr, y_ptr, flags_in, flags_out, number, K, HOW, PDL)


@triton.jit
def _stays(rows_ptr, flags_ptr, base_ptr, K: tl.constexpr, COUNT: tl.constexpr, HOW: tl.constexpr):
    base = tl.load(base_ptr)
    for index in range(1, COUNT + 1):
        near, far = (index - 1) % 3, index % 3
        _link(
            rows_ptr + near * K, rows_ptr + far * K, flags_ptr + near * (K // OWN), flags_ptr + far * (K // OWN),
            base + index, K, HOW, False,
        )  # fmt: skip


@triton.jit
def _begin(rows_ptr, flags_ptr, base_ptr, K: tl.constexpr, STEP: tl.constexpr, HOW: tl.constexpr):
    """The row in front of the first link, under a number of its own for every replay."""
    base = tl.load(base_ptr) + STEP
    at = tl.arange(0, K)
    tl.debug_barrier()
    tl.store(base_ptr, base)
    if HOW == WORDS:
        tl.store(rows_ptr + at, (base.to(tl.int64) << 32) | 0x3F000000)
    else:
        tl.store(rows_ptr + at, 0.5)
    tl.store(flags_ptr + tl.arange(0, K // OWN), base)


def chain(how: str, width: int, warps: int) -> Callable[[], None]:
    """The launches of a chain."""
    programs = width // OWN.value
    kind = WORDS.value if "words" in how or how == "stays" else FLAGS.value if "flags" in how else WAIT.value
    pdl = how in ("dependent", "words", "flags")
    rows = torch.zeros(3, width, dtype=torch.int64 if kind == WORDS.value else torch.float32, device="cuda")
    flags = torch.zeros(3, programs, dtype=torch.int32, device="cuda")
    base = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run() -> None:
        _begin[(1,)](rows, flags, base, K=width, STEP=1000, HOW=kind, num_warps=8)
        if "stays" in how:
            _stays[(programs,)](rows, flags, base, K=width, COUNT=LINKS, HOW=kind, num_warps=warps)
            return
        for index in range(1, LINKS + 1):
            near, far = (index - 1) % 3, index % 3
            early = pdl and index > 2
            _launched[(programs,)](
                rows[near], rows[far], flags[near], flags[far], base, index,
                K=width, HOW=kind, PDL=early,
                num_warps=warps, launch_pdl=early,
            )  # fmt: skip

    return run


def main() -> None:
    hows = ("launch", "dependent", "words", "flags", "stays", "stays/flags")
    print(f"{'values':>7s} {'warps':>5s} " + " ".join(f"{how:>11s}" for how in hows))
    for width, warps in ((2048, 8), (4096, 4)):
        times = [graph_time([chain(how, width, warps)], REPLAYS) / LINKS for how in hows]
        print(f"{width:7d} {warps:5d} " + " ".join(f"{time:11.2f}" for time in times), flush=True)


if __name__ == "__main__":
    main()
