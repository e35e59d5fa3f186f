"""How many products of bytes this processor makes a second: a loop of nothing but independent `vpdpbusd`.

    python -m benchmarks.cpu.cpu_peak [-t 2] [-r 5]

One instruction multiplies 64 unsigned bytes by 64 signed ones and adds them up by fours, which is what quantized
weights times rounded activations come to on a processor with AVX-512 VNNI. No matmul on bytes can be faster; one that
keeps 16 bits of the activations needs two such products. Prints medians, and one JSON line at the end.
"""

import argparse
import ctypes
import json
import statistics
import threading
import time

import llvmlite.binding as llvm

from quengine.platform.machine import cpu_model, physical_cores

CHAINS = 12
"""Independent sums, more than the instruction's latency and two ports ask for."""
MACS = 64
TURNS = 20_000_000


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


def compiled() -> "tuple[llvm.ExecutionEngine, ctypes._CFuncPtr]":
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    module = llvm.parse_assembly(loop_ir())
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return engine, ctypes.CFUNCTYPE(None, ctypes.c_int64)(engine.get_function_address("loop"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-t", "--threads", type=int, default=physical_cores())
    parser.add_argument("-r", "--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not llvm.get_host_cpu_features().get("avx512vnni"):
        raise SystemExit(f"{cpu_model()} has no AVX-512 VNNI; this measures nothing else")
    engine, loop = compiled()
    rates = []
    for _ in range(arguments.rounds):
        threads = [threading.Thread(target=loop, args=(TURNS,)) for _ in range(arguments.threads)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(TURNS * CHAINS * MACS / (time.perf_counter() - began) / 1e9)
    del engine
    rate = statistics.median(rates)
    print(f"{cpu_model()}, {arguments.threads} threads: {rate:.1f} GMAC/s a thread on bytes")
    print(
        json.dumps(
            {
                "benchmark": "cpu_peak",
                "cpu": cpu_model(),
                "threads": arguments.threads,
                "gmac_s_a_thread": rate,
            }
        )
    )


if __name__ == "__main__":
    main()
