"""Prompts on AMX tiles of bytes: the definition and the layouts anywhere, the product where the processor has them."""

import platform
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS, dequantize, unpack
from quengine.kernels.cpu import prompt_linear, set_threads
from quengine.kernels.cpu.gemm.amx_bytes import (
    FACTORS,
    HALF_BYTES,
    LOW,
    MINS,
    MOST,
    ROW_BYTES,
    SCALE,
    SUMS,
    BytePanelArguments,
    D,
    byte_product,
    has_amx_bytes,
    rounded,
    two_bytes,
)
from quengine.kernels.cpu.gemm.tiles import DEPTH, PackArguments
from quengine.kernels.cpu.runtime.kernel_table import amx_bytes_pack_kernel, amx_bytes_panel_kernel
from quengine.kernels.cpu.runtime.threads import Launch, max_threads, run
from tests.kernels.cpu.test_cpu_amx import SAPPHIRE_RAPIDS
from tests.kernels.cpu.test_cpu_targets import run as run_for_target
from tests.kernels.weights import nmse, randn, random_weight

needs_tiles = pytest.mark.skipif(not has_amx_bytes(), reason="no AMX tiles of bytes, or not allowed")


def integers(w: object) -> Tensor:
    """sc * q * FACTORS of a weight: int64 [N, K]."""
    groups = unpack(w.format, w.data)  # type: ignore[attr-defined]
    assert groups.sc is not None
    ints = groups.ints().view(*groups.sc.shape, -1).long() * groups.sc.unsqueeze(-1).long()
    return ints.flatten(1) * FACTORS[groups.format.name]


@pytest.mark.parametrize("name", FACTORS)
def test_the_definition_is_far_below_the_budget_of_prompts(name: str) -> None:
    w, x = random_weight(name, 64, 4), randn(16, 1024)
    exact = x.double() @ dequantize(w.format, w.data).double().T
    assert 1e-10 < nmse(byte_product(x, w), exact) < 2e-7


@pytest.mark.parametrize("name", FACTORS)
def test_every_integer_has_two_signed_bytes(name: str) -> None:
    """The largest sub-scales and codes that a format can hold."""
    fmt = FORMATS[name]
    for fill in (0, 0x7F, 0x80, 0xFF):
        for codes in (0, 0xFF):
            block = torch.full((1, fmt.nbytes), codes, dtype=torch.uint8)
            for field, (start, stop) in fmt.layout.items():
                if field.startswith("scales"):
                    block[:, start:stop] = fill
            w = random_weight(name, 1, 1)
            w.data[:] = block
            high, low = two_bytes(integers(w))
            assert min(high.min(), low.min()) >= -128 and max(high.max(), low.max()) <= 127
            assert abs(FACTORS[name]) < 256 or not low.any()


@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (37, 512)])
def test_activations_are_packed_as_tiles_of_two_bytes(rows: int, cols: int) -> None:
    x, blocks, panels = randn(rows, cols), -(-rows // 16), cols // DEPTH
    x[1:2, :DEPTH] = 0
    packed = torch.zeros(panels, blocks, 16 * ROW_BYTES, dtype=torch.uint8)
    arguments = PackArguments(x.data_ptr(), 4 * x.stride(0), rows, cols, packed.data_ptr(), blocks)
    run([Launch(amx_bytes_pack_kernel(), arguments, panels * blocks, keep=(x, packed))])

    def part(start: int, stop: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """[rows, panels, ...] of what a block has for its rows."""
        held = packed[..., start:stop].contiguous().view(dtype)
        return held.view(panels, blocks, *shape)

    a, t = rounded(x)
    for place, term in zip((0, LOW), two_bytes(a), strict=True):
        tiles = part(place, place + LOW, torch.int8, 4, 16, 64)  # step, row, column
        assert torch.equal(tiles.permute(1, 3, 0, 2, 4).reshape(-1, panels, DEPTH)[:rows].double(), term)
    scales = part(SCALE, 16 * ROW_BYTES, torch.float32, 16)
    assert torch.equal(scales.permute(1, 2, 0).reshape(-1, panels, 1)[:rows].double(), t)
    terms = part(SUMS, SCALE, torch.bfloat16, 16, 2, 16).permute(1, 2, 0, 3, 4)
    sums = terms.reshape(-1, panels, 2, 16)[:rows].double().sum(2)
    assert nmse(sums, a.view(rows, panels, 16, 16).sum(3) * t) <= 1e-9


@pytest.mark.parametrize("name", FACTORS)
def test_weight_rows_become_tiles_of_two_bytes(name: str) -> None:
    w = random_weight(name, 29, 1)
    panel = torch.zeros(2, HALF_BYTES, dtype=torch.uint8)
    arguments = BytePanelArguments(w.data.data_ptr(), w.data.shape[1], w.rows, panel.data_ptr())
    run([Launch(amx_bytes_panel_kernel(name), arguments, 2, keep=(w, panel))])
    rows = torch.arange(32).clamp(max=w.rows - 1)
    tiles = panel[:, :MINS].contiguous().view(torch.int8).view(2, 4, 2, 16, 16, 4)
    # half, step, term, four, row, column -> term, row, column
    terms = tiles.permute(2, 0, 4, 1, 3, 5).reshape(2, 32, DEPTH)
    for term, expected in zip(terms, two_bytes(integers(w)), strict=True):
        assert torch.equal(term.long(), expected[rows])
    groups = unpack(w.format, w.data)
    d, dmin = panel[:, D:].contiguous().view(torch.float32).view(2, 2, 16).unbind(1)
    assert torch.equal(d.flatten(), (groups.super_scales() * 256 / FACTORS[name])[rows, 0])
    if groups.dmin is not None:
        assert groups.mn is not None
        assert torch.equal(dmin.flatten(), -groups.dmin.float()[rows, 0])
        mins = panel[:, MINS:D].contiguous().view(torch.bfloat16).view(2, 2, 8, 16, 2)
        by_16 = groups.mn.repeat_interleave(FORMATS[name].group // 16, 1)[rows].float()
        for term in range(2):
            assert torch.equal(mins[:, term].permute(0, 2, 1, 3).reshape(32, 16).float(), by_16)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an x86 instruction set")
def test_the_product_compiles_for_a_processor_with_tiles(tmp_path: Path) -> None:
    features = SAPPHIRE_RAPIDS["NUMBA_CPU_FEATURES"] + ",+amx-int8"
    out = run_for_target(tmp_path, "bytes", **{**SAPPHIRE_RAPIDS, "NUMBA_CPU_FEATURES": features})
    # Four steps: three products of terms, of two tiles of weights; and the minimums. Once of a first block, once of
    # the others; LLVM may join their ends.
    counts = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", out)}
    assert 24 < counts["tdpbssd"] <= 48 and 2 <= counts["tdpbf16ps"] <= 4 and counts["ldtilecfg"] == 1


@needs_tiles
@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize(
    ("weight_rows", "blocks", "rows"), [(37, 3, 13), (96, 1, 8), (21, 2, 1), (49, 2, 530), (300, 2, 70)]
)
def test_prompts_are_their_definition(name: str, weight_rows: int, blocks: int, rows: int) -> None:
    w = random_weight(name, weight_rows, blocks)
    x, addend = randn(rows, w.cols), randn(rows, weight_rows, seed=1)
    expected = byte_product(x, w)
    assert nmse(prompt_linear(x, [w]), expected) <= 1e-11
    assert nmse(prompt_linear(x, [w], addend), expected + addend) <= 1e-11
    assert nmse(prompt_linear(x, [w], addend[:1]), expected + addend[:1]) <= 1e-11


@needs_tiles
def test_largest_numbers_overflow_nothing() -> None:
    w = random_weight("Q6_K", 40, 1)
    w.data[:, :192], w.data[:, 192:208] = 0, 0x80  # every q is -32, every sc -128
    x = torch.cat([torch.full((3, DEPTH), 1.0), torch.zeros(2, DEPTH), torch.full((2, DEPTH), 1e30)])
    assert int(rounded(x)[0].max()) == MOST
    assert nmse(prompt_linear(x, [w])[:5], byte_product(x, w)[:5]) <= 1e-11
    assert bool(torch.isfinite(prompt_linear(x, [w])).all())
    x[6, 5] = float("nan")
    assert torch.equal(prompt_linear(x, [w])[:6], prompt_linear(x[:6], [w]))


@needs_tiles
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    w, x = random_weight(name, 203, 3), randn(600, 768)
    y = prompt_linear(x, [w])
    for rows in (slice(0, 1), slice(3, 20), slice(40, 80), slice(47, 80), slice(33, 600)):
        assert torch.equal(prompt_linear(x[rows], [w]), y[rows])
    set_threads(1)
    assert torch.equal(prompt_linear(x, [w]), y)
    set_threads(max_threads())
