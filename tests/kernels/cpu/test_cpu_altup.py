"""Alternating updates in compiled code, step by step against torch (kernels/altup.py) in fp64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from quengine.kernels import altup
from quengine.kernels.altup_operations import AltUpSpec
from quengine.kernels.cpu.ops.altup import (
    add_launch,
    close_launch,
    correct_launch,
    join_launch,
    open_launch,
    predict_launch,
    sparse_gate_launch,
)
from quengine.kernels.cpu.runtime.threads import run
from quengine.kernels.rms_norm import RMSNorm, rms_norm

COUNT, EPS = 4, 1e-6
SHAPES = [(1, 64), (3, 100), (2, 33)]
"""Tokens and columns, of which the last ones fill no vector."""


def near(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)


def spec_of(width: int) -> AltUpSpec:
    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape)

    norm = RMSNorm((1.0 + random(width)) / width, EPS)
    return AltUpSpec(
        norm, 3.0 * random(COUNT, width), random(16, COUNT), random(COUNT, COUNT), 1.0 + random(width)
    )


def modalities(row: Tensor, spec: AltUpSpec) -> Tensor:
    return altup.modalities(rms_norm(row.double(), spec.norm.weight.double(), EPS), spec.router.double())


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_rows_are_predicted_and_corrected(tokens: int, width: int) -> None:
    torch.manual_seed(0)
    spec, x, y = spec_of(width), torch.randn(COUNT, tokens, width), torch.randn(tokens, width)
    room, out = torch.empty(tokens, width + COUNT), torch.empty_like(x)
    run([predict_launch(x, out, room, spec)])
    near(
        out,
        altup.predict(x.double().transpose(0, 1), modalities(x[0], spec), spec.predict.double()).transpose(
            0, 1
        ),
    )
    found, scaled = torch.empty_like(x), torch.empty_like(y)
    run([correct_launch(out, y, found, scaled, room, spec)])
    rows, of_router = out.double().transpose(0, 1), modalities(y, spec)
    wanted = altup.correct(rows, y.double(), of_router, spec.correct.double()).transpose(0, 1)
    near(found, wanted)
    near(scaled, wanted[0] * spec.scale.double())
    run([add_launch(found, y)])
    near(found[0], wanted[0])
    near(found[1:], wanted[1:] + y.double())


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_rows_are_made_of_one_and_become_one(tokens: int, width: int) -> None:
    torch.manual_seed(1)
    x, projected = torch.randn(tokens, width), 5.0 * torch.randn(tokens, COUNT - 1, width)
    projected[0, 1] = 0.0  # a row without a size
    out = torch.empty(COUNT, tokens, width)
    run([open_launch(x, projected.flatten(1), out)])
    near(out[0], x.double())
    near(out[1:].transpose(0, 1), altup.of_size(projected.double(), x.double()[:, None]))
    total, wanted = torch.empty(tokens, width), out[0].double()
    for number in range(1, COUNT):
        run([close_launch(out, projected[:, number - 1].contiguous(), total, number)])
        wanted = wanted + altup.of_size(projected[:, number - 1].double(), out[0].double())
    near(total, wanted / COUNT)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_rows_are_joined_and_gates_cut(tokens: int, width: int) -> None:
    torch.manual_seed(2)
    y, beside, out = torch.randn(tokens, width), torch.randn(tokens, width), torch.empty(tokens, width)
    run([join_launch(y, beside, out)])
    near(out, (y.double() + beside.double()) / 2**0.5)
    both = torch.randn(tokens, 2 * width) + 0.5
    run([sparse_gate_launch(both, 0.7, out)])
    gate, up = both.double().chunk(2, dim=1)
    above = altup.above_cutoff(gate, 0.7)
    assert 0.1 < float((above > 0).double().mean()) < 0.4
    near(out, gelu(above, approximate="tanh") * up)
