"""Which pages are locked: whole ones, and each once."""

from mmap import PAGESIZE as PAGE

import pytest

from quengine.kernels.offload.pinned import page_ranges


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(PAGE, 2 * PAGE)], [(PAGE, 2 * PAGE)]),
        ([(10, 20)], [(0, PAGE)]),
        ([(5 * PAGE + 1, 5 * PAGE + 9), (PAGE, PAGE + 1)], [(PAGE, 2 * PAGE), (5 * PAGE, 6 * PAGE)]),
        ([(0, PAGE + 1), (PAGE + 1, 3 * PAGE)], [(0, 3 * PAGE)]),
        ([(0, PAGE), (PAGE, 2 * PAGE)], [(0, 2 * PAGE)]),
        ([(0, 9 * PAGE), (PAGE, 2 * PAGE)], [(0, 9 * PAGE)]),
    ],
    ids=["a page", "part of one", "in order", "a page of both", "neighbours", "within another"],
)
def test_pages(spans: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert page_ranges(spans) == expected
