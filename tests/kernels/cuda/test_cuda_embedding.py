"""Embedding rows from packed planes, every type of the table, against the dequantized matrix."""

import pytest
import torch

from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.cuda.embedding import embedding
from quengine.kernels.cuda.weights.packed import PackedPart, first_rows, pack
from quengine.kernels.quant_tensor import QuantTensor
from tests.kernels.weights import put_top


def random_weight(name: str, rows: int, cols: int) -> QuantTensor:
    """Random codes; fp16 and E8M0 super-scales are set to ordinary numbers so that no value overflows."""
    fmt = FORMATS[name]
    generator = torch.Generator().manual_seed(rows + cols)
    if not fmt.is_quantized:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        data = torch.randn(rows, cols, generator=generator).to(dtype).view(torch.uint8)
        return QuantTensor(name, fmt, (rows, cols), data)
    data = torch.randint(
        0, 256, (rows, cols // fmt.block, fmt.nbytes), dtype=torch.uint8, generator=generator
    )
    put_top(data, fmt.layout, torch.rand(data.shape[:2], generator=generator))
    for field, (start, stop) in fmt.layout.items():
        if field not in ("d", "dmin", "min", "m"):
            continue
        if stop - start == 2:
            halves = torch.rand(rows, cols // fmt.block, 1, generator=generator) + 0.1
            data[..., start:stop] = halves.half().view(torch.uint8)
        elif stop - start == 1:
            data[..., start:stop] = torch.randint(
                120, 130, (rows, cols // fmt.block, 1), dtype=torch.uint8, generator=generator
            )
    return QuantTensor(name, fmt, (rows, cols), data.view(rows, -1))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_are_the_dequantized_rows(name: str, device: torch.device) -> None:
    cols = 256 if FORMATS[name].block == 256 else 160 if FORMATS[name].block == 32 else 384
    weight = random_weight(name, 37, cols)
    ids = torch.tensor([7, 36, 8], device=device)
    out = embedding(pack(weight, device), ids)
    expected = dequantize(weight.format, weight.data)[ids.cpu()]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("name", ["Q6_K", "BF16"])
def test_rows_are_scaled(name: str, device: torch.device) -> None:
    weight, ids = random_weight(name, 16, 256), torch.tensor([3, 15], device=device)
    packed = pack(weight, device)
    expected = embedding(packed, ids) * 50.59644256269407
    torch.testing.assert_close(embedding(packed, ids, 50.59644256269407), expected, rtol=1e-6, atol=0)


def test_wide_rows_take_several_programs(device: torch.device) -> None:
    weight = random_weight("Q8_0", 16, 32 * 264)
    out = embedding(pack(weight, device), torch.tensor([5], dtype=torch.int32, device=device))
    torch.testing.assert_close(out.cpu(), dequantize(weight.format, weight.data)[5:6], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
def test_an_unknown_id_gives_nan_and_reads_nothing(name: str, device: torch.device) -> None:
    weight = random_weight(name, 16, 64)
    out = embedding(pack(weight, device), torch.tensor([-1, 3, 16], device=device))
    assert torch.isnan(out[0]).all() and torch.isnan(out[2]).all() and torch.isfinite(out[1]).all()


def test_a_merged_matrix_is_refused(device: torch.device) -> None:
    parts = [random_weight("Q4_0", 16, 64), random_weight("Q8_0", 16, 64)]
    with pytest.raises(ValueError, match="one part"):
        embedding(pack(parts, device), torch.tensor([0], device=device))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_weights_first_rows_are_views_of_the_same(name: str, device: torch.device) -> None:
    weight = random_weight(name, 48, 256)
    packed = pack(weight, device)
    first, ids = first_rows(packed, 32), torch.tensor([17, 31, 32], device=device)
    (part,), (whole,) = first.parts, packed.parts
    assert first.rows == 32 and first.nbytes < packed.nbytes
    if isinstance(part, PackedPart):
        assert isinstance(whole, PackedPart) and part.low.data_ptr() == whole.low.data_ptr()
    rows = embedding(first, ids)
    assert rows[2].isnan().all(), "a row that it does not have"
    assert torch.equal(rows[:2], embedding(packed, ids)[:2])
    for count in (24, 64):
        with pytest.raises(ValueError, match="whole tiles"):
            first_rows(packed, count)
