"""The codebook of a matrix in shared memory, where 32 lanes that look up entries of their own take some four cycles.

A gather from the L1 cache takes a cycle for each line of the book, 16 for IQ2_XS. Every program copies the book; in
the matvecs its loads are in flight with the first ones of the weights. The copy is static shared memory, which Triton
does not count: where Triton's own part is from 44 to 48 KiB, Triton requests too little for both, and the launch fails.
Plans of the wgmma matmuls avoid that (wgmma_plan.py); the matvecs need only a few KiB beside the book.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _copies(BYTES: int, THREADS: int) -> int:
    """16-byte copies of a thread."""
    return -(-BYTES // (16 * THREADS))


@triton.constexpr_function
def _begin_assembly(BYTES: int, THREADS: int) -> str:
    """Declares the memory ($0 becomes its address), and loads this thread's part into the other results."""
    count = _copies(BYTES, THREADS)
    table = 2 * count + 1
    lines = [f"{{ .shared .align 16 .b8 book[{BYTES}]; .reg .b32 at; .reg .b64 from; .reg .pred inside;"]
    lines += ["mov.u32 $0, book; mov.u32 at, %tid.x;", f"setp.lt.u32 inside, at, {BYTES // 16};"]
    lines += [f"mad.wide.u32 from, at, 16, ${table};"]
    for i in range(count):
        lines += [f"@inside ld.global.nc.v2.b64 {{${2 * i + 1}, ${2 * i + 2}}}, [from + {16 * THREADS * i}];"]
    return " ".join(lines) + " }"


@triton.constexpr_function
def _end_assembly(BYTES: int, THREADS: int) -> str:
    """Stores what was loaded. $0: the address."""
    count = _copies(BYTES, THREADS)
    lines = [
        "{ .reg .b32 at; .reg .pred inside; mov.u32 at, %tid.x;",
        f"setp.lt.u32 inside, at, {BYTES // 16};",
    ]
    lines += ["mad.lo.u32 at, at, 16, $1;"]
    for i in range(count):
        lines += [f"@inside st.shared.v2.b64 [at + {16 * THREADS * i}], {{${2 * i + 2}, ${2 * i + 3}}};"]
    return " ".join(lines) + " mov.b32 $0, $1; }"


@triton.constexpr_function
def _operands(first: str, words: str, count: int, last: str) -> str:
    return ",".join([first] + [words] * (2 * count) + [last] * bool(last))


@triton.constexpr_function
def _types(count: int) -> tuple[tl.dtype, ...]:
    return (tl.int32, *[tl.int64] * (2 * count))


@triton.jit
def begin_book(table, FMT: tl.constexpr, THREADS: tl.constexpr, ASM: tl.constexpr):
    """Starts copying the book `table` to shared memory, with all THREADS threads of the program, a power of two from 32
    on: what `end_book` takes. Called once in a program, by every thread.
    """
    BYTES: tl.constexpr = FMT.staged_bytes
    COUNT: tl.constexpr = _copies(BYTES, THREADS)
    if BYTES == 0 or not ASM:
        return (table,)
    else:
        return tl.inline_asm_elementwise(
            _begin_assembly(BYTES, THREADS), _operands("=r", "=l", COUNT, "l"), [table.to(tl.int64)],
            dtype=_types(COUNT), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def end_book(begun, FMT: tl.constexpr, THREADS: tl.constexpr, ASM: tl.constexpr):
    """Ends what `begin_book` began: the book for `load_entry`, an address in shared memory or a pointer."""
    BYTES: tl.constexpr = FMT.staged_bytes
    if BYTES == 0 or not ASM:
        return begun[0]
    else:
        COUNT: tl.constexpr = _copies(BYTES, THREADS)
        book = tl.inline_asm_elementwise(
            _end_assembly(BYTES, THREADS), _operands("=r,r", "l", COUNT, ""), begun,
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()
        # Look-ups, which know nothing of the barrier, need the address that this makes after it.
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [book], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def with_staged_book(planes, FMT: tl.constexpr, THREADS: tl.constexpr):
    """The planes of a matrix, on NVIDIA GPUs, with its book, if it has one, in shared memory. Parameters: see
    `begin_book`.
    """
    book = end_book(begin_book(planes[1], FMT, THREADS, True), FMT, THREADS, True)
    return planes[0], book, planes[2], planes[3]
