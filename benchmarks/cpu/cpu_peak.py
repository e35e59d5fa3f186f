"""What no kernel can be faster than: products of bytes and of tiles, and bytes read from memory, a second.

    python -m benchmarks.cpu.cpu_peak [-t 2] [-r 5]

Products: a loop of nothing but independent `vpdpbusd`; with AMX also of products of tiles, alone and with a load of a
tile from the L1 cache for each. Memory: loads of a buffer far larger than the caches, asked for 4 KiB ahead, a part for
each thread: in pages of 4 KiB, in huge pages, and of a mapped file that the system holds in memory, as weights are.

`vpdpbusd` multiplies 64 unsigned bytes by 64 signed ones and adds them up by fours, which is what quantized
weights times rounded activations come to on a processor with AVX-512 VNNI. No matmul on bytes can be faster; one that
keeps 16 bits of the activations needs two such products. Prints medians, and one JSON line at the end.
"""

import argparse
import ctypes
import json
import mmap
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import llvmlite.binding as llvm
import torch

from quengine.kernels.cpu.gemm.amx import has_amx
from quengine.platform.machine import cpu_model, physical_cores

CHAINS = 12
"""Independent sums, more than the instruction's latency and two ports ask for."""
MACS = 64
TURNS = 20_000_000
BUFFER = 1 << 30
AHEAD = 4096
TILE_PRODUCTS = 8
TILE_TURNS = 500_000
TILES = {"tdpbf16ps": 16 * 16 * 32, "tdpbssd": 16 * 16 * 64}
"""Products of tiles: the multiplications in one of 16 rows."""
TILE_CASES = [("tdpbf16ps", False, 16), ("tdpbssd", False, 16), ("tdpbssd", True, 16), ("tdpbssd", False, 4)]
HUGE = 2 << 20


def loop_ir() -> str:
    """void loop(i64 turns): CHAINS sums, one instruction each a turn."""
    vector = "<16 x i32>"
    phis = "\n".join(
        f"  %a{i} = phi {vector} [zeroinitializer, %entry], [%b{i}, %body]" for i in range(CHAINS)
    )
    steps = "\n".join(
        f'  %b{i} = call {vector} asm sideeffect "vpdpbusd $2, $1, $0", "=v,v,v,0"'
        f"({vector} %x, {vector} %y, {vector} %a{i})"
        for i in range(CHAINS)
    )
    return f"""
define void @loop(i64 %turns) {{
entry:
  %x = call {vector} asm "vpternlogd $$255, $0, $0, $0", "=v"()
  %y = call {vector} asm "vpxord $0, $0, $0", "=v"()
  br label %body
body:
  %n = phi i64 [0, %entry], [%m, %body]
{phis}
{steps}
  %m = add i64 %n, 1
  %more = icmp ult i64 %m, %turns
  br i1 %more, label %body, label %end
end:
  ret void
}}
"""


def read_ir() -> str:
    """i64 read(i64 address, i64 bytes): the loads' exclusive or; bytes are a multiple of 512."""
    steps, last = [], "%sum"
    for i in range(8):
        steps += [
            f"  %o{i} = add i64 %at, {64 * i + AHEAD}",
            f"  %q{i} = inttoptr i64 %o{i} to ptr",
            f"  call void @llvm.prefetch.p0(ptr %q{i}, i32 0, i32 3, i32 1)",
            f"  %a{i} = add i64 %at, {64 * i}",
            f"  %p{i} = inttoptr i64 %a{i} to ptr",
            f"  %v{i} = load <8 x i64>, ptr %p{i}, align 64",
            f"  %s{i} = xor <8 x i64> {last}, %v{i}",
        ]
        last = f"%s{i}"
    body = "\n".join(steps)
    return f"""
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.vector.reduce.xor.v8i64(<8 x i64>)
define i64 @read(i64 %address, i64 %bytes) {{
entry:
  %end = add i64 %address, %bytes
  br label %body
body:
  %at = phi i64 [%address, %entry], [%next, %body]
  %sum = phi <8 x i64> [zeroinitializer, %entry], [{last}, %body]
{body}
  %next = add i64 %at, 512
  %more = icmp ult i64 %next, %end
  br i1 %more, label %body, label %end_of_loop
end_of_loop:
  %one = call i64 @llvm.vector.reduce.xor.v8i64(<8 x i64> {last})
  ret i64 %one
}}
"""


def tiles_ir(product: str, loads: bool) -> str:
    """void tiles(i64 turns, i64 memory): TILE_PRODUCTS products a turn, four tiles of sums by two pairs of operands.

    memory: 64 bytes of configuration, then, from 64 on, operands.
    """
    steps = []
    for i in range(TILE_PRODUCTS):
        a, b = 4 + i % 2, 6 + i // 2 % 2
        if loads:
            place = 64 + 1024 * (i % 8)
            steps += [
                f"  %l{i} = add i64 %memory, {place}",
                f"  %m{i} = inttoptr i64 %l{i} to ptr",
                f"  call void @llvm.x86.tileloadd64(i8 {a if i % 4 < 2 else b}, ptr %m{i}, i64 64)",
            ]
        steps.append(f"  call void @llvm.x86.{product}(i8 {i % 4}, i8 {a}, i8 {b})")
    zeros = "\n".join(f"  call void @llvm.x86.tilezero(i8 {i})" for i in range(8))
    body = "\n".join(steps)
    return f"""
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.{product}(i8, i8, i8)
define void @tiles(i64 %turns, i64 %memory) {{
entry:
  %place = inttoptr i64 %memory to ptr
  call void @llvm.x86.ldtilecfg(ptr %place)
{zeros}
  br label %body
body:
  %n = phi i64 [0, %entry], [%m, %body]
{body}
  %m = add i64 %n, 1
  %more = icmp ult i64 %m, %turns
  br i1 %more, label %body, label %end
end:
  call void @llvm.x86.tilerelease()
  ret void
}}
"""


def compiled(code: str, name: str, *types: type) -> "tuple[llvm.ExecutionEngine, ctypes._CFuncPtr]":
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    module = llvm.parse_assembly(code)
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return engine, ctypes.CFUNCTYPE(*types)(engine.get_function_address(name))


def seconds(function: "ctypes._CFuncPtr", arguments: Sequence[tuple[int, ...]], rounds: int) -> list[float]:
    """Seconds of each round of calls, each call in its own thread."""
    times = []
    for _ in range(rounds):
        threads = [threading.Thread(target=function, args=of_thread) for of_thread in arguments]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        times.append(time.perf_counter() - began)
    return times


def product_rate(threads: int, rounds: int) -> float:
    """GMAC/s a thread, the median."""
    engine, loop = compiled(loop_ir(), "loop", None, ctypes.c_int64)
    median = statistics.median(seconds(loop, [(TURNS,)] * threads, rounds))
    del engine
    return TURNS * CHAINS * MACS / median / 1e9


def tile_rate(product: str, loads: bool, rows: int, threads: int, rounds: int) -> float:
    """GMAC/s a thread of tiles with `rows` rows of sums, the median."""
    engine, tiles = compiled(tiles_ir(product, loads), "tiles", None, ctypes.c_int64, ctypes.c_int64)
    memories = [torch.zeros(64 + 8 * 1024 + 64, dtype=torch.uint8) for _ in range(threads)]
    places = []
    for memory in memories:
        at = -memory.data_ptr() % 64
        config = memory[at : at + 64]
        config[0], config[16:32:2], config[48:56] = 1, 64, 16
        config[48:54] = rows  # of sums and of the first operands
        places.append(memory.data_ptr() + at)
    times = seconds(tiles, [(TILE_TURNS, place) for place in places], rounds)
    del engine
    return TILE_TURNS * TILE_PRODUCTS * TILES[product] * rows / 16 / statistics.median(times) / 1e9


@contextmanager
def buffers(kind: str) -> Iterator[int]:
    """The address of BUFFER bytes that were written: "pages", "huge pages" or "mapped file"."""
    if kind == "mapped file":
        with tempfile.TemporaryFile() as file:
            for _ in range(BUFFER >> 20):
                file.write(bytes(1 << 20))
            file.flush()
            with mmap.mmap(file.fileno(), BUFFER, access=mmap.ACCESS_COPY) as mapped:
                held = torch.frombuffer(mapped, dtype=torch.uint8)
                yield held.data_ptr()
                del held
        return
    with mmap.mmap(-1, BUFFER + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        mapped.madvise(mmap.MADV_HUGEPAGE if kind == "huge pages" else mmap.MADV_NOHUGEPAGE)
        held = torch.frombuffer(mapped, dtype=torch.uint8).fill_(1)
        yield held.data_ptr() + -held.data_ptr() % HUGE
        del held


def read_rates(threads: int, rounds: int, kind: str) -> tuple[float, float]:
    """GB/s of all threads, the median and the best."""
    engine, read = compiled(read_ir(), "read", ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    part = BUFFER // threads // 512 * 512
    with buffers(kind) as place:
        times = seconds(read, [(place + i * part, part) for i in range(threads)], 3 * rounds)
    del engine
    return tuple(threads * part / of / 1e9 for of in (statistics.median(times), min(times)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-t", "--threads", type=int, default=physical_cores())
    parser.add_argument("-r", "--rounds", type=int, default=5)
    arguments = parser.parse_args()
    facts = {"benchmark": "cpu_peak", "cpu": cpu_model(), "threads": arguments.threads}
    print(f"{cpu_model()}, {arguments.threads} threads")
    for kind in ("pages", "huge pages", "mapped file"):
        median, best = read_rates(arguments.threads, arguments.rounds, kind)
        print(f"memory, {kind}: {median:.1f} GB/s read, best {best:.1f}")
        facts[kind] = {"gb_s_read": median, "best_gb_s_read": best}
    if llvm.get_host_cpu_features().get("avx512vnni"):
        rate = product_rate(arguments.threads, arguments.rounds)
        print(f"products: {rate:.1f} GMAC/s a thread on bytes")
        facts["gmac_s_a_thread"] = rate
    else:
        print("products: not measured, this processor has no AVX-512 VNNI")
    if has_amx():
        facts["tiles"] = {}
        for product, loads, rows in TILE_CASES:
            rate = tile_rate(product, loads, rows, arguments.threads, arguments.rounds)
            name = f"{product}, {rows} rows{', with loads' * loads}"
            print(f"{name}: {rate:.1f} GMAC/s a thread")
            facts["tiles"][name] = rate
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
