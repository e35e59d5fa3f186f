"""The runner of the CPU backend: prompts eagerly, each further token as one recorded list of compiled kernels.

The decode step is recorded once, when the runner is made. Sampling is on the host, as in Runner. The tokens of a prompt
are computed by the same kernels however it is cut into chunks, so the text depends neither on the chunk size nor, as
everywhere on the CPU, on the number of threads.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from quengine.kernels.cpu_backend import CpuBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.runner import Runner
from quengine.sampler import Sample
from quengine.scheduler import Batch


class CpuRunner(Runner):
    """See the module docstring. The decoder's backend is a CpuBackend."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        super().__init__(decoder, cache)
        backend = decoder.backend
        assert isinstance(backend, CpuBackend)
        self._backend = backend
        with torch.no_grad():
            self._decode = backend.record(lambda ids, start: decoder.forward(ids, cache.layers, start))

    def forward(self, ids: Seq[int], start: int, last_only: bool = True) -> Tensor:
        if len(ids) != 1 or self._backend.in_prompt:
            return super().forward(ids, start, last_only)
        return self._decode.run(ids[0], start)

    def step(self, batch: Batch) -> Sample | None:
        sequence = batch.sequence
        if len(batch.ids) > 1 or batch.start >= sequence.num_prompt_tokens or sequence.num_prompt_tokens == 1:
            return super().step(batch)
        with (
            self._backend.prompt()
        ):  # a chunk of one token; a prompt of one token has no other chunks to match
            return super().step(batch)
