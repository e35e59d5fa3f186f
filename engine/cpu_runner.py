"""The runner of the CPU backend: prompts eagerly, each further token as one recorded list of compiled kernels.

Over a contiguous cache the decode step is recorded once, when the runner is made; over a paged one a step is recorded
for each number of rows as it comes: sequences, and the tokens of their drafts. Sampling is on the host, as in Runner.
The tokens of a prompt are computed by the same kernels however it is cut into chunks, and a row of a batch as it is
alone, so the text depends neither on the chunk size, nor on drafts and other sequences, nor, as everywhere on the CPU,
on the number of threads.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from quengine.kernels.backend import BLOCK_SIZE
from quengine.kernels.cpu import sampling
from quengine.kernels.cpu.step import Buffers, Step
from quengine.kernels.cpu_backend import CpuBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.runner import Row, Runner
from quengine.sampler import Sample
from quengine.scheduler import Batch

_EXACT = 16  # up to so many rows each number has a step of its own, beyond it the multiples of 4


class CpuRunner(Runner):
    """See the module docstring. The decoder's backend is a CpuBackend."""

    choose = staticmethod(sampling.sample)
    packs_prompts = False  # a dozen rows of one prompt keep the processor as busy as those of many

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        super().__init__(decoder, cache)
        backend = decoder.backend
        assert isinstance(backend, CpuBackend)
        self._backend = backend
        self._steps: dict[int, Step] = {}
        self._buffers: Buffers = {}
        if cache.num_blocks:
            self._batch_step(2)  # loads or compiles the kernels that several rows need
        else:
            self._single_step()

    def forward(self, ids: Seq[int], start: int, last_only: bool = True) -> Tensor:
        if len(ids) != 1 or self._backend.in_prompt:
            return super().forward(ids, start, last_only)
        return self._single_step().run(ids[0], start)

    def step(self, batch: Batch) -> Sample | None:
        sequence = batch.sequence
        if len(batch.ids) > 1 or batch.start >= sequence.num_prompt_tokens or sequence.num_prompt_tokens == 1:
            return super().step(batch)
        with (
            self._backend.prompt()
        ):  # a chunk of one token; a prompt of one token has no other chunks to match
            return super().step(batch)

    def prefill(self, batch: Batch) -> Sample | None:
        if len(batch.ids) == batch.sequence.num_prompt_tokens == 1:  # as `step` does it
            return super().prefill(batch)
        with self._backend.prompt():
            return super().prefill(batch)

    def embed(self, batch: Batch) -> None:
        with self._backend.prompt():
            super().embed(batch)

    def decode_rows(self, rows: Seq[Row]) -> Tensor:
        step = self._batch_step(len(rows) if len(rows) <= _EXACT else -(-len(rows) // 4) * 4)
        more = step.rows - len(rows)  # they fill the step up
        positions = [row.position for row in rows] + [0] * more
        tokens = [row.token for row in rows] + [0] * more
        tables = [row.block_table for row in rows] + [[self.cache.spare_block]] * more
        return step.run_batch(tokens, positions, tables)[: len(rows)]

    def _single_step(self) -> Step:
        """The step of one sequence that has the whole cache."""
        if 0 not in self._steps:
            self._steps[0] = self._record(1, 0)
        return self._steps[0]

    def _batch_step(self, rows: int) -> Step:
        """The step of so many sequences whose caches lie in blocks."""
        if rows not in self._steps:
            self._steps[rows] = self._record(rows, -(-self.cache.ctx_size // BLOCK_SIZE))
        return self._steps[rows]

    @torch.no_grad()
    def _record(self, rows: int, blocks: int) -> Step:
        layers = self.cache.layers
        return self._backend.record(
            lambda ids, start: self.decoder.forward(ids, layers, start, last_only=False),
            *(rows, blocks, self._buffers),
        )
