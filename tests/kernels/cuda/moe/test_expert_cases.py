"""What a row of a mixture of experts launches on an H100, and what is read before the wait for the launch in front."""

from tests.fork_server import without_interpreter

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
    names, router, gate_up, down = without_interpreter(LAUNCHES).splitlines()
    assert names == "route_kernel experts_glu_kernel experts_add_kernel"
    assert router == "0 True [] norm_ptr w_ptr"
    assert gate_up == "0 True []"
    assert down == "0 True [] known_experts_ptr low norm_ptr scales supers"
