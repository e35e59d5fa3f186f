"""The runner of the CPU backend: prompts eagerly, each further token as one recorded list of compiled kernels.

The decode step is recorded once, when the runner is made. Sampling is on the host, as in Runner.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from quengine.kernels.cpu_backend import CpuBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.runner import Runner


class CpuRunner(Runner):
    """See the module docstring. The decoder's backend is a CpuBackend."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        super().__init__(decoder, cache)
        backend = decoder.backend
        assert isinstance(backend, CpuBackend)
        with torch.no_grad():
            self._decode = backend.record(lambda ids, start: decoder.forward(ids, cache.layers, start))

    def forward(self, ids: Seq[int], start: int, last_only: bool = True) -> Tensor:
        if len(ids) != 1:
            return super().forward(ids, start, last_only)
        return self._decode.run(ids[0], start)
