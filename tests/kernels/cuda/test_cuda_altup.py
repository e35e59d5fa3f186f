"""Alternating updates on CUDA against torch (kernels/altup.py) in fp64."""

import pytest
import torch
from torch import Tensor

from quengine.kernels import altup
from quengine.kernels.altup_operations import AltUpSpec
from quengine.kernels.cuda.altup import correct, predict
from quengine.kernels.rms_norm import RMSNorm, rms_norm

EPS = 1e-6


def random_spec(count: int, width: int, device: torch.device) -> AltUpSpec:
    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape).to(device)

    norm = RMSNorm((1.0 + random(width)) / width, EPS)
    router, scale = 3.0 * random(count, width), 1.0 + random(width)
    return AltUpSpec(norm, router, random(count * count, count), random(count, count), scale)


def modalities(row: Tensor, spec: AltUpSpec) -> Tensor:
    return altup.modalities(rms_norm(row.double(), spec.norm.weight.double(), EPS), spec.router.double())


@pytest.mark.parametrize(("count", "tokens", "width"), [(4, 1, 64), (4, 3, 100), (3, 2, 33)])
def test_rows_are_predicted_and_corrected(count: int, tokens: int, width: int, device: torch.device) -> None:
    torch.manual_seed(0)
    spec = random_spec(count, width, device)
    x, y = torch.randn(count, tokens, width).to(device), torch.randn(tokens, width).to(device)
    out, first = predict(x, spec)
    wanted = altup.predict(x.double().transpose(0, 1), modalities(x[0], spec), spec.predict.double())
    torch.testing.assert_close(out.double(), wanted.transpose(0, 1), rtol=2e-6, atol=2e-6)
    assert torch.equal(first, out[0]) and first.data_ptr() != out.data_ptr()
    found, scaled = correct(out, y, spec)
    rows = out.double().transpose(0, 1)
    wanted = altup.correct(rows, y.double(), modalities(y, spec), spec.correct.double()).transpose(0, 1)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(scaled.double(), wanted[0] * spec.scale.double(), rtol=2e-6, atol=2e-6)
    alone, _ = predict(x[:, -1:], spec)
    assert torch.equal(alone[:, 0], out[:, -1])
