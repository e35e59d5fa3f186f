"""Tensors within others: every part of the rows, transposed or not, and MXFP4 blocks by their specification."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.models.architectures.architecture import HFPart
from quengine.models.hf.hf_parts import StoredPart, gguf_blocks
from quengine.models.hf.hf_shards import HFShards

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; 8 to 15 are their negatives."""


def shards(folder: Path, **tensors: Tensor) -> HFShards:
    save_file({f"layer.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return HFShards(folder)


def values(part: StoredPart) -> Tensor:
    header = part.header
    return dequantize(FORMATS[header.dtype], part.data()).reshape(header.shape)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("first half", slice(0, 3)),
        ("second half", slice(3, 6)),
        ("even", slice(0, 6, 2)),
        ("odd", slice(1, 6, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_are_taken_as_declared(tmp_path: Path, rows, expected: slice, dtype: torch.dtype) -> None:
    held = torch.randn(2, 6, 4).to(dtype)
    bias = torch.randn(2, 6).to(dtype)
    files = shards(
        tmp_path,
        w=held,
        t=held.transpose(1, 2).clone(memory_format=torch.contiguous_format),
        flat=held[0].clone(),
        b=bias,
    )
    for name, shape in (("w", (2, 3, 4)), ("t", (2, 3, 4)), ("flat", (3, 4))):
        part = StoredPart(files, "layer.", HFPart(name, rows, transposed=name == "t"), shape)
        wanted = held[0, expected] if name == "flat" else held[:, expected]
        assert part.names == (f"layer.{name}",) and part.header.shape == shape
        assert torch.equal(values(part), wanted.float())
    part = StoredPart(files, "layer.", HFPart("b", rows), (2, 3), bias=True)
    assert torch.equal(values(part), bias[:, expected].float())


def packed_values(blocks: Tensor, scales: Tensor) -> Tensor:
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2).long()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    weights = table[codes] * 2.0 ** (scales.double() - 127.0)[..., None]
    return weights.flatten(-2)


def test_blocks_keep_every_weight() -> None:
    blocks = torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8)
    blocks[0, 0, 0] = torch.arange(16) * 17  # every code, in both halves of bytes
    scales = torch.randint(0, 253, (3, 5, 4), dtype=torch.uint8)  # 6 * 2^126 is beyond fp32
    ours = dequantize(FORMATS["MXFP4"], gguf_blocks(blocks, scales)).reshape(3, 5, 128)
    assert torch.equal(ours.double(), packed_values(blocks, scales))


@pytest.mark.parametrize("rows", ["all", "even", "odd"])
def test_packed_tensors_are_found_by_their_blocks(tmp_path: Path, rows) -> None:
    blocks = torch.randint(0, 256, (2, 6, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 130, (2, 6, 2), dtype=torch.uint8)
    files = shards(tmp_path, w_blocks=blocks, w_scales=scales)
    taken = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}[rows]
    expected = packed_values(blocks, scales)[:, taken]
    part = StoredPart(files, "layer.", HFPart("w", rows, transposed=True), tuple(expected.shape))
    assert part.names == ("layer.w_blocks", "layer.w_scales") and part.header.dtype == "MXFP4"
    assert part.header.nbytes == expected.numel() // 32 * 17
    assert torch.equal(values(part).double(), expected)
    with pytest.raises(EngineError, match="48 columns are not whole blocks of 32"):
        StoredPart(files, "layer.", HFPart("w", rows), (2, 6, 48))


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    files = shards(tmp_path, w=torch.zeros(2, 6, 4))
    for part in (HFPart("w"), HFPart("w", "even", transposed=True), HFPart("none")):
        with pytest.raises(EngineError, match=r"has shape \[2, 6, 4\]|is missing"):
            StoredPart(files, "layer.", part, (2, 3, 4))
