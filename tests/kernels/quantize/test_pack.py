"""Packing, the inverse of unpacking."""

import pytest
import torch

from quengine.kernels.block_formats import FORMATS, unpack
from quengine.kernels.quantize.pack import PACKED, pack


@pytest.mark.parametrize("name", PACKED)
def test_what_was_unpacked_is_packed_to_the_same_bytes(name: str) -> None:
    fmt = FORMATS[name]
    data = torch.randint(
        0, 256, (5, 3 * fmt.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    for field in ("d", "min", "dmin"):
        start, stop = fmt.layout.get(field, (0, 0))
        if stop - start == 2:  # finite: which NaN it is, no quantizer decides
            data.view(5, 3, -1)[..., stop - 1] &= 0x7B
    if name == "TQ1_0":  # 243 combinations of digits in 256 bytes: those that a quantizer writes
        digits = unpack(fmt, data)
        data = pack(digits)
        assert torch.equal(unpack(fmt, data).codes, digits.codes)
    assert torch.equal(pack(unpack(fmt, data)), data)
