"""The self-test of image encoders passes right layers, and sees those that are wrong in one part."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.diagnostics.selftest.self_test_vision import LAYERS, VISION, check_vision
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.vision_rows import PatchRotation
from quengine.models.vision import vision_block
from quengine.models.vision.blocks import Mlp

CPU = ReferenceBackend(keep=True)


def test_torchs_operations_pass() -> None:
    checks = list(check_vision(CPU, VISION))
    assert [(check.subject, check.test) for check in checks] == [(VISION, test) for test in LAYERS]
    assert all(check.passed and check.error < 1e-9 for check in checks), checks


def _unturned(turn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, x: x if x.dtype == torch.float32 else turn(self, x)


def _shifted(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, x: run(self, x).roll(int(x.dtype == torch.float32), -1)


@pytest.mark.parametrize(
    ("of", "name", "spoil"), [(PatchRotation, "__call__", _unturned), (Mlp, "__call__", _shifted)]
)
def test_a_wrong_one_is_seen(of: Any, name: str, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of, name, spoil(getattr(of, name)))
    assert not any(check.passed for check in check_vision(CPU, VISION))


def test_an_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(vision_block.VisionBlock, "__call__", fails)
    assert [check.note for check in check_vision(CPU, VISION)] == ["RuntimeError: no such kernel"] * 2


@pytest.mark.gpu
def test_cudas_kernels_pass() -> None:
    checks = list(check_vision(CudaBackend(torch.device("cuda")), VISION))
    assert len(checks) == 2 and all(check.passed for check in checks), checks
