"""Prompts on 16-bit integers: exact products of rounded activations, whatever the shape and the numbers."""

import pytest
import torch

from quengine.kernels.block_formats import FORMATS, dequantize, unpack
from quengine.kernels.cpu import prompt_linear
from quengine.kernels.cpu.gemm import tile_matmul, vnni
from quengine.kernels.cpu.gemm.vnni import FLUSH, HALF_NORM, vnni_product
from quengine.kernels.quant_tensor import QuantTensor
from tests.kernels.weights import nmse, random_weight

needs_words = pytest.mark.skipif(
    not vnni.has_int16(), reason="this processor multiplies pairs of int16 no faster than fp32"
)


@pytest.fixture(autouse=True)
def no_amx_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_matmul, "has_amx", lambda: False)


def numbers(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows))


@needs_words
@pytest.mark.parametrize("name", FLUSH)
@pytest.mark.parametrize(
    ("weight_rows", "blocks", "rows"), [(37, 3, 13), (96, 1, 8), (21, 2, 1), (49, 2, 530)]
)
def test_prompts_are_their_definition(name: str, weight_rows: int, blocks: int, rows: int) -> None:
    w = random_weight(name, weight_rows, blocks)
    x, addend = numbers(rows, w.cols), numbers(rows, weight_rows)
    expected = vnni_product(x, w)  # an activation halfway between two integers may become the other one
    assert nmse(prompt_linear(x, [w]), expected) <= 5e-10
    assert nmse(prompt_linear(x, [w], addend), expected + addend) <= 5e-10


@needs_words
@pytest.mark.parametrize("name", FLUSH)
def test_rounding_activations_is_all_the_error(name: str) -> None:
    w, x = random_weight(name, 64, 4), numbers(16, 1024)
    exact = x.double() @ dequantize(w.format, w.data).double().T
    assert 1e-10 < nmse(prompt_linear(x, [w]), exact) < 6e-9


@pytest.mark.parametrize("name", FLUSH)
def test_no_sum_can_leave_an_int32(name: str) -> None:
    """The largest sub-scale and code that a format can hold, in every column."""
    fmt, most = FORMATS[name], 0
    for fill in (0, 0x7F, 0x80, 0xFF):
        for codes in (0, 0xFF):
            block = torch.full((1, fmt.nbytes), codes, dtype=torch.uint8)
            for field, (start, stop) in fmt.layout.items():
                if field.startswith("scales"):
                    block[:, start:stop] = fill
            groups = unpack(fmt, block)
            assert groups.sc is not None
            sub = groups.sc.double().abs().max()
            ints = max(map(abs, fmt.table)) if fmt.table else max(fmt.offset, 2**fmt.bits - 1 - fmt.offset)
            most = max(most, int(sub) * ints)
    # No sum is above the product of the norms of what it multiplies; rounding adds up to 0.5 to each activation.
    halves = FLUSH[name] / 128
    weight_norm, activation_norm = most * FLUSH[name] ** 0.5, (HALF_NORM + 0.5 * 128**0.5) * halves**0.5
    assert 0 < weight_norm * activation_norm < 2**31


@needs_words
@pytest.mark.parametrize("name", FLUSH)
@pytest.mark.parametrize("codes", [0, 0xFF])
@pytest.mark.parametrize("sub_scales", [0x7F, 0x80, 0xFF])
def test_large_equal_numbers_are_added_exactly(name: str, codes: int, sub_scales: int) -> None:
    """All sums as large as they get: every activation is the largest, every code and sub-scale too."""
    fmt = FORMATS[name]
    block = torch.full((3, 2 * fmt.nbytes), codes, dtype=torch.uint8)
    for first in (0, fmt.nbytes):
        for field, (start, stop) in fmt.layout.items():
            if field in ("d", "dmin"):
                block[:, first + start : first + stop] = torch.tensor([0.01]).half().view(torch.uint8)
            elif field.startswith("scales"):
                block[:, first + start : first + stop] = sub_scales
    w = QuantTensor("w", fmt, (3, 512), block)
    x = torch.ones(9, 512)
    assert nmse(prompt_linear(x, [w]), vnni_product(x, w)) <= 1e-10


@needs_words
def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    w = random_weight("Q4_K", 20, 2)
    x = numbers(4, 512)
    x[0], x[1, 300], x[2, 7] = 0, float("nan"), float("inf")
    y = prompt_linear(x, [w])
    assert not y[0].any()
    assert y[1].isnan().all() and y[2].isnan().all()
    assert torch.equal(y[3:], prompt_linear(x[3:], [w]))


@needs_words
@pytest.mark.parametrize("power", [-80, -40, 40, 80])
def test_a_power_of_two_of_the_activations_is_one_of_the_result(power: int) -> None:
    w, x = random_weight("Q4_K", 20, 2), numbers(3, 512)
    assert torch.equal(prompt_linear(x * 2.0**power, [w]), prompt_linear(x, [w]) * 2.0**power)


@needs_words
@pytest.mark.parametrize("size", [2.0**-110, 1e-39, 1e-44])
def test_tiny_activations_have_tiny_results(size: float) -> None:
    w, x = random_weight("Q4_K", 20, 2), numbers(3, 512)
    y = prompt_linear(x * size, [w])
    assert (y.double() - size * vnni_product(x, w)).abs().max() < 1e-32


@needs_words
def test_blocks_without_a_scale_weigh_nothing() -> None:
    w = random_weight("Q6_K", 20, 2)
    start, stop = w.format.layout["d"]
    w.data[:, start:stop] = 0
    x = numbers(4, 512)
    assert nmse(prompt_linear(x, [w]), vnni_product(x, w)) <= 1e-10


@needs_words
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_bits_do_not_depend_on_the_strips_of_a_task_or_on_other_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = random_weight(name, 6 * vnni.int16_tile().columns - 7, 2)
    x, addend = numbers(21, w.cols), numbers(21, w.rows)
    results = []
    for most in (1, 2, 4, 8):
        monkeypatch.setattr(tile_matmul, "_strips_of_task", lambda *_, most=most: most)
        results.append(prompt_linear(x, [w], addend))
    assert nmse(results[0], vnni_product(x, w) + addend) <= 5e-10
    assert all(torch.equal(result, results[0]) for result in results)
    for part in (slice(0, 1), slice(7, 10), slice(18, 21)):
        assert torch.equal(prompt_linear(x[part], [w], addend[part]), results[0][part])


@needs_words
@pytest.mark.parametrize("name", FLUSH)
def test_few_rows_have_the_bits_of_many(name: str) -> None:
    """Tiles of every number of rows, and strips over all columns (few rows) or over DEPTH columns at a time (many)."""
    w = random_weight(name, 2 * vnni.int16_tile().columns + 5, 3)
    x = numbers(2 * vnni.FEW_ROWS + 1, w.cols)
    many = prompt_linear(x, [w])
    assert nmse(many, vnni_product(x, w)) <= 5e-10
    for rows in (*range(1, vnni.int16_tile().rows + 2), vnni.FEW_ROWS - 1, vnni.FEW_ROWS, vnni.FEW_ROWS + 1):
        assert torch.equal(prompt_linear(x[:rows], [w]), many[:rows]), rows


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_tasks_leave_no_thread_at_work_alone(threads: int) -> None:
    for strips in range(1, 700):
        size = tile_matmul._strips_of_task(strips, 8, threads)
        at_work = [0] * threads
        for first in range(0, strips, size):  # a thread that is free takes the next task
            at_work[at_work.index(min(at_work))] += min(size, strips - first)
        assert 1 <= size <= 8
        assert size == 1 or max(at_work) <= 1.03 * strips / threads


def test_it_is_for_k_quants_on_a_processor_that_has_the_instruction() -> None:
    assert not vnni.uses_vnni(random_weight("Q4_1", 4, 8))
    assert vnni.uses_vnni(random_weight("Q4_K", 4, 1)) == vnni.has_int16()
