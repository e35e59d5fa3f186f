"""The compiled gated delta net against the definition: results, states after them, and the same bits for any chunks."""

import pytest
import torch

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cpu.ops.state_copy import copy_states
from tests.kernels.cpu.cpu_runs import gated_delta
from tests.kernels.gated_delta_steps import Shape, expected, rows_of, spec_of, states
from tests.kernels.short_conv_steps import ALL_STEPS, prompt, tokens
from tests.kernels.weights import nmse

SHAPES = [
    Shape(2, 4, 128),
    Shape(2, 2, 8, taps=3, rows=5),
    Shape(1, 3, 40, tiled=False),
    Shape(2, 6, 32, taps=1, rows=1),
]


@pytest.mark.parametrize("step", ALL_STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_those_of_the_definition(step: str, shape: Shape) -> None:
    batch, spec, (history, memory) = ALL_STEPS[step], spec_of(shape), states(shape)
    x = rows_of(len(batch), shape, 3)
    wanted, *after = expected(batch, x, spec, history, memory)
    layer = SlotLayer((history.clone(), memory.clone()))
    made = gated_delta(batch, x.clone(), spec, layer)
    assert nmse(made, wanted) < 1e-11
    assert torch.equal(layer.parts[0], after[0])
    assert nmse(layer.parts[1].flatten(1), after[1].flatten(1)) < 1e-11


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_has_the_same_bits_in_any_chunks(shape: Shape) -> None:
    spec, x = spec_of(shape), rows_of(90, shape, 5)
    found = []
    for pieces in ([90], [1] * 90, [64, 26], [7, 1, 1, 40, 41]):
        layer, start, made = SlotLayer(states(shape)), 0, []
        for length in pieces:
            rows = x[start : start + length].clone()
            batch = tokens([start], [2]) if length == 1 else prompt([length], [start], [2])
            made.append(gated_delta(batch, rows, spec, layer))
            start += length
        found.append([torch.cat(made), *(part[2] for part in layer.parts)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_sequences_of_a_step_leave_each_other_alone() -> None:
    shape = SHAPES[0]
    spec, x = spec_of(shape), rows_of(30, shape, 6)
    layer = SlotLayer(states(shape))
    together = gated_delta(prompt([12, 18], [0, 5], [3, 1]), x.clone(), spec, layer)
    alone = SlotLayer(states(shape))
    second = gated_delta(prompt([18], [5], [1]), x[12:].clone(), spec, alone)
    assert torch.equal(together[12:], second)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(layer.parts, alone.parts, strict=True))


def test_extreme_gates_are_those_of_the_definition() -> None:
    """Strengths of 0 and 1, decays to 0 and of nothing."""
    shape = Shape(1, 8, 16)
    spec, x = spec_of(shape), rows_of(6, shape, 7)
    extremes = torch.tensor([-200.0, -88.0, -17.0, 0.0, 17.0, 30.0, 88.0, 200.0])
    x[:, -16:-8], x[:, -8:] = extremes, extremes.flip(0)
    batch, (history, memory) = prompt([6], [9], [1]), states(shape)
    wanted, *after = expected(batch, x, spec, history, memory)
    layer = SlotLayer((history, memory))
    made = gated_delta(batch, x, spec, layer)
    assert nmse(made, wanted) < 1e-11 and nmse(layer.parts[1][1], after[1][1]) < 1e-11


def test_states_of_all_layers_are_copied() -> None:
    for shape in ((3, 5, 4, 9), (2, 4, 70, 900)):
        part = torch.randn(shape, generator=torch.Generator().manual_seed(8))
        wanted = part.clone()
        wanted[:, 1] = part[:, 3]
        copy_states(part, 3, 1)
        assert torch.equal(part, wanted)
