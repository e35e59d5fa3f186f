"""The end of a decode step: tokens left for the host, rows of nobody back at the start."""

import torch

from quengine.kernels.cuda.sampling.batch_rows import ChosenTokens, settle_rows


def test_rows_of_nobody_go_back_to_the_start_and_a_missing_token_is_kept_for_the_host(
    device: torch.device,
) -> None:
    tokens = torch.tensor([7, 2**31 - 1, -1, 9, -1], device=device)
    positions = torch.tensor([3, 70, 5, 1, 8], dtype=torch.int32, device=device)
    live = torch.tensor([1, 1, 1, 0, 0], dtype=torch.int32, device=device)
    chosen = ChosenTokens.allocate(2, 8, device)
    settle_rows(tokens, positions, live, chosen)
    assert tokens.tolist() == [7, 2**31 - 1, 0, 0, 0]
    assert positions.tolist() == [3, 70, 5, 0, 0]
    assert chosen.tokens.tolist() == [[7, 2**31 - 1, -1, 9, -1, 0, 0, 0], [0] * 8]


def test_steps_leave_their_tokens_in_turns(device: torch.device) -> None:
    chosen = ChosenTokens.allocate(3, 2, device)
    live = torch.ones(1, dtype=torch.int32, device=device)
    for token in range(1, 6):
        settle_rows(torch.tensor([token], device=device), live.clone(), live, chosen)
        assert int(chosen.turn) == token % 3
    assert chosen.tokens[:, 0].tolist() == [4, 5, 3]


def test_more_rows_than_are_taken_at_a_time(device: torch.device) -> None:
    rows = 700
    tokens = torch.arange(rows, device=device)
    positions, live = (torch.ones(rows, dtype=torch.int32, device=device) for _ in range(2))
    live[::2] = 0
    chosen = ChosenTokens.allocate(1, rows, device)
    settle_rows(tokens, positions, live, chosen)
    assert torch.equal(tokens, torch.arange(rows, device=device) * live)
    assert torch.equal(positions, live)
    assert chosen.tokens.tolist() == [list(range(rows))]
