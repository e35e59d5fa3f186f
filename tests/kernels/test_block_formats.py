"""The table of block formats and their unpacking, against the `gguf` package and ggml itself."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import quants as gguf_quants

from quengine.kernels.block_formats import (
    FORMATS,
    NVFP4_SCALED,
    dequantize,
    put_split_half,
    unpack,
    unpack_scales,
    with_tensor_scale,
)
from quengine.kernels.codebooks import codebook
from quengine.kernels.quant_tensor import QuantTensor
from tests.each_case import each_case
from tests.ggml_types import ggml_dequantize, ggml_sizes
from tests.kernels.weights import put_top

BOOKS = [name for name, fmt in FORMATS.items() if fmt.book]
EVEN = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")
OF_GGML = [*BOOKS, "NVFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0"]
STORED = [name for name in FORMATS if name != NVFP4_SCALED]
QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.is_quantized]
AWKWARD_HALVES = [0.0, -0.0, 6e-8, -6e-8, 5.96e-5, -3.1e-5, 65504.0, -65504.0, 1.0, -0.333]


def random_rows(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes [rows, row_bytes], every fp16 scale finite, often zero, denormal, negative or huge."""
    fmt, rng = FORMATS[name], np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, fmt.nbytes), dtype=np.uint8)
    if name == "F32":
        data = rng.standard_normal((rows, blocks)).astype(np.float32).view(np.uint8).reshape(data.shape)
    for field in ("d", "min", "dmin", "codes"):
        start, stop = fmt.layout.get(field, (0, 0))
        if stop - start == 2:
            values = rng.standard_normal((rows, blocks)).astype(np.float16)
            awkward = rng.choice(np.array(AWKWARD_HALVES, np.float16), (rows, blocks))
            halves = np.where(rng.random((rows, blocks)) < 0.5, awkward, values)
            data[..., start:stop] = halves[..., None].view(np.uint8)
    put_top(torch.from_numpy(data), fmt.layout, torch.from_numpy(rng.standard_normal((rows, blocks))))
    if name == "IQ1_M":
        put_split_half(torch.from_numpy(data), torch.from_numpy(rng.standard_normal((rows, blocks))))
    return data.reshape(rows, -1)


def gguf_dequantize(name: str, data: np.ndarray) -> np.ndarray:
    if name in ("Q1_0", "Q2_0"):  # the package lacks them
        return ggml_dequantize(name, data)
    if name == "F16":
        return data.view(np.float16).astype(np.float32)
    return gguf_quants.dequantize(data, GGMLQuantizationType[name])


@pytest.mark.parametrize("name", STORED)
def test_sizes_are_those_of_gguf(name: str) -> None:
    fmt = FORMATS[name]
    assert (fmt.block, fmt.nbytes) == ggml_sizes(name)
    if name != "Q2_0":
        assert (fmt.block, fmt.nbytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    assert max(stop for _, stop in fmt.layout.values()) == fmt.nbytes


@pytest.mark.parametrize("name", STORED)
@each_case(("rows", "blocks"), [(1, 1), (7, 3), (33, 5)])
def test_dequantize_is_bit_exact_with_gguf(name: str, rows: int, blocks: int) -> None:
    data = random_rows(name, rows, blocks, seed=rows)
    ours = dequantize(FORMATS[name], torch.from_numpy(data)).numpy()
    theirs = gguf_dequantize(name, data)
    assert ours.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_alone_are_those_of_unpacking(name: str) -> None:
    data = torch.from_numpy(random_rows(name, 5, 3, seed=2))
    alone, whole = unpack_scales(FORMATS[name], data), unpack(FORMATS[name], data)
    assert torch.equal(alone.scales().view(torch.int32), whole.scales().view(torch.int32))
    ours, theirs = alone.mins(), whole.mins()
    assert (ours is None) == (theirs is None)
    assert ours is None or theirs is None or torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert alone.codes.shape == whole.codes.shape


@pytest.mark.parametrize("name", OF_GGML)
def test_dequantize_is_bit_exact_with_ggml(name: str) -> None:
    data = random_rows(name, 40, 4, seed=11)
    ours = dequantize(FORMATS[name], torch.from_numpy(data)).numpy()
    assert np.array_equal(ours.view(np.uint32), ggml_dequantize(name, data).view(np.uint32))


@pytest.mark.parametrize("name", BOOKS)
def test_every_entry_and_every_sign_of_a_codebook(name: str) -> None:
    """Blocks that hold each index with each byte of signs, or eighth, against ggml."""
    fmt, rng = FORMATS[name], np.random.default_rng(3)
    data = random_rows(name, 800, 4, seed=4).reshape(-1, fmt.nbytes)
    groups = unpack(fmt, torch.from_numpy(data))
    assert groups.index is not None
    assert len(torch.unique(groups.index)) == len(codebook(fmt.book))
    if groups.signs is not None:
        assert len(torch.unique(groups.signs)) == (128 if name in EVEN else 256)
        assert set(torch.unique(groups.codes).tolist()) <= set(range(2**fmt.bits))
    order = rng.permutation(len(data))
    ours = dequantize(fmt, torch.from_numpy(data[order])).numpy()
    assert np.array_equal(ours.view(np.uint32), ggml_dequantize(name, data[order]).view(np.uint32))


def test_every_scale_of_nvfp4() -> None:
    data = np.tile(np.arange(36, dtype=np.uint8) * 7, (64, 1))
    data[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    ours = dequantize(FORMATS["NVFP4"], torch.from_numpy(data)).numpy()
    for theirs in (gguf_dequantize("NVFP4", data), ggml_dequantize("NVFP4", data)):
        assert np.array_equal(ours.view(np.uint32), theirs.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254, 255])
def test_mxfp4_exponents_at_the_ends(exponent: int) -> None:
    data = np.arange(17, dtype=np.uint8).reshape(1, 17) * 15
    data[0, 0] = exponent
    ours = dequantize(FORMATS["MXFP4"], torch.from_numpy(data)).numpy()
    assert np.array_equal(ours.view(np.uint32), gguf_dequantize("MXFP4", data).view(np.uint32))


@pytest.mark.parametrize("name", QUANTIZED)
def test_groups_are_compact_and_rebuild_the_weights(name: str) -> None:
    fmt, rows, blocks = FORMATS[name], 4, 3
    data = torch.from_numpy(random_rows(name, rows, blocks, seed=5))
    groups, cols = unpack(fmt, data), blocks * fmt.block
    assert groups.codes.shape == (rows, cols)
    assert groups.codes.dtype == (torch.int8 if name == "Q8_0" else torch.uint8)
    assert groups.d.shape == (rows, cols // fmt.group if name.startswith("NVFP4") else blocks)
    assert groups.d.dtype == (torch.uint8 if "FP4" in name else torch.float16)
    assert (groups.sc is not None) == (fmt.sub_scale_bits > 0)
    assert (groups.dmin is not None) == fmt.has_min
    assert (groups.mn is not None) == (fmt.has_min and fmt.sub_scale_bits > 0)
    for sub in (groups.sc, groups.mn):
        assert sub is None or sub.shape == (rows, cols // fmt.group)
    if fmt.bits < 8:
        assert int(groups.codes.max()) < 2**fmt.bits
    q, s, m = groups.ints(), groups.scales(), groups.mins()
    assert q.dtype == torch.int8 and s.shape == (rows, cols // fmt.group)
    w = q.double().view(rows, -1, fmt.group) * s.double().unsqueeze(-1)
    if m is not None:
        w -= m.double().unsqueeze(-1)
    torch.testing.assert_close(w.view(rows, -1).float(), dequantize(fmt, data), rtol=1e-6, atol=0)


def test_a_tensors_scale_multiplies_its_weights() -> None:
    data, scales = (
        torch.from_numpy(random_rows("NVFP4", 5, 8, seed=2)),
        torch.tensor([1.0, 0.3, -2.0, 0.0, 7e-4]),
    )
    scaled = with_tensor_scale(data, scales)
    assert scaled.shape == (5, FORMATS[NVFP4_SCALED].row_bytes(512))
    ours, plain = dequantize(FORMATS[NVFP4_SCALED], scaled), dequantize(FORMATS["NVFP4"], data)
    torch.testing.assert_close(ours, plain * scales.unsqueeze(1), rtol=2e-7, atol=0)
    assert torch.equal(ours[0], plain[0])
    with pytest.raises(ValueError, match="multiple"):
        with_tensor_scale(data[:, : 36 * 3], scales)


def test_swapped_nibbles_are_noticed() -> None:
    data = random_rows("Q4_0", 3, 2)
    swapped = data.copy().reshape(3, 2, 18)
    swapped[..., 2:] = (swapped[..., 2:] >> 4) | (swapped[..., 2:] << 4)
    ours = dequantize(FORMATS["Q4_0"], torch.from_numpy(swapped.reshape(3, -1))).numpy()
    assert not np.array_equal(ours, gguf_dequantize("Q4_0", data))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_read_from_any_byte_offset(name: str) -> None:
    data = random_rows(name, 2, 5)
    shifted = torch.zeros(data.size + 1, dtype=torch.uint8)
    shifted[1:] = torch.from_numpy(data).flatten()
    ours = dequantize(FORMATS[name], shifted[1:].view(2, -1)).numpy()
    assert np.array_equal(ours.view(np.uint32), gguf_dequantize(name, data).view(np.uint32))


def test_partial_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        FORMATS["Q4_K"].row_bytes(255)
    with pytest.raises(ValueError, match="multiple"):
        unpack(FORMATS["Q4_K"], torch.zeros(1, 143, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no groups"):
        unpack(FORMATS["F16"], torch.zeros(1, 64, dtype=torch.uint8))


def test_quant_tensor_checks_its_bytes() -> None:
    fmt = FORMATS["Q4_K"]
    tensor = QuantTensor("w", fmt, (3, 512), torch.zeros(3, 288, dtype=torch.uint8))
    assert (tensor.rows, tensor.cols, tensor.nbytes) == (3, 512, 864)
    stacked = QuantTensor("w", fmt, (2, 3, 256), torch.zeros(6, 144, dtype=torch.uint8))
    assert stacked.rows == 6
    with pytest.raises(ValueError, match="w: Q4_K"):
        QuantTensor("w", fmt, (3, 512), torch.zeros(3, 287, dtype=torch.uint8))
