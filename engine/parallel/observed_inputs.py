"""What the matrices of another rank's layers read, for an importance matrix: sums that it writes for rank 0 to read."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.decoder import Decoder
from quengine.models.quantize.imatrix import Sums
from quengine.parallel.communicator import RankCommunicator

if TYPE_CHECKING:
    from quengine.evaluation.activations import Collector


class ObservedInputs:
    """Sums over the inputs of the matrices of a rank's decoder, made of `tensors`. The sums of each run begin at 0."""

    def __init__(
        self,
        decoder: Decoder,
        tensors: Mapping[str, QuantTensor],
        ctx_size: int,
        communicator: RankCommunicator,
    ) -> None:
        self._of = decoder, tensors, ctx_size
        self._communicator = communicator
        self._run: str | None = None
        self._collector: Collector | None = None
        self._collecting: AbstractContextManager[None] | None = None

    def observe(self, run: str, on: bool) -> None:
        """Begins (`on`) or stops adding what the matrices read to the sums of a run."""
        from quengine.evaluation.activations import Collector

        if self._collecting is not None:
            self._collecting.__exit__(None, None, None)
            self._collecting = None
        if run != self._run:
            self._run, self._collector = run, Collector(*self._of)
        if on:
            assert self._collector is not None
            self._collecting = self._collector.collecting()
            self._collecting.__enter__()

    def write(self, folder: str) -> None:
        """Write the run's sums to a file of the folder; all ranks meet when they have written."""
        assert self._collector is not None
        sums = self._collector.sums()
        arrays: dict[str, Any] = {f"squares {name}": each.squares for name, each in sums.items()}
        arrays |= {f"counts {name}": each.counts for name, each in sums.items()}
        np.savez(Path(folder) / f"{self._communicator.rank}.npz", **arrays)
        self._communicator.meet()


def written_sums(folder: Path) -> dict[str, Sums]:
    """The sums that other ranks, each with other layers, have written."""
    found = dict[str, Sums]()
    for path in sorted(folder.iterdir()):
        with np.load(path) as arrays:
            names = [name.removeprefix("squares ") for name in arrays if name.startswith("squares ")]
            found |= {name: Sums(arrays[f"squares {name}"], arrays[f"counts {name}"]) for name in names}
    return found
