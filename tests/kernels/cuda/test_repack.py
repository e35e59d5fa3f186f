"""Stored blocks repacked by a table, against packing by torch: the same planes, for formats of which bits only move."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.moe.expert_weights import pack_experts, pack_gate_up_experts
from quengine.kernels.cuda.weights.layout import PACKED_FORMATS
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.cuda.weights.repack import repack, repack_table
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
    table = repack_table(FORMATS[name], part.cols)
    assert table is not None
    made = emptied(part, device)
    for order in ([2, 0, 1], [0, 1, 2]):
        places = torch.tensor(order, dtype=torch.int32, device=device)
        given = (first.to(device), None if second is None else second.to(device))
        repack(made, *given, places, first.shape[1], table.to(device))
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


@pytest.mark.parametrize(("name", "rows", "cols"), [("MXFP4", 21, 320), ("Q8_0", 17, 160), ("Q6_K", 21, 256)])
def test_padding_has_no_value(name: str, rows: int, cols: int, device: torch.device) -> None:
    """Rows that fill the last tile, and columns that fill the last chunk."""
    experts, whole = experts_of(name, rows, cols, 3)
    (part,) = pack_experts(experts, "cpu").parts
    assert isinstance(part, PackedPart)
    made = repacked(part, whole, None, name, device)
    expected = unpack_part(part).dequantize()
    own = replace(
        made, **{plane: getattr(made, plane).cpu() for plane in ("low", "high", "scales", "supers")}
    )
    assert torch.equal(unpack_part(own).dequantize(), expected)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_formats_that_packing_computes_have_no_table(name: str) -> None:
    assert repack_table(FORMATS[name], 512) is None
