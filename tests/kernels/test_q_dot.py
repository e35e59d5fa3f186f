"""The torch definition of q-dot against plain fp64 products."""

import pytest
import torch
from torch import Tensor

from quengine.kernels.activations import quantize_activations
from quengine.kernels.block_formats import FORMATS, dequantize, unpack
from quengine.kernels.q_dot import q_dot
from tests.kernels.weights import nmse, random_weight

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.is_quantized]


def inputs(name: str, rows: int = 24, blocks: int = 3) -> tuple[Tensor, Tensor]:
    """Weight bytes [rows, ...] and activations fp32 [4, K]."""
    data = random_weight(name, rows, blocks * max(1, 256 // FORMATS[name].block)).data
    x = torch.randn(4, blocks * 256, generator=torch.Generator().manual_seed(2))
    return data, x


@pytest.mark.parametrize("name", QUANTIZED)
def test_only_the_activations_are_rounded(name: str) -> None:
    data, x = inputs(name)
    fmt = FORMATS[name]
    y = q_dot(quantize_activations(x), unpack(fmt, data))
    weights = dequantize(fmt, data).double()
    assert nmse(y, x.double() @ weights.T) <= 1e-8
    assert nmse(y, quantize_activations(x).values() @ weights.T) <= 1e-12


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_1"])
def test_float64_variant_is_the_sum_without_rounding(name: str) -> None:
    data, x = inputs(name)
    exact = q_dot(quantize_activations(x), unpack(FORMATS[name], data), torch.float64)
    weights = unpack(FORMATS[name], data)
    w = weights.ints().double().view(24, -1, weights.group) * weights.scales().double().unsqueeze(-1)
    mins = weights.mins()
    if mins is not None:
        w = w - mins.double().unsqueeze(-1)
    assert nmse(exact, quantize_activations(x).values() @ w.view(24, -1).T) <= 1e-28


def test_a_row_does_not_depend_on_its_batch() -> None:
    data, x = inputs("Q4_K")
    together = q_dot(quantize_activations(x), unpack(FORMATS["Q4_K"], data))
    alone = q_dot(quantize_activations(x[2:3]), unpack(FORMATS["Q4_K"], data[5:7]))
    assert torch.equal(together[2:3, 5:7], alone)


def test_swapped_nibbles_are_far_off() -> None:
    data, x = inputs("Q4_0")
    swapped = data.clone().view(24, -1, 18)
    swapped[..., 2:] = (swapped[..., 2:] >> 4) | (swapped[..., 2:] << 4)
    y = q_dot(quantize_activations(x), unpack(FORMATS["Q4_0"], swapped.view(24, -1)))
    assert nmse(y, x.double() @ dequantize(FORMATS["Q4_0"], data).double().T) > 0.1


def test_widths_must_agree() -> None:
    data, x = inputs("Q4_0")
    with pytest.raises(ValueError, match="width 736"):
        q_dot(quantize_activations(x[:, :736].contiguous()), unpack(FORMATS["Q4_0"], data))
