"""Mamba2's kernels against the definition: results, and the states after them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda.attention.prefill_tiles import cut_tiles
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.mamba2.mamba2 import mamba2_decode, mamba2_rows
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.mamba2 import Mamba2Spec
from tests.kernels.mamba2_steps import STEPS, Shape, expected, rows_of, spec_of, states
from tests.kernels.short_conv_steps import CHECKPOINTS, prompt, stands_for, tokens

SMALL = Shape(2, 16, 1, 16)
GROUPS = [
    Shape(4, 16, 2, 16, taps=3),
    Shape(6, 16, 3, 16, rows=7),
    Shape(6, 16, 1, 32, limits=(0.1, 0.3)),
    Shape(6, 16, 2, 16),
]
NAMES = ("conv", "conv_bias", "decay", "bias", "skip", "norm")
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def on(device: torch.device, spec: Mamba2Spec) -> Mamba2Spec:
    moved = {name: getattr(spec, name).to(device) for name in NAMES}
    return replace(spec, **moved)


def run(
    batch: ForwardBatch,
    x: Tensor,
    spec: Mamba2Spec,
    layer: SlotLayer,
    device: torch.device,
    batch_invariant: bool = False,
    block_rows: int = 64,
    out: Tensor | QuantizedActivations | Fp16Operand | None = None,
) -> Tensor:
    """y of a step, whose states are those of `layer`."""
    tiles = None
    if batch.phase == "prefill":
        cut = cut_tiles(batch, block_rows)
        tiles = replace(cut, sequences=cut.sequences.to(device), tiles=cut.tiles.to(device))
    several, tables = batch.phase == "prefill" or batch.shares_sequences, batch.block_tables_of(1).to(device)
    # Rows as a matmul leaves them: scales of powers of two change no bit.
    scale = torch.tensor([2.0, 0.5, 8.0])[torch.arange(len(x)) % 3] if several else torch.ones(len(x))
    step = StateRows(
        (x / (4.0 * scale if several else scale)[:, None]).to(device), scale.to(device), 4.0 if several else 1.0,
        batch.positions.to(device), tables, tiles,
    )  # fmt: skip
    width = spec.inner
    result = torch.full((len(batch), width), 7.0, device=device) if out is None else out
    if not several:
        mamba2_decode(step, on(device, spec), layer, result)
    else:
        mamba2_rows(step, on(device, spec), layer, result, batch_invariant)
    return result if isinstance(result, Tensor) else result.dequantize()[:, :width]


def check(
    batch: ForwardBatch,
    shape: Shape,
    device: torch.device,
    batch_invariant: bool = False,
    block_rows: int = 64,
) -> None:
    """y, history and memory of a step are those of the definition; slot 0 is padding, and kept as it is."""
    spec, state, x = spec_of(shape), states(shape), rows_of(len(batch), shape, 3)
    wanted, history, memory = expected(batch, x, spec, *state)
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    y = run(batch, x, spec, layer, device, batch_invariant, block_rows).cpu()
    for rows, _, slot in batch.sequences(1):
        if slot:
            torch.testing.assert_close(y[rows], wanted[rows], **TOLERANCE)
        else:
            assert torch.equal(y[rows], torch.zeros_like(y[rows]))
    found_history, found_memory = (part.cpu() for part in layer.parts)
    torch.testing.assert_close(found_memory[1:], memory[1:], **TOLERANCE)
    assert torch.equal(found_memory[0], state[1][0]) and torch.equal(found_history[0], state[0][0])
    for slot, end in stands_for(batch).items():
        places = [position % shape.rows for position in range(max(0, end - shape.taps + 1), end)]
        assert torch.equal(found_history[slot, places], history[slot, places])


@pytest.mark.parametrize("step", STEPS)
def test_steps_are_those_of_the_definition(step: str, device: torch.device) -> None:
    check(STEPS[step], SMALL, device)


@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_heads_share_groups(shape: Shape, device: torch.device) -> None:
    check(STEPS["tokens"], shape, device)
    check(prompt([70], [5], [2]), shape, device)


@pytest.mark.parametrize("step", CHECKPOINTS)
def test_states_are_kept_on_the_way(step: str, device: torch.device) -> None:
    check(CHECKPOINTS[step], SMALL, device)
    check(CHECKPOINTS[step], SMALL, device, batch_invariant=True)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_a_chunk_ends_anywhere(rows: int, device: torch.device) -> None:
    check(prompt([rows, 3], [0, 100], [3, 1]), SMALL, device)
    check(prompt([rows], [7], [1]), SMALL, device, block_rows=128)


@pytest.mark.parametrize("step", [name for name, batch in STEPS.items() if batch.phase == "prefill"])
def test_row_by_row_a_prompt_is_the_same(step: str, device: torch.device) -> None:
    check(STEPS[step], SMALL, device, batch_invariant=True)


@pytest.mark.parametrize(("head_dim", "state_dim"), [(64, 128), (32, 256), (128, 16), (80, 128)])
def test_heads_and_states_of_every_size(head_dim: int, state_dim: int, device: torch.device) -> None:
    shape = Shape(1, head_dim, 1, state_dim)
    check(tokens([0, 9], [1, 2]), shape, device)
    check(prompt([35], [3], [1]), shape, device)


def test_rows_of_a_sequence_may_lie_in_any_order(device: torch.device) -> None:
    """As rows of a decode step do, whose places others have left."""
    positions, slots = [67, 5, 66, 0, 65, 6], [2, 1, 2, 0, 2, 1]
    order = [4, 2, 0, 1, 5]
    spec, state, x = spec_of(SMALL), states(SMALL), rows_of(6, SMALL, 3)
    batch = tokens([positions[row] for row in order], [slots[row] for row in order], shares=True)
    wanted, history, memory = expected(batch, x[order], spec, *state)
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    y = run(tokens(positions, slots, shares=True), x, spec, layer, device).cpu()
    torch.testing.assert_close(y[order], wanted, **TOLERANCE)
    assert not y[3].any()
    torch.testing.assert_close(layer.parts[1].cpu()[1:3], memory[1:3], **TOLERANCE)
    for slot, last in ((1, 6), (2, 67)):
        places = [position % 4 for position in range(last - 2, last + 1)]
        assert torch.equal(layer.parts[0].cpu()[slot, places], history[slot, places])


def steps_of(lengths: Sequence[int]) -> list[ForwardBatch]:
    """A text in chunks of these lengths, single tokens as steps of decode."""
    steps, start = [], 0
    for length in lengths:
        step = prompt([length], [start], [1]) if length > 1 else tokens([start], [1])
        steps.append(step)
        start += length
    return steps


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_states_go_on_from_step_to_step(batch_invariant: bool, device: torch.device) -> None:
    """Of one text, in one step and cut: the same within rounding, and row by row to the bit."""
    spec, state, x = spec_of(SMALL), states(SMALL), rows_of(90, SMALL, 5)
    wanted, _, memory = expected(prompt([90], [0], [1]), x, spec, *state)
    found = []
    for lengths in ([90], [20, 67, 3]) if batch_invariant else ([20, 1, 65, 1, 1, 2],):
        layer = SlotLayer(tuple(part.clone().to(device) for part in state))
        rows = x.split(lengths)
        parts = [
            run(step, part, spec, layer, device, batch_invariant)
            for step, part in zip(steps_of(lengths), rows, strict=True)
        ]
        y = torch.cat(parts).cpu()
        torch.testing.assert_close(y, wanted, **TOLERANCE)
        torch.testing.assert_close(layer.parts[1].cpu()[1], memory[1], **TOLERANCE)
        found.append((y, layer.parts[1].cpu()))
    for y, kept in found[1:]:
        assert torch.equal(y, found[0][0]) and torch.equal(kept, found[0][1])


@pytest.mark.parametrize("layout", list(OperandLayout))
@pytest.mark.parametrize("step", ["tokens", "several tokens of a sequence"])
@pytest.mark.parametrize("groups", [2, 3])
def test_results_as_the_next_matmul_reads_them(
    step: str, layout: OperandLayout, groups: int, device: torch.device
) -> None:
    """Groups of 96 elements, and of 64."""
    shape, batch = Shape(6, 32, groups, 16), STEPS[step]
    spec, state, x = spec_of(shape), states(shape), rows_of(len(batch), shape, 3)
    wanted, _, _ = expected(batch, x, spec, *state)
    kept = batch.slots_of(1) != 0
    out = Fp16Operand.empty(len(batch), 192, device, layout)
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    run(batch, x, spec, layer, device, out=out)
    y = out.dequantize(192).cpu()
    torch.testing.assert_close(y[kept], wanted[kept], rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "shape", [Shape(2, 32, 1, 16), Shape(3, 64, 1, 16), Shape(6, 16, 3, 16), Shape(2, 80, 1, 128)], ids=str
)
def test_a_single_row_is_quantized(shape: Shape, device: torch.device) -> None:
    spec, state, x = spec_of(shape), states(shape), rows_of(1, shape, 3)
    batch = tokens([70], [2])
    wanted, _, memory = expected(batch, x, spec, *state)
    out = QuantizedActivations.empty(1, spec.inner, device)
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    y = run(batch, x, spec, layer, device, out=out).cpu()
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    torch.testing.assert_close(layer.parts[1].cpu()[2], memory[2], **TOLERANCE)
