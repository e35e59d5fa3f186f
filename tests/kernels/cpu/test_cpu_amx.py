"""Matmul on AMX tiles (AMX): its definition and layouts anywhere, the product where the processor has them."""

import platform
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.cpu import prompt_linear, set_threads
from quengine.kernels.cpu.gemm import tile_matmul
from quengine.kernels.cpu.gemm.amx import ONE_TERM, has_amx, two_term_product, two_terms
from quengine.kernels.cpu.gemm.tiles import DEPTH, PackArguments, PanelArguments
from quengine.kernels.cpu.runtime.kernel_table import amx_pack_kernel, amx_panel_kernel
from quengine.kernels.cpu.runtime.threads import Launch, max_threads, run
from tests.kernels.cpu.test_cpu_targets import run as run_for_target
from tests.kernels.cpu.tile_emulator import CASES
from tests.kernels.weights import nmse, random_weight

SAPPHIRE_RAPIDS = {
    "NUMBA_CPU_NAME": "sapphirerapids",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+amx-tile,+amx-bf16",
}


@pytest.fixture(autouse=True)
def no_tiles_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_matmul, "uses_amx_bytes", lambda _: False)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def bf16(bits: Tensor) -> Tensor:
    """int16 that are the bits of bf16, as fp32."""
    return bits.view(torch.bfloat16).float()


def test_two_terms_hold_sixteen_bits() -> None:
    x = torch.cat([numbers(1000), torch.tensor([0.0, -0.0, 1e30, 3.4028235e38, -1e-30])])
    high, low = two_terms(x)
    assert torch.equal(high, high.bfloat16().float()) and torch.equal(low, low.bfloat16().float())
    assert bool(((x - high - low).abs() <= 2.0**-15 * x.abs()).all())


def test_the_definition_is_far_below_the_budget_of_prompts() -> None:
    x, w = numbers(40, 4096), numbers(50, 4096)
    assert nmse(two_term_product(x, w), x.double() @ w.double().T) <= 1e-9


@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (37, 300), (64, 512)])
def test_activations_are_packed_as_tiles_of_two_terms(rows: int, cols: int) -> None:
    x = numbers(rows, cols)
    panels, blocks = -(-cols // DEPTH), -(-rows // 32)
    packed = torch.full((panels * blocks * 32 * DEPTH,), 7.0)
    arguments = PackArguments(x.data_ptr(), 4 * x.stride(0), rows, cols, packed.data_ptr(), blocks)
    run([Launch(amx_pack_kernel(), arguments, panels * blocks, keep=(x, packed))])
    # panel, block, step, half, term, pair, row, half of the step -> term, row of x, column
    tiles = packed.view(torch.int16).view(panels, blocks, DEPTH // 32, 2, 2, 16, 16, 2)
    terms = bf16(tiles.permute(4, 1, 3, 6, 0, 2, 7, 5).reshape(2, blocks * 32, panels * DEPTH).contiguous())
    whole = -(-cols // 32) * 32
    assert not terms[:, :, cols:whole].any()
    filled = torch.cat([x, x[-1:].expand(blocks * 32 - rows, cols)])
    for term, expected in zip(terms, two_terms(filled), strict=True):
        assert torch.equal(term[:, :cols], expected)


@pytest.mark.parametrize(
    ("name", "depth"), [("Q4_K", DEPTH), ("Q6_K", DEPTH), ("Q8_0", 96), ("F16", DEPTH), ("F32", 44)]
)
def test_weight_rows_become_tiles_of_two_terms(name: str, depth: int) -> None:
    w = random_weight(name, 29, depth // FORMATS[name].block)
    tiles = torch.full((32 * DEPTH,), 7.0)
    arguments = PanelArguments(w.data.data_ptr(), w.data.shape[1], w.rows, depth, tiles.data_ptr())
    run([Launch(amx_panel_kernel(name), arguments, 2, keep=(w, tiles))])
    # half, step, term, row, column of a pair, half of the step -> term, row, column
    found = tiles.view(torch.int16).view(2, DEPTH // 32, 2, 16, 16, 2)
    terms = bf16(found.permute(2, 0, 3, 1, 5, 4).reshape(2, 32, DEPTH).contiguous())
    assert not terms[:, :, depth : -(-depth // 32) * 32].any()
    weights = dequantize(w.format, w.data)[torch.arange(32).clamp(max=w.rows - 1)]
    for term, expected in zip(terms, two_terms(weights), strict=True):
        assert torch.equal(term[:, :depth], expected)


@pytest.mark.parametrize("name", sorted(ONE_TERM))
def test_weights_of_one_term_are_bf16(name: str) -> None:
    assert not two_terms(dequantize(FORMATS[name], random_weight(name, 64, 8).data))[1].any()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an x86 instruction set")
def test_the_product_compiles_for_a_processor_with_tiles(tmp_path: Path) -> None:
    out = run_for_target(tmp_path, "matrix", **SAPPHIRE_RAPIDS)
    # Of steps and of a last one, for 16 rows and for 32: three products of terms, of two tiles of sums and of four.
    ((products, *once),) = re.findall(r"tdpbf16ps (\d+), ldtilecfg (\d+), tilerelease (\d+)", out)
    assert int(products) >= 36 and int(products) % 6 == 0
    assert once == ["1", "1"]


def test_the_product_is_its_definition_with_emulated_tiles(tmp_path: Path) -> None:
    """Of kernels compiled without optimization, in half the time: they do the same."""
    out = run_for_target(tmp_path, "emulate", NUMBA_OPT="0")
    assert out.strip() == "8 weights in bf16, 4 in bytes, 3 attentions, 3 steps"


@pytest.mark.skipif(not has_amx(), reason="no AMX tiles on this processor, or not allowed")
@pytest.mark.parametrize(("name", "weight_rows", "cols", "rows"), CASES)
def test_prompts_on_tiles_are_their_definition(name: str, weight_rows: int, cols: int, rows: int) -> None:
    w = random_weight(name, weight_rows, cols // FORMATS[name].block)
    x, addend = numbers(rows, w.cols), numbers(rows, weight_rows)
    values = dequantize(w.format, w.data)
    expected = two_term_product(x, values)
    assert nmse(prompt_linear(x, [w]), expected) <= 1e-11
    assert nmse(prompt_linear(x, [w], addend), expected + addend) <= 1e-11


@pytest.mark.skipif(not has_amx(), reason="no AMX tiles on this processor, or not allowed")
def test_tiles_give_a_row_the_same_bits_in_any_company() -> None:
    w, x = random_weight("Q4_K", 203, 3), numbers(80, 768)
    y = prompt_linear(x, [w])
    for rows in (slice(0, 1), slice(3, 20), slice(40, 80), slice(47, 80)):
        assert torch.equal(prompt_linear(x[rows], [w]), y[rows])
    set_threads(1)
    assert torch.equal(prompt_linear(x, [w]), y)
    set_threads(max_threads())
