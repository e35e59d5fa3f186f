"""The runner of the CPU backend: prompts eagerly, each decode step as one compiled list of kernels.

A list is made for each number of rows as it comes: sequences, and the tokens of their drafts. Sampling is on the
host, as in Runner. The tokens of a prompt are computed by the same kernels however it is cut into chunks, and a row of
a batch as it is alone, so the text depends neither on the chunk size, nor on drafts and other sequences, nor, as
everywhere on the CPU, on the number of threads.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cpu.ops import sampling
from quengine.kernels.cpu.step import Buffers, Step
from quengine.kv_cache import KVCache, blocks_for
from quengine.models.decoder import Decoder
from quengine.runner import Row, Runner

_EXACT = 16  # up to so many rows each number has a step of its own, beyond it the multiples of 4


class CpuRunner(Runner):
    """See the module docstring. The decoder's backend is a CpuBackend."""

    choose = staticmethod(sampling.sample)
    packs_prompts = False  # a dozen rows of one prompt keep the processor as busy as those of many

    def __init__(self, decoder: Decoder, cache: KVCache, sequences: int = 1) -> None:
        super().__init__(decoder, cache)
        backend = decoder.backend
        assert isinstance(backend, CpuBackend)
        self._backend = backend
        self._steps: dict[int, Step] = {}
        self._buffers: Buffers = {}
        self._step(min(2, sequences))  # loads or compiles the kernels that decode needs

    def decode_rows(self, rows: Seq[Row]) -> Tensor:
        step = self._step(len(rows) if len(rows) <= _EXACT else -(-len(rows) // 4) * 4)
        padding = step.rows - len(rows)
        positions = [row.position for row in rows] + [0] * padding
        tokens = [row.token for row in rows] + [0] * padding
        tables = [[row.block_table] for row in rows] + [[[self.cache.padding_block]]] * padding
        return step.run(tokens, positions, tables)[: len(rows)]

    @torch.no_grad()
    def _step(self, rows: int) -> Step:
        """The compiled step of so many rows."""
        if rows not in self._steps:
            layers = self.cache.layers
            blocks = blocks_for(self.cache.ctx_size)
            self._steps[rows] = self._backend.record(
                lambda batch: self.decoder.forward(batch, layers), rows, blocks, self._buffers
            )
        return self._steps[rows]
