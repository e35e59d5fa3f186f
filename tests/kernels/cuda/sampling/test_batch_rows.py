"""The end of a batched step: tokens set aside, rows of nobody back at the start."""

import torch

from quengine.kernels.cuda.sampling.batch_rows import settle_rows


def test_rows_of_nobody_go_back_to_the_start_and_a_missing_token_is_kept_for_the_host(
    device: torch.device,
) -> None:
    tokens = torch.tensor([7, 2**31 - 1, -1, 9, -1], device=device)
    positions = torch.tensor([3, 70, 5, 1, 8], dtype=torch.int32, device=device)
    live = torch.tensor([1, 1, 1, 0, 0], dtype=torch.int32, device=device)
    chosen = torch.zeros(5, dtype=torch.int64, device=device)
    settle_rows(tokens, positions, live, chosen)
    assert chosen.tolist() == [7, 2**31 - 1, -1, 9, -1]
    assert tokens.tolist() == [7, 2**31 - 1, 0, 0, 0]
    assert positions.tolist() == [3, 70, 5, 0, 0]
