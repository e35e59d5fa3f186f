"""The definition of Mamba2's layer against that of `transformers`, which takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from quengine.kernels.mamba2 import Mamba2Spec, mamba2
from tests.kernels.mamba2_steps import Shape, rows_of, spec_of, states
from tests.kernels.short_conv_steps import CHECKPOINTS, prefixes, prompt, tokens

if TYPE_CHECKING:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

WIDTH, COUNT = 24, 300


def _layer(shape: Shape) -> NemotronHMamba2Mixer:
    """Of `transformers`, random, whose last matrix hands on what it reads."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    torch.manual_seed(3)
    config = NemotronHConfig(
        hidden_size=WIDTH,
        layers_block_type=["linear_attention"],
        mamba_num_heads=shape.heads,
        mamba_head_dim=shape.head_dim,
        n_groups=shape.groups,
        ssm_state_size=shape.state_dim,
        conv_kernel=shape.taps,
        time_step_min=shape.limits[0],
    )
    layer = NemotronHMamba2Mixer(config, 0).double().eval()
    for weight in (layer.norm.weight, layer.D, layer.conv1d.bias):
        weight.data.uniform_(0.5, 1.5)
    layer.A_log.data.uniform_(-3.0, 1.0)
    layer.dt_bias.data.normal_(-1.0)
    layer.out_proj = torch.nn.Identity()
    return layer


def _spec(layer: NemotronHMamba2Mixer, shape: Shape) -> Mamba2Spec:
    return Mamba2Spec(
        conv=layer.conv1d.weight[:, 0].T.contiguous(),
        conv_bias=layer.conv1d.bias,
        decay=-layer.A_log.exp(),
        bias=layer.dt_bias,
        skip=layer.D,
        norm=layer.norm.weight,
        heads=shape.heads,
        head_dim=shape.head_dim,
        groups=shape.groups,
        state_dim=shape.state_dim,
        step_limits=shape.limits,
        eps=layer.norm.variance_epsilon,
        cache_group=1,
    )


def _in_pieces(x: Tensor, spec: Mamba2Spec, pieces: list[int], shape: Shape) -> Tensor:
    start, found, state = 0, [], states(shape)
    for length in pieces:
        batch = tokens([start], [2]) if length == 1 else prompt([length], [start], [2])
        found.append(mamba2(batch, x[start : start + length], spec, *state))
        start += length
    return torch.cat(found)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 8, 2, 16),
        Shape(4, 8, 1, 8, taps=3, rows=3),
        Shape(6, 16, 6, 8, rows=7),
        Shape(4, 8, 2, 16, limits=(0.3, float("inf"))),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_definition_is_the_layer_of_transformers(shape: Shape) -> None:
    """Over a whole text at once, in pieces of any length, and token by token; `transformers` computes in fp32 there,
    in chunks of 128."""
    layer = _layer(shape)
    hidden = torch.randn(COUNT, WIDTH, dtype=torch.float64)
    x, whole = layer.in_proj(hidden), layer(hidden[None])[0]
    for pieces in ([COUNT], [1, 2, 40, 257], [1] * COUNT, [128, 64, *[1] * 108]):
        found = _in_pieces(x, _spec(layer, shape), pieces, shape)
        assert (found - whole).norm() < 1e-6 * whole.norm()


def test_another_sequence_leaves_a_state_as_it_is() -> None:
    shape = Shape(4, 8, 2, 8)
    spec, (history, memory) = _spec(_layer(shape), shape), states(shape)
    before = history.clone(), memory.clone()
    with torch.no_grad():
        mamba2(prompt([5, 3], [0, 9], [1, 3]), torch.randn(8, sum(spec.widths)), spec, history, memory)
    for part, old in zip((history, memory), before, strict=True):
        assert [torch.equal(part[slot], old[slot]) for slot in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("step", CHECKPOINTS)
def test_a_checkpoint_is_the_state_of_the_rows_before_it(step: str) -> None:
    shape, batch = Shape(2, 16, 1, 16), CHECKPOINTS[step]
    spec, x, kept = spec_of(shape), rows_of(len(batch), shape, 3), states(shape)
    mamba2(batch, x, spec, *kept)
    for prefix, rows, slot, block in prefixes(batch):
        alone = states(shape)
        mamba2(prefix, x[rows], spec, *alone)
        for part, own in zip(
            kept, alone, strict=True
        ):  # not of the same bits: torch's own functions, by the rows
            torch.testing.assert_close(part[block], own[slot])
