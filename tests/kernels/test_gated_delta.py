"""The definition of the gated delta net against the layer of `transformers`."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from quengine.kernels.forward_batch import PendingStates
from quengine.kernels.gated_delta import GatedDeltaSpec, gated_delta
from tests.kernels.gated_delta_steps import Shape, rows_of, spec_of, states
from tests.kernels.short_conv_steps import CHECKPOINTS, prefixes, prompt, tokens

if TYPE_CHECKING:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

WIDTH, COUNT = 24, 150


def _layer(shape: Shape) -> "Qwen3_5GatedDeltaNet":
    """Of `transformers`, random, whose last matrix hands on what it reads."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(3)
    config = Qwen3_5TextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.value_heads,
        linear_key_head_dim=shape.head_dim,
        linear_value_head_dim=shape.head_dim,
        linear_conv_kernel_dim=shape.taps,
    )
    layer = Qwen3_5GatedDeltaNet(config, 0).double().eval()
    layer.norm.weight.data.uniform_(0.5, 1.5)
    layer.dt_bias.data.normal_()
    layer.out_proj = torch.nn.Identity()
    return layer


def _spec(layer: "Qwen3_5GatedDeltaNet", shape: Shape) -> GatedDeltaSpec:
    return GatedDeltaSpec(
        conv=layer.conv1d.weight[:, 0].T.contiguous(),
        decay=-layer.A_log.exp(),
        bias=layer.dt_bias,
        norm=layer.norm.weight,
        key_heads=shape.key_heads,
        value_heads=shape.value_heads,
        head_dim=shape.head_dim,
        tiled=False,
        eps=layer.layer_norm_epsilon,
        cache_group=1,
    )


def _in_pieces(x: Tensor, spec: GatedDeltaSpec, pieces: list[int], shape: Shape) -> Tensor:
    start, found, state = 0, [], states(shape)
    for length in pieces:
        batch = tokens([start], [2]) if length == 1 else prompt([length], [start], [2])
        found.append(gated_delta(batch, x[start : start + length], spec, *state))
        start += length
    return torch.cat(found)


@pytest.mark.parametrize(
    "shape",
    [Shape(2, 2, 8), Shape(2, 4, 8, taps=3), Shape(1, 3, 16, rows=3), Shape(2, 6, 8, rows=7)],
    ids=str,
)
@torch.no_grad()
def test_the_definition_is_the_layer_of_transformers(shape: Shape) -> None:
    """Over a whole text at once, in pieces of any length, and token by token; `transformers` computes in fp32 there."""
    layer = _layer(shape)
    hidden = torch.randn(COUNT, WIDTH, dtype=torch.float64)
    projections = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    x = torch.cat([each(hidden) for each in projections], dim=1)
    whole = layer(hidden[None])[0]
    for pieces in ([COUNT], [1, 2, 40, 107], [1] * COUNT, [64, 33, *[1] * 53]):
        found = _in_pieces(x, _spec(layer, shape), pieces, shape)
        assert (found - whole).norm() < 1e-6 * whole.norm()


@torch.no_grad()
def test_a_tiled_layer_has_its_value_heads_in_another_order() -> None:
    """Value head j of a tiled layer reads key head j % key_heads: those of each key head are `key_heads` apart."""
    shape = Shape(2, 6, 8)
    spec = _spec(_layer(shape), shape)
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # grouped head of each tiled one
    elements = (order[:, None] * shape.head_dim + torch.arange(shape.head_dim)).flatten()
    first = 2 * shape.key_heads * shape.head_dim
    channels = torch.cat([torch.arange(first), first + elements])
    of_z, end = spec.channels + elements, spec.channels + len(elements)
    columns = torch.cat([channels, of_z, end + order, end + shape.value_heads + order])
    tiled = GatedDeltaSpec(
        **{
            **spec.__dict__,
            "conv": spec.conv[:, channels],
            "decay": spec.decay[order],
            "bias": spec.bias[order],
            "tiled": True,
        }
    )
    x = torch.randn(30, sum(spec.widths), dtype=torch.float64)
    grouped = _in_pieces(x, spec, [30], shape)
    assert torch.equal(_in_pieces(x[:, columns], tiled, [30], shape), grouped[:, elements])


def test_another_sequence_leaves_a_state_as_it_is() -> None:
    shape = Shape(2, 4, 8)
    spec, (history, memory) = _spec(_layer(shape), shape), states(shape)
    before = history.clone(), memory.clone()
    with torch.no_grad():
        gated_delta(prompt([5, 3], [0, 9], [1, 3]), torch.randn(8, sum(spec.widths)), spec, history, memory)
    for part, old in zip((history, memory), before, strict=True):
        assert [torch.equal(part[slot], old[slot]) for slot in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("step", CHECKPOINTS)
def test_a_checkpoint_is_the_state_of_the_rows_before_it(step: str) -> None:
    shape, batch = Shape(1, 2, 16), CHECKPOINTS[step]
    spec, x, kept = spec_of(shape), rows_of(len(batch), shape, 3), states(shape)
    gated_delta(batch, x, spec, *kept)
    for prefix, rows, slot, block in prefixes(batch):
        alone = states(shape)
        gated_delta(prefix, x[rows], spec, *alone)
        for part, own in zip(
            kept, alone, strict=True
        ):  # not of the same bits: torch's own functions, by the rows
            torch.testing.assert_close(part[block], own[slot])


def test_states_that_wait_are_those_of_accepted_rows_alone() -> None:
    """Of three rows all and none, of one sequence a prompt's first."""
    shape = Shape(1, 2, 16)
    spec, x = spec_of(shape), rows_of(6, shape, 5)
    state, alone = states(shape), states(shape)
    pending: list[PendingStates] = []
    batch = replace(tokens([0, 1, 2, 9, 10, 11], [1, 1, 1, 3, 3, 3], shares=True), pending=pending)
    y = gated_delta(batch, x, spec, *state)
    assert all(torch.equal(part, before) for part, before in zip(state, states(shape), strict=True))
    pending[0].advance(torch.tensor([2, 0]))
    accepted = tokens([0, 1, 2, 9], [1, 1, 1, 3], shares=True)
    assert torch.equal(gated_delta(accepted, x[:4], spec, *alone), y[:4])
    assert all(torch.equal(part, other) for part, other in zip(state, alone, strict=True))
