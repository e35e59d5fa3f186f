"""A row of the residual stream with the norm that reads it, on its way to another device."""

import pytest
import torch

from quengine.kernels.cuda.flat_rows import flattened, unflattened
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, RmsPartials
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.rms_norm import RMSNorm


@pytest.mark.parametrize("width", [32, 576])
@pytest.mark.parametrize("partials", [None, 1, 7])
def test_a_single_row_arrives_with_every_bit(width: int, partials: int | None) -> None:
    """Patterns of NaN among the words, and planes that are no multiple of 16 bytes."""

    def words(count: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, (1, count)).to(torch.int32)

    rounded = QuantizedActivations(
        words(width // 4).view(torch.int8),
        words(width // 4).view(torch.int8),
        words(width // 32).view(torch.float32),
        words(width // 16),
        None if partials is None else RmsPartials(torch.rand(1, partials), 1e-5),
    )
    norm = RMSNorm(torch.ones(width), 1e-5)
    sent = RmsNormed(words(width).view(torch.float32), rounded)
    found = unflattened(flattened(sent), 1, norm)
    assert isinstance(found, RmsNormed) and isinstance(found.rms_normed, QuantizedActivations)
    for name in ("high", "low", "scale", "sums"):
        mine, theirs = getattr(found.rms_normed, name), getattr(rounded, name)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        assert mine.data_ptr() % 16 == found.hidden.data_ptr() % 16
    assert torch.equal(found.hidden.view(torch.int32), sent.hidden.view(torch.int32))
    if partials is None:
        assert found.rms_normed.rms is None
    else:
        assert found.rms_normed.rms is not None and rounded.rms is not None
        assert torch.equal(found.rms_normed.rms.squares, rounded.rms.squares)
        assert found.rms_normed.rms.eps == norm.eps


def test_of_several_rows_the_stream_alone_is_sent() -> None:
    rows, norm = torch.rand(3, 64), RMSNorm(torch.ones(64), 1e-5)
    for sent in (rows, RmsNormed(rows, Fp16Operand.empty(3, 64, "cpu"))):
        found = unflattened(flattened(sent), 3, norm)
        assert isinstance(found, torch.Tensor) and torch.equal(found, rows)
    single = unflattened(flattened(rows[:1]), 1, norm)
    assert isinstance(single, torch.Tensor) and torch.equal(single, rows[:1])
