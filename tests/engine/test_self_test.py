"""The self-test passes a right backend, and fails each kind of wrong kernel it is there to find."""

import math

import pytest
import torch

from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.self_test import COLS, PHASES, check_kernels, random_tensor

K_TAIL = 32


class Twisted(ReferenceBackend):
    """A backend that gets something wrong when it takes a quantized weight."""

    def __init__(self, twist):
        super().__init__(keep=True)
        self.twist = twist

    def weight(self, parts):
        return super().weight([self.twist(part) if part.format.is_quantized else part for part in parts])


def edited(part, edit):
    data = part.data.clone().view(part.rows, -1, part.format.nbytes)
    edit(data, part.format.layout)
    return QuantTensor(part.name, part.format, part.shape, data.view(part.rows, -1))


def swap_nibbles(part):
    def edit(data, layout):
        start, stop = layout["codes"]
        codes = data[..., start:stop]
        data[..., start:stop] = (codes << 4) | (codes >> 4)

    return edited(part, edit)


def swap_sub_scales(part):
    def edit(data, layout):
        if "scales" in layout:
            start, stop = layout["scales"]
            data[..., start:stop] = data[..., start:stop].flip(-1)
        else:
            start, stop = layout["d"]
            data[..., start:stop] = data[..., start:stop].roll(1, 1)

    return edited(part, edit)


def drop_tail(part):
    def edit(data, _layout):
        data[:, -1] = 0

    return edited(part, edit)


def test_the_definition_itself_passes_every_format_and_phase():
    checks = list(check_kernels(ReferenceBackend(keep=True)))
    assert {check.format for check in checks} == set(FORMATS)
    assert len(checks) == len(FORMATS) * len(PHASES)
    assert all(check.error < 1e-12 for check in checks)
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("twist", [swap_nibbles, swap_sub_scales, drop_tail])
def test_a_wrong_layout_fails_in_every_quantized_format(twist):
    failed = {check.format for check in check_kernels(Twisted(twist)) if not check.passed}
    assert failed == {fmt.name for fmt in FORMATS.values() if fmt.is_quantized}


def test_activations_rounded_to_eight_bits_fail_in_decode():
    class Rounded(ReferenceBackend):
        def logits(self, x, norm, eps, weight, last_only):
            groups = x.view(len(x), -1, 32)
            step = groups.abs().amax(-1, keepdim=True) / 127
            return super().logits((groups / step).round().mul(step).view_as(x), norm, eps, weight, last_only)

    checks = list(check_kernels(Rounded(keep=True)))
    assert checks
    assert not any(check.passed for check in checks)


def test_a_result_that_is_not_finite_fails():
    class Broken(ReferenceBackend):
        def logits(self, x, norm, eps, weight, last_only):
            return super().logits(x, norm, eps, weight, last_only) * math.nan

    checks = list(check_kernels(Broken(keep=True)))
    assert checks
    assert not any(check.passed for check in checks)


@pytest.mark.parametrize("name", FORMATS)
def test_the_random_weights_are_finite_and_vary(name):
    tensor = random_tensor(FORMATS[name], 3, COLS, torch.Generator().manual_seed(1))
    weights = dequantize(tensor.format, tensor.data)
    assert weights.isfinite().all()
    assert 1e-3 < weights.std() < 1e3
