"""Which kernels a computation launches is known without a GPU, by their names in Triton's cache."""

import torch

from quengine.kernels.cuda.launch.record_kernels import specialized_on
from tests.fork_server import without_interpreter

RECORDED = """
import os, sys, torch, triton
from pathlib import Path
from quengine.kernels.cuda.launch.gpu import Gpu, current_gpu, gpu_of
from quengine.kernels.cuda.launch.record_kernels import record_kernels
from quengine.kernels.cuda.sampling import batch_rows
from quengine.kernels.cuda.sampling.batch_rows import ChosenTokens, RowInputs, SlotTables, StepRows, place_rows

def place(rows):
    wide, narrow = (torch.zeros(rows, dtype=kind, device="meta") for kind in (torch.int64, torch.int32))
    slots, inputs = (kind(wide, narrow, narrow.view(1, -1, 1)) for kind in (SlotTables, RowInputs))
    place_rows(StepRows(*[narrow] * 4), slots, inputs, ChosenTokens(wide.view(1, -1), narrow), rows)

def block(size):
    def call():
        batch_rows._ENTRIES = size
        place(4)
    return call
"""


def test_one_kernel_is_for_all_launches_that_take_its_machine_code() -> None:
    without_interpreter(
        RECORDED
        + """
hopper, ampere = Gpu("", (9, 0)), Gpu("", (8, 0))
before = current_gpu()
one = record_kernels([lambda: place(4)], hopper)
assert [kernel.name for kernel in one.values()] == ["place_kernel"]
assert record_kernels([lambda: place(4), lambda: place(5), lambda: place(400)], hopper).keys() == one.keys()
assert record_kernels([lambda: place(4)], ampere).keys().isdisjoint(one)
two = record_kernels([block(1024), block(64), block(1024)], hopper)
assert len(two) == 2 and one.keys() < two.keys()
assert current_gpu() == before and gpu_of(torch.device("meta")) is None
"""
    )


def test_its_name_is_the_folder_that_triton_keeps_it_in(tmp_path: object) -> None:
    without_interpreter(
        "import os, sys; os.environ['TRITON_CACHE_DIR'] = sys.argv[1]\n"
        + RECORDED
        + """
(kernel,) = record_kernels([lambda: place(4)], Gpu("", (9, 0))).values()
assert not Path(sys.argv[1], kernel.key).exists()
kernel.compile()
assert list(Path(sys.argv[1], kernel.key).glob("*.cubin"))
""",
        tmp_path,
    )


def test_arguments_of_the_same_machine_code_are_looked_up_once() -> None:
    x, y, half = torch.zeros(4), torch.ones(8), torch.zeros(4).half()
    different = [x, half, x[1:], 32, 33, 1, 2**40, 0.5, True, None, (x, half), (x, x[1:])]
    assert len({specialized_on(argument) for argument in different}) == len(different)
    same = [(x, y), (32, 64), (33, 35), (0.5, 2.5), ((x, half), (y, half))]
    for one, other in same:
        assert specialized_on(one) == specialized_on(other)
