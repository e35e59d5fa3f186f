"""What a row of a mixture of experts launches on an H100, and what is read before the wait for the launch in front."""

from tests.fork_server import without_interpreter

LAUNCHES = """
from benchmarks.checks import aot
from benchmarks.checks.aot_cases import DEFAULT, plan_of
from quengine.kernels.cuda.aot.aot_compile import compile_launch, record
from quengine.kernels.cuda.aot.aot_ptx import before_wait
from quengine.kernels.cuda.aot.meta_backend import gpu_for
from quengine.kernels.cuda.launch.gpu import assuming
from quengine.models.synthetic.presets import PRESETS
from quengine.runners.graph_keys import decode_key
with assuming(gpu_for(90)):
    (graphs,) = plan_of(PRESETS["qwen3-30b-a3b-2l"]).graphs()
    step = record(lambda: graphs.run_padding(decode_key(1, DEFAULT)))
names = [launch.name for launch in step]
first = names.index("route_kernel")
launches = step[first : names.index("matvec_kernel", first)]
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
