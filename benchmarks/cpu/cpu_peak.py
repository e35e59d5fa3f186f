"""What no kernel can be faster than: products of bytes, and bytes read from memory, a second.

    python -m benchmarks.cpu.cpu_peak [-t 2] [-r 5]

Products: a loop of nothing but independent `vpdpbusd`. Memory: loads of a buffer far larger than the caches, asked for
4 KiB ahead, a part for each thread.

`vpdpbusd` multiplies 64 unsigned bytes by 64 signed ones and adds them up by fours, which is what quantized
weights times rounded activations come to on a processor with AVX-512 VNNI. No matmul on bytes can be faster; one that
keeps 16 bits of the activations needs two such products. Prints medians, and one JSON line at the end.
"""

import argparse
import ctypes
import json
import statistics
import threading
import time
from collections.abc import Sequence

import llvmlite.binding as llvm
import torch

from quengine.platform.machine import cpu_model, physical_cores

CHAINS = 12
"""Independent sums, more than the instruction's latency and two ports ask for."""
MACS = 64
TURNS = 20_000_000
BUFFER = 1 << 29
AHEAD = 4096


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
    """Of each round of calls, each in a thread of its own."""
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


def read_rates(threads: int, rounds: int) -> tuple[float, float]:
    """GB/s of all threads, the median and the best."""
    engine, read = compiled(read_ir(), "read", ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    buffer = torch.ones(BUFFER, dtype=torch.uint8)
    part = BUFFER // threads // 512 * 512
    parts = [(buffer.data_ptr() + i * part, part) for i in range(threads)]
    times = seconds(read, parts, 3 * rounds)
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
    median, best = read_rates(arguments.threads, arguments.rounds)
    print(f"memory: {median:.1f} GB/s read, best {best:.1f}")
    facts |= {"gb_s_read": median, "best_gb_s_read": best}
    if llvm.get_host_cpu_features().get("avx512vnni"):
        rate = product_rate(arguments.threads, arguments.rounds)
        print(f"products: {rate:.1f} GMAC/s a thread on bytes")
        facts["gmac_s_a_thread"] = rate
    else:
        print("products: not measured, this processor has no AVX-512 VNNI")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
