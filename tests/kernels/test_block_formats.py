"""The table of block formats and their unpacking, against the `gguf` package."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import quants as gguf_quants

from quengine.kernels.block_formats import FORMATS, dequantize, unpack
from quengine.kernels.quant_tensor import QuantTensor

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
    return data.reshape(rows, -1)


def gguf_dequantize(name: str, data: np.ndarray) -> np.ndarray:
    if name == "F16":
        return data.view(np.float16).astype(np.float32)
    return gguf_quants.dequantize(data, GGMLQuantizationType[name])


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_gguf(name: str) -> None:
    fmt = FORMATS[name]
    assert (fmt.block, fmt.nbytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    assert max(stop for _, stop in fmt.layout.values()) == fmt.nbytes


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (33, 5)])
def test_dequantize_is_bit_exact_with_gguf(name: str, rows: int, blocks: int) -> None:
    data = random_rows(name, rows, blocks, seed=rows)
    ours = dequantize(FORMATS[name], torch.from_numpy(data)).numpy()
    theirs = gguf_dequantize(name, data)
    assert ours.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


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
    assert groups.d.shape == (rows, blocks)
    assert groups.d.dtype == (torch.uint8 if name == "MXFP4" else torch.float16)
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
