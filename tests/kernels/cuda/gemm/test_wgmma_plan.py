"""How many programs a launch of Hopper's matmul has where they share the columns of some blocks."""

import pytest

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.gemm.wgmma_plan import (
    GRANTED_BYTES,
    MOST_WAITING,
    WgmmaFlags,
    WgmmaProgram,
    wgmma_plan,
    wgmma_plan_two_parts,
)
from quengine.kernels.cuda.glu import ROWS
from quengine.kernels.cuda.launch import gpu
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry
from quengine.kernels.cuda.weights.layout import packed_layout
from tests.fork_server import without_interpreter

FLAGS = WgmmaFlags(ROWS.value, False, True, False)


@pytest.mark.parametrize(
    ("geometry", "grid", "sharing", "counters"),
    [
        (WgmmaGeometry(8, 1, 3, block=256), (112,), (112, 1, 16), 0),
        (WgmmaGeometry(8, 3, 3, block=256, whole=100), (100 + 12 * 3,), (100, 3, 6), 12),
        (WgmmaGeometry(8, 3, 3, block=256, in_turn=True), (112,), (112, 3, 6), 0),
        (
            WgmmaGeometry(8, 5, 3, block=256),
            (112 * 4,),
            (0, 4, 4),
            112,
        ),  # of 16 chunks 4 programs have 4 each
        (WgmmaGeometry(8, 2, 3, block=256, whole=100, groups=True), (100 + 12 * 2,), (100, 2, 8), 24),
        (WgmmaGeometry(8, 1, 3, block=256, whole=1000, groups=True), (112,), (112, 1, 16), 0),
    ],
    ids=str,
)
def test_blocks_behind_the_whole_ones_are_shared(
    geometry: WgmmaGeometry, grid: tuple[int, ...], sharing: tuple[int, int, int], counters: int
) -> None:
    """7168 x 4096 by 300 rows: 56 blocks of 128 weight rows, 2 of 256 rows of x. Two groups count arrivals each."""
    plan = wgmma_plan(geometry, packed_layout(FORMATS["Q4_K"], 4096), 7168, 4096, 300, FLAGS)
    assert (plan.grid, plan.sharing, plan.blocks) == (grid, sharing, counters)
    assert plan.partial == (grid[0] - sharing[0]) * 128 * 256


def test_one_compiled_kernel_takes_any_number_of_shares() -> None:
    layout = packed_layout(FORMATS["Q4_K"], 4096)
    shares = ((2, 0), (3, 7), (1, 1000))
    geometries = [
        WgmmaGeometry(8, splits, 3, block=256, whole=whole, groups=True) for splits, whole in shares
    ]
    plans = [wgmma_plan(geometry, layout, 7168, 4096, 300, FLAGS) for geometry in geometries]
    assert len({plan.constants.named["P"] for plan in plans}) == 1
    assert {plan.constants.named["num_warps"] for plan in plans} == {4}


@pytest.mark.parametrize("book", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
@pytest.mark.parametrize("beside", ["Q4_K", "IQ2_S"])
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
def test_a_launch_has_the_shared_memory_of_codebooks(book: str, beside: str, rows: int) -> None:
    """Triton requests more than GRANTED_BYTES only where the part that it counts is larger."""
    layout, other = (packed_layout(FORMATS[name], 4096) for name in (book, beside))
    assert layout.staged_bytes == layout.book_bytes > 0
    for stages in range(1, 26):
        geometry = WgmmaGeometry(4, 1, stages)
        one = wgmma_plan(geometry, layout, 4096, 4096, rows, FLAGS).constants.named["P"]
        two = wgmma_plan_two_parts(geometry, (other, layout), (4096, 1024), 4096, rows, FLAGS)
        both = layout.staged_bytes + other.staged_bytes
        for program, books in ((one, layout.staged_bytes), (two.constants.named["P"], both)):
            own = program.stages * (2 * program.block * program.columns + 8)
            assert program.stages >= stages
            assert own > GRANTED_BYTES or own + books <= GRANTED_BYTES


def test_stages_are_added_only_for_codebooks_that_would_not_fit() -> None:
    """Eleven sets of 16 rows are 44 KiB; a book of 4 KiB fits ten, and twelve with their barriers are over 48."""
    counts = {}
    for name in ("Q4_K", "IQ1_S", "IQ2_XS", "IQ2_S"):
        plan = wgmma_plan(WgmmaGeometry(4, 1, 11), packed_layout(FORMATS[name], 4096), 4096, 4096, 16, FLAGS)
        counts[name] = plan.constants.named["P"].stages
    assert counts == {"Q4_K": 11, "IQ1_S": 11, "IQ2_XS": 11, "IQ2_S": 12}


def all_start(grid: tuple[int, ...], program: WgmmaProgram, places: int) -> bool:
    """Whether all programs of a grid start where `places` of them run at a time, in the order of their numbers."""
    splits, blocks = grid
    waiting = started = 0
    while started < splits * blocks and waiting < places:
        split = started % splits
        started += 1
        # The last of a block lets all of it end, before any of the next starts to wait.
        waiting = (
            0 if split == splits - 1 else waiting + (program.parts > 1 and split >= program.first_adding)
        )
    return started == splits * blocks


@pytest.mark.parametrize("rows", [17, 33, 65, 128])
@pytest.mark.parametrize("splits", [2, 5, 8, 16, 23, 64, 256])
@pytest.mark.parametrize("weight_rows", [64, 200])
def test_programs_that_wait_leave_room_for_those_that_they_wait_for(
    rows: int, splits: int, weight_rows: int
) -> None:
    geometry, layout = WgmmaGeometry(4, splits, 3, False, 128), packed_layout(FORMATS["Q4_K"], 1 << 17)
    plan = wgmma_plan(geometry, layout, weight_rows, 1 << 17, rows, FLAGS._replace(waiting=True))
    program = plan.constants.named["P"]
    assert isinstance(program, WgmmaProgram)
    assert 1 < program.parts <= min(program.splits, MOST_WAITING)
    assert all_start(plan.grid, program, program.parts)
    assert not all_start(plan.grid, program, program.parts - 1)


LAUNCHED = """
import sys, torch
from quengine.kernels.cuda.aot.meta_backend import META, empty, packed_part
from quengine.kernels.cuda.gemm import matmul_wgmma
from quengine.kernels.cuda.gemm.matmul import matmul, matmul_glu
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.launch import gpu
from quengine.kernels.cuda.launch.triton_changes import launches_handed_to
from quengine.kernels.cuda.lora import rank_matmul
from quengine.kernels.cuda.lora.low_rank import CudaChanges, LowRankScratch
from quengine.kernels.cuda.weights.packed import PackedWeight
from quengine.kernels.lora.low_rank import Changes

def note(kernel, grid, args, named):
    if kernel.__name__.startswith(("_wgmma", "_rank")):
        print(*[named[name].parts for name in ("P", "P_2") if named.get(name)])

matmul_wgmma.runs_together = rank_matmul.runs_together = lambda programs: programs <= int(sys.argv[1])
with gpu.assuming(gpu.Gpu("", (9, 0))), launches_handed_to(note):
    room, x = MatmulWorkspace(1 << 24, META), empty(64, 8192)
    parts = [packed_part(name, 1024, 8192) for name in ("Q4_K", "Q6_K", "Q5_K")]
    matmul(x, PackedWeight((*parts[:1],)), room)
    matmul(x, PackedWeight((*parts[:2],)), room)
    matmul(x, PackedWeight((*parts,)), room)
    matmul_glu(x, PackedWeight((*parts[:1],), paired=True), room)
    half = dict(dtype=torch.float16)
    changes = CudaChanges.of(Changes((1024,), empty(1, 2, 16, 8192, **half), empty(1024, 2, 16, **half)), META)
    rank_matmul.rank_matmul(
        room.fp16_operand(64, 8192), PackedWeight((*parts[:1],)), changes, empty(2, 64), room, LowRankScratch(META)
    )
"""


@pytest.mark.parametrize(("multiprocessors", "parts"), [(16, "8"), (15, "1")])
def test_programs_wait_only_on_a_gpu_that_runs_enough_of_them(multiprocessors: int, parts: str) -> None:
    """In a process without Triton's interpreter, which runs what it is to record."""
    launched = without_interpreter(LAUNCHED, multiprocessors).split()
    assert len(launched) == 1 + 2 + 3 + 1 + 1 and set(launched) == {parts}


def test_a_gpu_runs_as_many_programs_as_it_has_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_multiprocessors", lambda: 14)
    assert gpu.runs_together(14) and not gpu.runs_together(15)
    with gpu.assuming(gpu.Gpu("", (9, 0))):
        assert gpu.runs_together(15)
