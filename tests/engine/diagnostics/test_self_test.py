"""The self-test passes a right backend, and fails each kind of wrong kernel it is there to find.

Running them: every subject is reported, in order, whatever happens to the processes that test them.
"""

import math

import pytest
import torch

from quengine.diagnostics.harness import KernelCheck
from quengine.diagnostics.selftest.self_test import COLS, USES, check_use, random_tensor
from quengine.diagnostics.selftest.self_test_run import SETTINGS, check_cuda, units
from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend

K_TAIL = 32


class Twisted(ReferenceBackend):
    """A backend that gets something wrong when it takes a quantized weight, and takes the twisted one as given."""

    def __init__(self, twist):
        super().__init__(keep=True)
        self.twist = twist

    def _loaded(self, parts):
        return super()._loaded([self.twist(part) if part.format.is_quantized else part for part in parts])


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


def checks(backend, formats=FORMATS) -> list[KernelCheck]:
    return [check_use(backend, name, use) for name in formats for use in USES]


def test_the_definition_itself_passes_every_format_in_every_use():
    done = checks(ReferenceBackend(keep=True))
    assert [(check.subject, check.test) for check in done] == [
        (name, use.name) for name in FORMATS for use in USES
    ]
    assert all(check.error < 1e-12 for check in done)
    assert all(check.passed for check in done)


@pytest.mark.parametrize("twist", [swap_nibbles, swap_sub_scales, drop_tail])
def test_a_wrong_layout_fails_in_every_quantized_format_and_use(twist):
    done = checks(Twisted(twist))
    quantized = {fmt.name for fmt in FORMATS.values() if fmt.is_quantized}
    for use in USES:
        failed = {check.subject for check in done if check.test == use.name and not check.passed}
        assert failed == quantized, use.name


def test_activations_rounded_to_eight_bits_fail():
    class Rounded(ReferenceBackend):
        def logits(self, batch, x, norm, weight):
            groups = x.view(len(x), -1, 32)
            step = groups.abs().amax(-1, keepdim=True) / 127
            return super().logits(batch, (groups / step).round().mul(step).view_as(x), norm, weight)

    done = [check for check in checks(Rounded(keep=True), ["Q4_K", "F16"]) if check.test.endswith("token")]
    assert len(done) == 4 and not any(check.passed for check in done)


def test_a_result_that_is_not_finite_fails():
    class Broken(ReferenceBackend):
        def linear_add(self, *args):
            return super().linear_add(*args) * math.nan

    failed = {check.test for check in checks(Broken(keep=True), ["Q4_K"]) if not check.passed}
    assert failed == {"ffn 1 token", "ffn 24 tokens", "ffn 160 tokens"}


def test_a_kernel_that_cannot_be_run_is_a_failure_with_its_reason():
    class Refusing(ReferenceBackend):
        def norm_glu(self, *_):
            raise RuntimeError("no kernel image is available\nfor this device")

    failed = [check for check in checks(Refusing(keep=True), ["Q6_K"]) if not check.passed]
    assert [check.test for check in failed] == ["ffn 1 token", "ffn 24 tokens", "ffn 160 tokens"]
    assert {check.note for check in failed} == {"RuntimeError: no kernel image is available"}
    assert all(math.isnan(check.error) for check in failed)


@pytest.mark.parametrize("name", FORMATS)
def test_the_random_weights_are_finite_and_vary(name):
    tensor = random_tensor(FORMATS[name], 3, COLS, torch.Generator().manual_seed(1))
    weights = dequantize(tensor.format, tensor.data)
    assert weights.isfinite().all()
    assert 1e-3 < weights.std() < 1e3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_cannot_be_used_is_a_failure_of_every_subject() -> None:
    done = list(check_cuda(0, 2 << 30))
    assert [(check.subject, check.test) for check in done] == [
        (name, test or "run") for name, test in units(on_gpu=True)
    ]
    assert not any(check.passed for check in done)
    assert all(check.note for check in done)


@pytest.mark.gpu
def test_every_kernel_of_this_gpu_is_right() -> None:
    done = list(check_cuda(0, torch.cuda.mem_get_info(0)[0]))
    assert {check.subject for check in done} == {name for name, _ in units(on_gpu=True)}
    assert [check for check in done if not check.passed] == []


def test_the_settings_that_are_sampled_are_those_there_are() -> None:
    from quengine.diagnostics.selftest import self_test_sampling

    assert tuple(self_test_sampling.SETTINGS) == SETTINGS
