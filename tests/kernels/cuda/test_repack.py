"""Stored blocks repacked by a table, against packing by torch: the same planes, for formats of which bits only move."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from quengine.kernels.block_formats import FORMATS, unpack
from quengine.kernels.cuda.moe.expert_weights import pack_experts, pack_gate_up_experts
from quengine.kernels.cuda.weights import packed
from quengine.kernels.cuda.weights.bounds import WeightBounds
from quengine.kernels.cuda.weights.layout import PACKED_FORMATS
from quengine.kernels.cuda.weights.packed import PackedPart, pack
from quengine.kernels.cuda.weights.repack import repack
from quengine.kernels.cuda.weights.repack_table import RepackTable, repack_table
from quengine.kernels.quant_tensor import QuantTensor
from tests.kernels.cuda.gemm.unpack_part import unpack_part
from tests.kernels.cuda.weights import ordinary_weight

OTHERS = {"NVFP4", "NVFP4_SCALED", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "TQ1_0"}
"""Formats whose scales or codes are computed anew where they are packed."""


def experts_of(name: str, rows: int, cols: int, seed: int) -> tuple[list[QuantTensor], torch.Tensor]:
    """Three experts of one tensor, and the whole of it, [3, rows, row bytes]."""
    whole = ordinary_weight(name, 3 * rows, cols, seed)
    return whole.row_slices(rows), whole.data.view(3, rows, -1)


def emptied(part: PackedPart, device: torch.device) -> PackedPart:
    """A part whose planes have other bits, but for the book."""
    low, high, scales, supers = (plane.to(device) for plane in part.planes)
    high = high if part.layout.book else ~high
    return replace(part, low=~low, high=high, scales=~scales, supers=~supers)


def repacked(
    part: PackedPart, first: torch.Tensor, second: torch.Tensor | None, name: str, device: torch.device
) -> PackedPart:
    """The experts in another order, then in their own: every place is written by another expert before."""
    return repacked_in_orders(part, first, second, name, ([2, 0, 1], [0, 1, 2]), device)


def repacked_in_orders(
    part: PackedPart,
    first: torch.Tensor,
    second: torch.Tensor | None,
    name: str,
    orders: Sequence[list[int]],
    device: torch.device,
) -> PackedPart:
    table = repack_table(FORMATS[name], part.cols, device)
    assert table is not None
    made = emptied(part, device)
    for order in orders:
        places = torch.tensor(order, dtype=torch.int32, device=device)
        given = (first.to(device), None if second is None else second.to(device))
        repack(made.planes, *given, places, table)
    return made


@pytest.mark.parametrize("name", [name for name in PACKED_FORMATS if name not in OTHERS])
def test_planes_are_those_of_packing(name: str, device: torch.device) -> None:
    experts, whole = experts_of(name, 32, 512, 0)
    (part,) = pack_experts(experts, "cpu").parts
    assert isinstance(part, PackedPart)
    made = repacked(part, whole, None, name, device)
    for ours, expected in zip(made.planes, part.planes, strict=True):
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("name", ["Q4_K", "MXFP4"])
def test_gate_and_up_share_tiles(name: str, device: torch.device) -> None:
    (gate, gates), (up, ups) = experts_of(name, 24, 256, 0), experts_of(name, 24, 256, 1)
    (part,) = pack_gate_up_experts(gate, up, "cpu").parts
    assert isinstance(part, PackedPart)
    made = repacked(part, gates, ups, name, device)
    for ours, expected in zip(made.planes, part.planes, strict=True):
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize(
    ("name", "rows", "cols"),
    [("MXFP4", 21, 320), ("Q8_0", 17, 160), ("Q6_K", 21, 256), ("Q4_1", 5, 416), ("Q5_0", 19, 288)],
)
def test_padding_is_that_of_packing(name: str, rows: int, cols: int, device: torch.device) -> None:
    """Rows that fill the last tile, and columns that fill the last chunk, of a matrix; those of experts are packed as
    rows of zeros."""
    weight = ordinary_weight(name, rows, cols, 3)
    (part,) = pack(weight, "cpu").parts
    assert isinstance(part, PackedPart)
    made = repacked_in_orders(part, weight.data[None], None, name, ([0],), device)
    for ours, expected in zip(made.planes, part.planes, strict=True):
        assert torch.equal(ours.cpu(), expected)
    experts, whole = experts_of(name, rows, cols, 3)
    (part,) = pack_experts(experts, "cpu").parts
    assert isinstance(part, PackedPart)
    made = repacked(part, whole, None, name, device)
    planes = {plane: getattr(made, plane).cpu() for plane in ("low", "high", "scales", "supers")}
    assert torch.equal(unpack_part(replace(made, **planes)).dequantize(), unpack_part(part).dequantize())


COMPUTED = {"IQ2_S", "IQ3_S", "IQ1_S", "IQ1_M"}
"""Formats whose sub-scales are 2n + 1 of what is stored, which are more than moved bits."""


@pytest.mark.parametrize("name", [name for name in PACKED_FORMATS if name not in OTHERS])
def test_bounds_are_those_of_the_scales(name: str, device: torch.device) -> None:
    """Of two pieces of a matrix with all bit patterns of scales, infinite ones too, whose last tile and chunk are
    padded; a row of zeros alone."""
    fmt, cols = FORMATS[name], 3 * 256 + FORMATS[name].block % 256
    table = repack_table(fmt, cols, device)
    assert table is not None
    assert (table.plain is None) == (name in COMPUTED)
    if table.plain is None:
        return
    generator = torch.Generator().manual_seed(len(name))
    found, expected = WeightBounds.none(device), WeightBounds.none("cpu")
    for rows in (37, 16):
        stored = torch.randint(0, 256, (rows, fmt.row_bytes(cols)), dtype=torch.uint8, generator=generator)
        if rows == 16:
            stored[1:] = 0
        tiles, chunks = -(-rows // 16), -(-stored.shape[1] // table.unit_bytes)
        plain = torch.empty(tiles, chunks, table.plain.shape[1], dtype=torch.uint8, device=device)
        places = torch.zeros(1, dtype=torch.int32, device=device)
        repack([None] * 4 + [plain], stored[None].to(device), None, places, table)
        found.include(plain, fmt)
        expected |= WeightBounds.of(unpack(fmt, stored))
        ours, theirs = found.values.cpu(), expected.values
        assert ours[0] == theirs[0] > 0
        assert float(ours[1]) == pytest.approx(float(theirs[1]), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_weights_that_are_loaded_are_packed_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of one and of several pieces, by themselves, side by side and paired, on a GPU and by torch: the same
    planes and bounds."""
    first, second = (ordinary_weight(name, rows, 1024, rows) for rows in (160, 88))
    alike = [ordinary_weight(name, 152, 1024, seed) for seed in (1, 2)]
    for at_a_time in (1 << 25, 1 << 15):
        for limit in ("_WEIGHTS_AT_A_TIME", "_MOVED_AT_A_TIME"):
            monkeypatch.setattr(packed, limit, at_a_time)
        for given, paired in (([first, second], False), ([second], False), (alike, True), (alike, False)):
            pairs = zip(pack(given, "cuda", paired).parts, pack(given, "cpu", paired).parts, strict=True)
            for ours, expected in pairs:
                assert isinstance(ours, PackedPart) and isinstance(expected, PackedPart)
                for mine, theirs in zip(ours.planes, expected.planes, strict=True):
                    assert torch.equal(mine.cpu(), theirs)
                assert ours.weight_scale == expected.weight_scale
                assert ours.norm == pytest.approx(expected.norm, rel=1e-5)


def repacked_by_table(like: QuantTensor, device: torch.device | str) -> RepackTable | None:
    """In the place of `packed._table_of`: also where kernels run in the interpreter."""
    return repack_table(like.format, like.cols, device)


@pytest.mark.parametrize("name", ["Q4_K", "Q4_1", "IQ2_S"])
def test_loading_by_kernels_packs_alike(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tiles, two at a time, with plain scales and without."""
    weight = ordinary_weight(name, 40, 512, 3)
    (expected,) = pack(weight, "cpu").parts
    monkeypatch.setattr(packed, "_table_of", repacked_by_table)
    for limit in ("_WEIGHTS_AT_A_TIME", "_MOVED_AT_A_TIME"):
        monkeypatch.setattr(packed, limit, 32 * 512)
    (made,) = pack(weight, device).parts
    assert isinstance(made, PackedPart) and isinstance(expected, PackedPart)
    for ours, theirs in zip(made.planes, expected.planes, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert made.weight_scale == expected.weight_scale
    assert made.norm == pytest.approx(expected.norm, rel=1e-5)


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_more_rows_are_repacked_at_a_time_where_torch_unpacks_no_codes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked codes take five bytes a weight and more."""
    monkeypatch.setattr(packed, "_table_of", repacked_by_table)
    moved = packed.rows_at_a_time(ordinary_weight(name, 16, 512, 1)) * 512 == packed._MOVED_AT_A_TIME
    assert moved == (name not in OTHERS | COMPUTED)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_formats_that_packing_computes_have_no_table(name: str) -> None:
    assert repack_table(FORMATS[name], 512) is None
