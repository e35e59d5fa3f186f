"""How many programs a launch of Hopper's matmul has where they share the columns of some blocks."""

import pytest

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.gemm.wgmma_plan import GRANTED_BYTES, WgmmaFlags, wgmma_plan, wgmma_plan_two_parts
from quengine.kernels.cuda.glu import ROWS
from quengine.kernels.cuda.weights.geometry import WgmmaGeometry
from quengine.kernels.cuda.weights.layout import packed_layout

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
