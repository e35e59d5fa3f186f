"""The beginning of a decode step: its rows are read from the tables of slots; and its end, by sampling."""

import pytest
import torch
from torch import Tensor

from quengine.kernels.cuda.sampling.batch_rows import (
    ChosenTokens,
    RowInputs,
    SlotTables,
    StepRows,
    place_rows,
    take_drafts,
)
from quengine.kernels.cuda.sampling.sampling import (
    DecodeState,
    SamplingBuffers,
    SamplingSettings,
    sample_step,
)
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK

SLOTS, BLOCKS = 5, 3


def ints(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def slots_on(device: torch.device, groups: int = 2, blocks: int = BLOCKS) -> SlotTables:
    """Slot s is at token 10 + s, position 40 * s; slot 4 has no valid token."""
    tables = torch.arange(1, 1 + groups * SLOTS * blocks, dtype=torch.int32, device=device)
    tokens = torch.tensor([10, 11, 12, 13, -1], device=device)
    return SlotTables(tokens, ints(device, 0, 40, 80, 20, 8), tables.view(groups, SLOTS, blocks))


def inputs_on(device: torch.device, rows: int, groups: int = 2, blocks: int = BLOCKS) -> RowInputs:
    """Full of what earlier steps have left."""
    tables = torch.full((groups, rows, blocks), 99, dtype=torch.int32, device=device)
    return RowInputs(
        torch.full((rows,), 98, device=device),
        torch.full((rows,), 97, dtype=torch.int32, device=device),
        tables,
    )


def test_rows_are_their_slots_or_what_the_host_gives(device: torch.device) -> None:
    slots, inputs, chosen = slots_on(device), inputs_on(device, 8), ChosenTokens.allocate(2, 8, device)
    rows = ints(device, 2, 4, 1, 1, 0, 0, 0, 0)
    given = StepRows(rows, rows, ints(device, -1, -1, 7, 2**31 - 1), ints(device, 0, 0, 31, 32))
    place_rows(given, slots, inputs, chosen, 4)
    assert inputs.tokens.tolist() == [12, 0, 7, 2**31 - 1, *[98] * 4]
    assert inputs.positions.tolist() == [80, 8, 31, 32, *[97] * 4]
    for group in range(2):
        table, found = slots.tables[group].tolist(), inputs.tables[group].tolist()
        assert found[0] == table[2] and found[1] == [table[4][0], *[PADDING_BLOCK] * 2]
        assert found[2] == [table[1][0], *[PADDING_BLOCK] * 2], "of position 31"
        assert found[3] == [*table[1][:2], PADDING_BLOCK] and found[4] == [99] * BLOCKS


def test_tables_that_are_longer_than_what_is_copied_at_a_time(device: torch.device) -> None:
    slots, inputs = slots_on(device, 1, 2500), inputs_on(device, 2, 1, 2500)
    slots.positions[3] = 2100 * BLOCK_SIZE
    rows, device_rows = ints(device, 3, 0), ints(device, -1, -1)
    place_rows(StepRows(rows, rows, device_rows, rows), slots, inputs, ChosenTokens.allocate(1, 2, device), 2)
    expected = slots.tables[0, 3].clone()
    expected[2101:] = PADDING_BLOCK
    assert torch.equal(inputs.tables[0, 0], expected)


def test_rows_take_what_was_drafted_for_their_positions(device: torch.device) -> None:
    drafted = torch.arange(4 * 50, dtype=torch.int32, device=device).view(4, 50)
    drafted[3, 7] = -1
    given = [-1, 0, 2**31 - 1, -2, -4, -5, -5, *[5] * 40, -3, -3]
    places = [30, 31, 32, 49, 0, 6, 7, *[0] * 40, 1, 2]
    rows = ints(device, *given)
    take_drafts(StepRows(rows, rows, rows, ints(device, *places)), drafted, len(given) - 1)
    assert rows.tolist() == [-1, 0, 2**31 - 1, 49, 100, 156, 0, *[5] * 40, 51, -3], "of the first rows"


@pytest.mark.parametrize("top_k", [1, 40, 0], ids=["greedy", "of candidates", "of all"])
def test_rows_sample_with_their_slots_settings_for_their_targets(device: torch.device, top_k: int) -> None:
    """Steps leave their tokens in turns, row by row; slots that a step does not name stay as they are."""
    vocab, context = 70, 90
    chosen, inputs = ChosenTokens.allocate(3, 8, device), inputs_on(device, 8)
    slots = slots_on(device)
    buffers = SamplingBuffers.allocate(SLOTS, vocab, top_k, device, True, False)
    history = torch.zeros(SLOTS, context, dtype=torch.int32, device=device)
    for slot in range(SLOTS):
        bias = {20 + slot: 1e9}  # the only token that is drawn
        buffers.set(slot, SamplingSettings(top_k=top_k, seed=slot), history[slot, :0], bias)
    padding = 4
    step = StepRows(
        ints(device, 3, 1, 1, padding),
        ints(device, 3, padding, 1, padding),
        ints(device, -1, 5, 6, 0),
        ints(device, 0, 40, 41, 0),
    )
    for turn in (0, 1, 2, 0):
        before = slots.positions.tolist()
        place_rows(step, slots, inputs, chosen, 4)
        state = DecodeState(
            slots.tokens, slots.positions, history, step.slots, step.targets, inputs.positions, chosen
        )
        sample_step(torch.zeros(4, vocab, device=device), state, buffers)
        assert int(chosen.turn) == turn and chosen.tokens[turn].tolist() == [23, 21, 21, 24, *[0] * 4]
        assert slots.tokens[:4].tolist() == [10, 21, 12, 23]
        assert slots.positions[:4].tolist() == [0, 42, 80, before[3] + 1]
        assert history[3, before[3] + 1] == 23 and history[1, 42] == 21 and not history[2].any()
