"""What a row of a mixture of experts launches on an H100, and what is read before the wait for the launch in front."""

import os
import subprocess
import sys

LAUNCHES = """
from quengine.kernels.cuda.aot import aot
from quengine.kernels.cuda.aot.aot_compile import compile_launch
from quengine.kernels.cuda.aot.aot_ptx import before_wait
(number,) = [n for n, case in enumerate(aot.cases()) if case.name == "qwen3-30b-a3b, experts of Q4_K, decode"]
launches = aot.launches(number, 90)
print(*(launch.name for launch in launches))
for launch in launches:
    made = compile_launch(launch, 90)
    early = before_wait(made.ptx)
    names = sorted({launch.pointers[at] for at in early.reads if at in launch.pointers})
    print(made.stack, early.waits, aot.overlap_faults(launch, early), *names)
"""


def test_a_row_takes_three_launches_and_down_knows_its_experts_early() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES], capture_output=True, text=True, env=environment, timeout=250
    )
    assert done.returncode == 0, done.stderr
    names, router, gate_up, down = done.stdout.splitlines()
    assert names == "route_kernel experts_glu_kernel experts_add_kernel"
    assert router == "0 True [] norm_ptr w_ptr"
    assert gate_up == "0 True []"
    assert down == "0 True [] known_experts_ptr low norm_ptr scales supers"
