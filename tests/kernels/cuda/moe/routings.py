"""Random routings and the groups of their rows, for the tests of a mixture of experts."""

import torch

from quengine.kernels.cuda.moe.groups import PairBlocks
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.grouping import most_blocks


def chosen(rows: int, used: int, count: int, seed: int = 0) -> torch.Tensor:
    """Experts of each row, int32 [T, k], ascending; the last expert is never chosen unless all are."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, count, generator=generator)
    scores[:, -1] = -1.0
    return scores.topk(used, dim=-1).indices.sort(dim=-1).values.to(torch.int32)


def empty_groups(
    pairs: int, count: int, block: int, device: torch.device, share: ExpertShare | None = None
) -> PairBlocks:
    blocks = torch.full((1 + most_blocks(pairs, count, block),), -7, dtype=torch.int32, device=device)
    return PairBlocks(blocks, torch.full((pairs,), -7, dtype=torch.int32, device=device), block, count, share)
