"""The rows of steps that draft, and what they accept: the kernels against their definition, and both against lists."""

import torch
from torch import Tensor

from quengine.kernels import draft_rows as definition
from quengine.kernels.cuda.sampling import draft_rows
from quengine.kernels.draft_rows import Drafting, Newest, PlacedRows
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK

SLOTS, CONTEXT, MOST = 6, 70, 3
UNUSED = SLOTS - 1


def ints(device: torch.device, *values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def newest_on(device: torch.device) -> Newest:
    """Slot s is at position 12 * s + 1; its token at position p is 100 * s + p, as far as it has been sampled."""
    history = torch.arange(CONTEXT, dtype=torch.int32).repeat(SLOTS, 1) + 100 * torch.arange(SLOTS)[:, None]
    positions = 12 * torch.arange(SLOTS) + 1
    tokens = history[torch.arange(SLOTS), positions].long()
    return Newest(tokens.to(device), positions.int().to(device), history.int().to(device))


def drafting_on(device: torch.device) -> Drafting:
    """Slots 4, 1 and 0 as the device has them, 2 as the host says, and padding; 1 may have a draft of one token, and 4
    has room for one."""
    recent = torch.tensor([[7, 7, 7, 7], [7, 7, 7, 7], [7, 7, 7, 7], [50, 51, 52, 53], [7, 7, 7, 7]])
    return Drafting(
        ints(device, 4, 1, 0, 2, UNUSED),
        ints(device, 3, 1, 3, 3, 3),
        ints(device, 51, 64, 64, 64, 64),
        ints(device, -1, -1, -1, 2, -1),
        recent.int().to(device),
    )


def placed_on(device: torch.device, rows: int, blocks: int) -> PlacedRows:
    """Full of what earlier steps have left."""
    table = torch.full((2, rows + 3, blocks), 99, dtype=torch.int32, device=device)[:, :rows]
    numbers = torch.full((rows,), 98, dtype=torch.int32, device=device)
    return PlacedRows(numbers.long(), numbers.clone(), table, numbers.clone(), numbers[:5].clone())


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def entered(device: torch.device) -> tuple[Newest, Newest, Drafting]:
    ours, theirs, drafting = newest_on(device), newest_on(device), drafting_on(device)
    turn = ints(device, 1)
    draft_rows.enter(drafting, ours, turn, 2)
    definition.enter(drafting, theirs)
    assert same(ours, theirs) and turn.tolist() == [0]
    return ours, theirs, drafting


def test_what_the_host_knows_is_written_to_its_slots(device: torch.device) -> None:
    newest, _, _ = entered(device)
    assert newest.positions.tolist() == [1, 13, 2, 37, 49, 61]
    assert newest.tokens[2] == 53 and newest.history[2, :4].tolist() == [51, 52, 53, 203], (
        "of three positions"
    )
    assert newest.history[4, :50].tolist() == list(range(400, 450))


def test_rows_are_before_and_after_the_newest_tokens(device: torch.device) -> None:
    newest, _, drafting = entered(device)
    blocks = -(-CONTEXT // BLOCK_SIZE)
    tables = torch.arange(2 * 8 * blocks, dtype=torch.int32, device=device).view(2, 8, blocks)[:, :SLOTS]
    drafted = 1000 + newest.history
    drafted[1, 14] = -1
    for tokens, first, count in ((newest.history, -MOST, MOST + 1), (drafted, 0, MOST + 1), (drafted, 2, 1)):
        placed = placed_on(device, 5 * count, blocks)
        draft_rows.place(drafting, newest, tokens, tables, first, count, placed)
        assert same(placed, definition.rows_of(drafting, newest, tokens, tables, first, count))
        if first < 0:
            assert placed.tokens.tolist() == [
                *(446, 447, 448, 449), *(110, 111, 112, 113), *(0, 0, 0, 1), *(0, 51, 52, 53), *(0, 0, 0, 0)
            ]  # fmt: skip
            assert placed.slots.tolist()[8:14] == [UNUSED, UNUSED, 0, 0, UNUSED, 2]
        elif not first:
            assert placed.tokens.tolist()[:8] == [449, 1450, 0, 0, 113, 0, 0, 0]
            assert placed.positions.tolist()[:8] == [49, 50, 0, 0, 13, 14, 0, 0]
            assert placed.tables[1, 1].tolist() == [*tables[1, 4, :2].tolist(), PADDING_BLOCK]
            assert placed.tables[1, 2].tolist() == [int(tables[1, UNUSED, 0]), PADDING_BLOCK, PADDING_BLOCK]


def test_drafted_tokens_are_accepted_up_to_the_first_that_is_not_sampled(device: torch.device) -> None:
    """One of one, one of one that was possible, none, and all of three, the last of which is not valid."""
    ours, theirs, drafting = entered(device)
    drafted = torch.zeros(SLOTS, CONTEXT, dtype=torch.int32, device=device)
    drafted[4, 50], drafted[1, 14], drafted[0, 2] = 11, 21, 31
    drafted[2, 3:6] = ints(device, 41, 42, -1)
    rows = [[11, 12, 0, 0], [21, 22, 23, 24], [99, 32, 33, 34], [41, 42, 0, 44], [5, 6, 7, 8]]
    sampled = torch.tensor(rows, device=device).flatten()
    accepted, results = ints(device, *[9] * 5), torch.zeros(2, 40, dtype=torch.int64, device=device)
    draft_rows.accept(drafting, ours, drafted, sampled, accepted, results, ints(device, 1))
    counts, seen = definition.accept(drafting, theirs, drafted, sampled)
    assert same(ours, theirs) and torch.equal(accepted, counts)
    assert torch.equal(results[1, :35], seen.flatten()) and not results[0].any()
    assert accepted.tolist() == [1, 1, 0, 3, -1]
    assert seen[:4, MOST + 1 :].tolist() == [[11, -1, -1], [21, -1, -1], [31, 0, 0], [41, 42, 0]]
    assert ours.tokens.tolist() == [99, 22, 44, 337, 12, 561]
    assert ours.positions.tolist() == [2, 15, 6, 37, 51, 61]
    assert ours.history[2, :8].tolist() == [51, 52, 53, 41, 42, 0, 44, 207]
    assert ours.history[0, :4].tolist() == [0, 1, 99, 3]


def test_a_sequence_without_room_for_a_row_stays_as_it_is(device: torch.device) -> None:
    newest, drafting = newest_on(device), drafting_on(device)
    drafting = drafting._replace(ends=ints(device, 49, 64, 64, 64, 64), positions=ints(device, *[-1] * 5))
    before = [part[4].clone() for part in newest]
    sampled = torch.zeros(20, dtype=torch.int64, device=device)
    accepted, results = ints(device, *[9] * 5), torch.zeros(1, 35, dtype=torch.int64, device=device)
    draft_rows.accept(drafting, newest, newest.history, sampled, accepted, results, ints(device, 0))
    assert accepted.tolist()[0] == -1 and same(tuple(part[4] for part in newest), tuple(before))
    assert definition.accept(drafting, newest_on(device), newest.history, sampled)[0].tolist()[0] == -1
