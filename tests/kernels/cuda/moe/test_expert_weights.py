"""Experts packed below each other, against each expert packed by itself."""

import pytest
import torch

from quengine.kernels.block_formats import FORMATS, Groups, dequantize
from quengine.kernels.cuda.moe import expert_weights
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights, pack_experts, pack_gate_up_experts
from quengine.kernels.cuda.weights import packed
from quengine.kernels.cuda.weights.layout import PACKED_FORMATS
from quengine.kernels.cuda.weights.packed import FloatPart, PackedPart, pack
from quengine.kernels.quant_tensor import QuantTensor
from tests.kernels.cuda.gemm.unpack_part import unpack_part
from tests.kernels.cuda.weights import ordinary_weight


def merged(name: str, count: int, rows: int, cols: int, seed: int = 0) -> list[QuantTensor]:
    """The experts of one tensor, as a file has them: neighbouring views."""
    return ordinary_weight(name, count * rows, cols, seed).row_slices(rows)


def assert_tiles_equal(part: PackedPart | FloatPart, first: int, alone: PackedPart | FloatPart) -> None:
    assert isinstance(part, PackedPart) and isinstance(alone, PackedPart)
    for number, (plane, expected) in enumerate(zip(part.planes, alone.planes, strict=True)):
        if part.layout.book and number == 1:  # the codebook, which all weights share
            assert plane is expected
        else:
            assert torch.equal(plane[first : first + alone.tiles], expected)


def stored_values(weights: ExpertWeights, expert: int) -> torch.Tensor:
    """The weights of one expert, with those that fill its last tile."""
    (part,) = weights.parts
    assert isinstance(part, PackedPart)
    groups = unpack_part(part)
    rows = slice(16 * expert * weights.expert_tiles, 16 * (expert + 1) * weights.expert_tiles)
    fields = (groups.codes, groups.d, groups.sc, groups.dmin, groups.mn, groups.top)
    return Groups(groups.format, *(None if field is None else field[rows] for field in fields)).dequantize()


@pytest.mark.parametrize("rows", [21, 48])
@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_an_experts_tiles_are_those_of_its_matrix_alone(name: str, rows: int) -> None:
    experts = merged(name, 3, rows, 256)
    weights = pack_experts(experts, "cpu")
    assert (weights.count, weights.expert_rows, weights.expert_tiles) == (3, rows, -(-rows // 16))
    assert (weights.rows, weights.cols, weights.paired) == (3 * rows, 256, False)
    assert weights.nbytes == weights.parts[0].nbytes
    for number, expert in enumerate(experts):
        if rows % 16 == 0:
            alone = pack(expert, "cpu").parts[0]
            assert_tiles_equal(weights.parts[0], number * weights.expert_tiles, alone)
        values = stored_values(weights, number)
        assert torch.equal(values[:rows], dequantize(expert.format, expert.data))
        assert not values[rows:].any()


@pytest.mark.parametrize("rows", [8, 40])
def test_gate_and_up_of_one_format_are_paired_within_an_expert(rows: int) -> None:
    gate, up = merged("Q4_K", 3, rows, 256), merged("Q4_K", 3, rows, 256, 1)
    weights = pack_gate_up_experts(gate, up, "cpu")
    assert weights.paired and len(weights.parts) == 1
    assert (weights.expert_rows, weights.expert_tiles) == (2 * rows, rows // 8)
    for number, pair in enumerate(zip(gate, up, strict=True)):
        alone = pack(pair, "cpu", paired=True).parts[0]
        assert_tiles_equal(weights.parts[0], number * weights.expert_tiles, alone)


def test_paired_rows_that_fill_no_tile_are_followed_by_zeros() -> None:
    gate, up = merged("Q8_0", 2, 12, 128), merged("Q8_0", 2, 12, 128, 1)
    weights = pack_gate_up_experts(gate, up, "cpu")
    assert weights.paired and (weights.expert_rows, weights.expert_tiles) == (24, 2)
    whole = [
        QuantTensor("", t.format, (16, 128), torch.cat([t.data, t.data.new_zeros(4, t.data.shape[1])]))
        for pair in zip(gate, up, strict=True)
        for t in pair
    ]
    for number in range(2):
        alone = pack(whole[2 * number : 2 * number + 2], "cpu", paired=True).parts[0]
        assert_tiles_equal(weights.parts[0], 2 * number, alone)


def test_gate_and_up_of_two_formats_are_two_parts() -> None:
    gate, up = merged("Q4_K", 2, 32, 256), merged("Q6_K", 2, 32, 256, 1)
    weights = pack_gate_up_experts(gate, up, "cpu", torch.randn(2, 64))
    assert not weights.paired
    assert (weights.expert_rows, weights.part_rows, weights.expert_tiles) == (64, 32, 2)
    assert weights.nbytes == sum(part.nbytes for part in weights.parts) + 2 * 64 * 4
    for part, experts in zip(weights.parts, (gate, up), strict=True):
        for number, expert in enumerate(experts):
            assert_tiles_equal(part, 2 * number, pack(expert, "cpu").parts[0])


@pytest.mark.parametrize("at_a_time", [16 * 256, 32 * 256, 80 * 256])
def test_what_is_packed_at_a_time_changes_nothing(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up = merged("Q6_K", 5, 40, 256), merged("Q6_K", 5, 40, 256, 1)
    down = merged("Q3_K", 5, 40, 256, 2)
    whole = [pack_gate_up_experts(gate, up, "cpu"), pack_experts(down, "cpu")]
    monkeypatch.setattr(packed, "_WEIGHTS_AT_A_TIME", at_a_time)
    for expected, ours in zip(
        whole, [pack_gate_up_experts(gate, up, "cpu"), pack_experts(down, "cpu")], strict=True
    ):
        assert_tiles_equal(ours.parts[0], 0, expected.parts[0])


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if not fmt.is_quantized])
def test_plain_floats_stay_rows(name: str) -> None:
    experts = merged(name, 3, 13, 64)
    weights = pack_experts(experts, "cpu")
    part = weights.parts[0]
    assert isinstance(part, FloatPart) and part.weight.shape == (3 * 13, 64)
    assert torch.equal(part.weight.view(torch.uint8), torch.cat([expert.data for expert in experts]))
    assert not pack_gate_up_experts(experts, experts, "cpu").paired


def test_experts_that_differ_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = merged("Q4_K", 2, 16, 256)
    with pytest.raises(ValueError, match="must be alike"):
        pack_experts([*experts, ordinary_weight("Q6_K", 16, 256)], "cpu")
    with pytest.raises(ValueError, match=r"2 gates .* have 1 up"):
        pack_gate_up_experts(experts, experts[:1], "cpu")
    with pytest.raises(ValueError, match="bias of experts must be"):
        pack_experts(experts, "cpu", torch.zeros(2, 15))
    monkeypatch.setattr(expert_weights, "MOST_WORDS", 511)
    with pytest.raises(ValueError, match="take 512 words"):
        pack_experts(experts, "cpu")
