"""Packed planes give back what was stored, bit for bit, and take hardly more room than the file."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.block_formats import FORMATS, Groups, dequantize, unpack
from quengine.kernels.cuda.weights import packed, planes
from quengine.kernels.cuda.weights.lanes import by_lane
from quengine.kernels.cuda.weights.layout import PACKED_FORMATS, packed_layout
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart, pack
from quengine.kernels.quant_tensor import QuantTensor
from tests.each_case import each_case
from tests.kernels.cuda.gemm.unpack_part import unpack_part
from tests.kernels.cuda.weights import ordinary_weight


def random_weight(name: str, rows: int, cols: int, seed: int = 0) -> QuantTensor:
    """Every byte random: all codes, sub-scales and scale bit patterns occur (but not NaN in an added minimum,
    which is negated: a NaN's sign is not defined)."""
    generator = torch.Generator().manual_seed(seed)
    fmt = FORMATS[name]
    data = torch.randint(0, 256, (rows, fmt.row_bytes(cols)), dtype=torch.uint8, generator=generator)
    if "min" in fmt.layout:
        data.view(rows, -1, fmt.nbytes)[..., fmt.layout["min"][1] - 1] &= 0xBF
    return QuantTensor(name, fmt, (rows, cols), data)


def bits(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same(ours: Groups, stored: Groups) -> None:
    for field in ("codes", "d", "sc", "dmin", "mn", "top", "index", "signs"):
        mine, theirs = bits(getattr(ours, field)), bits(getattr(stored, field))
        assert (mine is None) == (theirs is None), field
        assert mine is None or torch.equal(mine.cpu(), theirs), field


@pytest.mark.parametrize("name", PACKED_FORMATS)
@each_case(("rows", "blocks"), [(1, 1), (16, 3), (37, 5), (48, 8)])
def test_unpacking_gives_back_the_stored_integers(
    name: str, rows: int, blocks: int, device: torch.device
) -> None:
    weight = random_weight(name, rows, blocks * FORMATS[name].block, seed=rows)
    (part,) = pack(weight, device).parts
    assert isinstance(part, PackedPart)
    stored = unpack(weight.format, weight.data)
    if name.startswith("NVFP4"):  # the code of NaN is 0
        stored = replace(stored, d=stored.d.masked_fill(stored.d == 127, 0))
    assert_same(unpack_part(part), stored)


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_a_lane_holds_32_neighbouring_columns_of_a_block_and_their_scales(name: str) -> None:
    layout = packed_layout(FORMATS[name], 256)
    columns = torch.arange(256, dtype=torch.uint8).expand(16, 256)
    (held,) = planes.to_fragments(columns, layout)[0]  # [steps, 32 lanes, 2 halves, 2 rh, 4 columns]
    block, step = torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(1, 4, 1, 1)
    first = (128 * block + 8 * step + 32 * (torch.arange(32) % 4).view(1, 1, 32, 1)).view(8, 32, 1)
    for rh in (0, 1):
        assert torch.equal(held[..., rh, :].reshape(8, 32, 8), first + torch.arange(8))
    (scaled,) = by_lane(columns[:, :: layout.group], layout)[0]  # [32 lanes, sets, 2 rh]
    for rh in (0, 1):
        assert torch.equal(scaled[..., rh], first[:: layout.steps_per_set, :, 0].T)


@each_case("name", PACKED_FORMATS)
@each_case("cols", [4096, 1536, 11008])
def test_planes_take_at_most_three_percent_over_the_file(name: str, cols: int) -> None:
    layout = packed_layout(FORMATS[name], cols)
    bits_per_weight = 8 * layout.chunk_bytes / (16 * layout.chunk)
    if name == "TQ1_0":  # its digits in base 3 become codes of two bits
        assert bits_per_weight == 2.0625
        return
    assert bits_per_weight <= 1.03 * 8 * FORMATS[name].nbytes / FORMATS[name].block
    assert {"Q4_K": 4.65, "Q6_K": 6.7}.get(name, 9) >= bits_per_weight


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_no_row_is_longer_than_its_part_says(name: str, device: torch.device) -> None:
    weight = ordinary_weight(name, 40, 512)
    (part,) = pack(weight, device).parts
    assert isinstance(part, PackedPart)
    longest = float(dequantize(weight.format, weight.data).norm(dim=1).max())
    assert longest <= part.norm < 8 * longest


def test_neighbours_of_one_format_become_one_part(device: torch.device) -> None:
    q, k, v = (
        random_weight("Q4_K", 32, 512),
        random_weight("Q4_K", 24, 512, 1),
        random_weight("Q6_K", 24, 512, 2),
    )
    merged = pack([q, k, v], device)
    assert [part.rows for part in merged.parts] == [56, 24]
    assert (merged.rows, merged.cols) == (80, 512)
    both = torch.cat([q.data, k.data])
    assert isinstance(merged.parts[0], PackedPart)
    assert_same(unpack_part(merged.parts[0]), unpack(q.format, both))


def test_rows_that_end_inside_a_tile_are_merged_without_a_gap(device: torch.device) -> None:
    parts = [random_weight("Q4_0", rows, 64, rows) for rows in (5, 23, 9)]
    (part,) = pack(parts, device).parts
    assert isinstance(part, PackedPart)
    assert part.tiles == 3
    assert_same(unpack_part(part), unpack(parts[0].format, torch.cat([p.data for p in parts])))


def test_gate_and_up_share_tiles_row_by_row(device: torch.device) -> None:
    gate, up = random_weight("Q4_K", 24, 256), random_weight("Q4_K", 24, 256, 1)
    weight = pack([gate, up], device, paired=True)
    (part,) = weight.parts
    assert weight.paired
    assert isinstance(part, PackedPart)
    order = torch.stack([gate.data.view(3, 8, -1), up.data.view(3, 8, -1)], 1).reshape(48, -1)
    assert_same(unpack_part(part), unpack(gate.format, order))


@pytest.mark.parametrize("at_a_time", [1, 40 * 256])
def test_repacking_a_few_rows_at_a_time_gives_the_same_planes(
    at_a_time: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = random_weight("Q4_K", 48, 256), random_weight("Q4_K", 40, 256, 1)
    gate, up = random_weight("Q4_K", 72, 256, 2), random_weight("Q4_K", 72, 256, 3)
    whole = [pack([q, k], device), pack([gate, up], device, paired=True)]
    monkeypatch.setattr(packed, "_WEIGHTS_AT_A_TIME", at_a_time)
    for one, again in zip(whole, [pack([q, k], device), pack([gate, up], device, paired=True)], strict=True):
        for a, b in zip(one.parts, again.parts, strict=True):
            assert isinstance(a, PackedPart) and isinstance(b, PackedPart)
            assert a.weight_scale == b.weight_scale
            for plane in ("low", "high", "scales", "supers"):
                assert torch.equal(getattr(a, plane), getattr(b, plane))


def test_gate_and_up_of_different_formats_stay_apart(device: torch.device) -> None:
    weight = pack([random_weight("Q4_K", 16, 256), random_weight("Q6_K", 16, 256)], device, paired=True)
    assert not weight.paired
    assert len(weight.parts) == 2


def test_floats_stay_as_they_are(device: torch.device) -> None:
    data = torch.randn(5, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float16)
    weight = QuantTensor("w", FORMATS["F16"], (5, 48), data.view(torch.uint8))
    (part,) = pack(weight, device).parts
    assert isinstance(part, FloatPart)
    assert torch.equal(part.weight.cpu(), data)


def test_merged_weights_must_share_their_width(device: torch.device) -> None:
    with pytest.raises(ValueError, match="one width"):
        pack([random_weight("Q4_0", 16, 64), random_weight("Q4_0", 16, 96)], device)
