"""Ranks whose processes have made unlike numbers of exchanges of addresses, as where one has shared a model before."""

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from quengine.parallel import communicator
from quengine.parallel.communicator import CudaCommunicator


@pytest.mark.parametrize(("own", "others", "made"), [(0, 9, 9), (9, 0, 0), (3, 3, 0)])
def test_a_rank_makes_the_exchanges_that_another_is_ahead(
    own: int, others: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with a group of itself alone, which is there as long as the exchange."""
    groups = list[tuple[int, int]]()

    class Exchanges:
        made = own

        def addresses(self, _shape: object, _dtype: object, _device: object, name: str) -> None:
            self.made += 1
            group = c10d._resolve_process_group(name)  # type: ignore[arg-type]
            groups.append((group.rank(), group.size()))

    monkeypatch.setattr(communicator, "_EXCHANGES", Exchanges())
    monkeypatch.setattr(communicator.dist, "all_reduce", lambda *_: None)
    rank = object.__new__(CudaCommunicator)
    rank.rank, rank.size, rank._device = 1, 2, torch.device("cpu")
    rank._store = communicator.dist.HashStore()  # type: ignore[attr-defined]

    def gathered(x: Tensor) -> list[Tensor]:
        return [torch.tensor([others]), x]

    monkeypatch.setattr(rank, "_gathered", gathered)
    rank._catch_up()
    assert groups == [(0, 1)] * made
    with pytest.raises(RuntimeError, match="Could not resolve"):
        c10d._resolve_process_group("alone 0")  # type: ignore[arg-type]
