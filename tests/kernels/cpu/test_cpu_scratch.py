"""Memory that operations of prompts keep, and sums of rows by the thread team."""

from concurrent.futures import ThreadPoolExecutor

import torch

from quengine.kernels.cpu import add_rows, prompt_linear
from quengine.kernels.cpu.runtime.scratch import scratch
from tests.kernels.weights import randn, random_weight


def test_a_role_keeps_its_memory_until_more_is_requested() -> None:
    first = scratch("test", 3, 5)
    assert first.shape == (3, 5) and first.dtype == torch.float32
    assert scratch("test", 2, 4).data_ptr() == first.data_ptr() != scratch("another test", 2, 4).data_ptr()
    larger = scratch("test", 100, 7)
    assert larger.shape == (100, 7) and scratch("test", 700).data_ptr() == larger.data_ptr()


def test_threads_do_not_share_memory() -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(scratch, "test", 3, 5).result()
    assert other.data_ptr() != scratch("test", 3, 5).data_ptr()


def test_products_are_written_where_requested() -> None:
    parts, x, y = [random_weight("Q4_K", rows, 1, seed=rows) for rows in (40, 7)], randn(9, 256), randn(9, 47)
    assert prompt_linear(x, parts, y=y).data_ptr() == y.data_ptr()
    assert torch.equal(y, prompt_linear(x, parts))


def test_rows_are_added_with_the_bits_of_torch() -> None:
    y, addend = randn(37, 84), randn(37, 168, seed=1)[:, ::2]
    for scale in (1.0, 0.22):
        expected = y + (addend if scale == 1.0 else addend * scale)
        assert torch.equal(add_rows(y.clone(), addend, scale), expected)
