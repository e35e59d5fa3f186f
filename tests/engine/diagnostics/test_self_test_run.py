"""Running the self-tests: every subject is reported, in order, whatever happens to the processes that test them."""

import pytest
import torch

from quengine.diagnostics.selftest.self_test_run import GPU_UNITS, SAMPLING, check_cuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_cannot_be_used_is_a_failure_of_every_subject() -> None:
    done = list(check_cuda(0, 2 << 30))
    assert [(check.subject, check.test) for check in done] == [
        (name, test or "run") for name, test in GPU_UNITS
    ]
    assert not any(check.passed for check in done)
    assert all(check.note for check in done)


@pytest.mark.gpu
def test_every_kernel_of_this_gpu_is_right() -> None:
    done = list(check_cuda(0, torch.cuda.mem_get_info(0)[0]))
    assert {check.subject for check in done} == {name for name, _ in GPU_UNITS}
    assert [check for check in done if not check.passed] == []


def test_the_settings_that_are_sampled_are_those_there_are() -> None:
    from quengine.diagnostics.selftest.self_test_sampling import SETTINGS, SUBJECT

    assert {SUBJECT: tuple(SETTINGS)} == SAMPLING
