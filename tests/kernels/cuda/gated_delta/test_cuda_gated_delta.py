"""The gated delta net's kernels against the definition: results, and the states after them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda.attention.prefill_tiles import cut_tiles
from quengine.kernels.cuda.gated_delta.arithmetic import net_of
from quengine.kernels.cuda.gated_delta.decode import can_norm
from quengine.kernels.cuda.gated_delta.gated_delta import gated_delta_decode, gated_delta_rows
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec
from tests.kernels.gated_delta_steps import STEPS, Shape, expected, rows_of, spec_of, states
from tests.kernels.short_conv_steps import CHECKPOINTS, prompt, stands_for, tokens

SMALL = Shape(1, 2, 16)
RATIOS = [Shape(2, 2, 16, taps=3), Shape(2, 4, 16), Shape(2, 4, 16, tiled=False), Shape(1, 3, 16, rows=7)]
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def on(device: torch.device, spec: GatedDeltaSpec) -> GatedDeltaSpec:
    moved = {name: getattr(spec, name).to(device) for name in ("conv", "decay", "bias", "norm")}
    return replace(spec, **moved)


def run(
    batch: ForwardBatch,
    x: Tensor,
    spec: GatedDeltaSpec,
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
    width = spec.value_heads * spec.head_dim
    result = torch.full((len(batch), width), 7.0, device=device) if out is None else out
    if not several:
        gated_delta_decode(step, on(device, spec), layer, result)
    else:
        gated_delta_rows(step, on(device, spec), layer, result, batch_invariant, pending=batch.pending)
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


@pytest.mark.parametrize("shape", RATIOS)
def test_heads_share_keys_as_in_files_and_in_folders(shape: Shape, device: torch.device) -> None:
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


@pytest.mark.parametrize("head_dim", [32, 128, 256])
def test_heads_of_every_size(head_dim: int, device: torch.device) -> None:
    shape = Shape(1, 1, head_dim)
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


def test_keys_that_are_alike_do_not_spoil_the_inverse(device: torch.device) -> None:
    """Equal keys, no decay and errors taken whole: powers of that matrix reach 10^18, its inverse only 1."""
    shape = Shape(1, 1, 16, taps=1, rows=1)
    spec = replace(
        spec_of(shape), conv=torch.ones(1, 48), decay=torch.full((1,), -1e-3), bias=torch.full((1,), -9.0)
    )
    x = rows_of(64, shape, 6)
    x[:, :32] = 2.0 + 1e-3 * x[:, :32]
    x[:, -2] = 12.0
    batch, state = prompt([64], [0], [1]), states(shape)
    wanted, _, memory = expected(batch, x, spec, *state)
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    torch.testing.assert_close(run(batch, x, spec, layer, device).cpu(), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(layer.parts[1].cpu()[1], memory[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", list(OperandLayout))
@pytest.mark.parametrize("step", ["tokens", "several tokens of a sequence"])
def test_results_as_the_next_matmul_reads_them(
    step: str, layout: OperandLayout, device: torch.device
) -> None:
    shape, batch = Shape(2, 6, 32), STEPS[step]
    spec, state, x = spec_of(shape), states(shape), rows_of(len(batch), shape, 3)
    wanted, _, _ = expected(batch, x, spec, *state)
    kept = batch.slots_of(1) != 0
    out = Fp16Operand.empty(len(batch), 192, device, layout)
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    run(batch, x, spec, layer, device, out=out)
    y = out.dequantize(192).cpu()
    torch.testing.assert_close(y[kept], wanted[kept], rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("shape", [Shape(1, 2, 32), Shape(1, 3, 64), Shape(1, 2, 16)])
def test_a_single_row_is_quantized(shape: Shape, device: torch.device) -> None:
    """By the launch of the recurrence where a head is whole groups of 32, else by the one after it."""
    spec, state, x = spec_of(shape), states(shape), rows_of(1, shape, 3)
    assert can_norm(net_of(spec, 4)) == (shape.head_dim > 16)
    batch = tokens([70], [2])
    wanted, _, memory = expected(batch, x, spec, *state)
    out = QuantizedActivations.empty(1, shape.value_heads * shape.head_dim, device)
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    y = run(batch, x, spec, layer, device, out=out).cpu()
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    torch.testing.assert_close(layer.parts[1].cpu()[2], memory[2], **TOLERANCE)


@pytest.mark.parametrize("shape", [SMALL, Shape(2, 4, 16, taps=3, tiled=False, rows=3)])
def test_states_advance_over_accepted_rows_alone(shape: Shape, device: torch.device) -> None:
    """Of six rows more than a history holds, of two, of none, and of padding; and as if only these had been."""
    accepted = [5, 1, -1, -1]
    starts, slots = [65, 0, 40, 0], [2, 1, 3, 0]
    batch = tokens(
        [start + n for start, slot in zip(starts, slots, strict=True) for n in range(6)],
        [slot for slot in slots for _ in range(6)],
        shares=True,
    )
    spec, state, x = spec_of(shape), states(shape), rows_of(24, shape, 3)
    taken = [row for n, count in enumerate(accepted) for row in range(6 * n, 6 * n + count + 1)]
    alone = tokens(batch.positions[taken].tolist(), batch.slots_of(1)[taken].tolist(), shares=True)
    _, history, memory = expected(alone, x[taken], spec, *state)
    every = expected(batch, x, spec, *state)[0]
    counts = torch.tensor(accepted, dtype=torch.int32)
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    step = replace(batch, pending=[])
    y = run(step, x, spec, layer, device).cpu()
    torch.testing.assert_close(y[:18], every[:18], **TOLERANCE)
    assert all(torch.equal(part.cpu(), before) for part, before in zip(layer.parts, state, strict=True))
    assert step.pending is not None and len(step.pending) == 1
    step.pending[0].advance(counts.to(device))
    torch.testing.assert_close(layer.parts[1].cpu(), memory, **TOLERANCE)
    written = run_alone(alone, x[taken], spec, state, device)
    assert torch.equal(layer.parts[0], written[0])
    torch.testing.assert_close(
        layer.parts[1], written[1], **TOLERANCE
    )  # of another kernel: last bits are its own
    for slot, end in ((2, 71), (1, 2)):
        places = [position % shape.rows for position in range(max(0, end - shape.taps + 1), end)]
        assert torch.equal(layer.parts[0].cpu()[slot, places], history[slot, places])


def run_alone(
    batch: ForwardBatch, x: Tensor, spec: GatedDeltaSpec, state: tuple[Tensor, ...], device: torch.device
) -> tuple[Tensor, ...]:
    """The states after a step that writes them."""
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    run(batch, x, spec, layer, device)
    return layer.parts
