"""Steps of nobody's on a CUDA device: what a first request would wait for, kernel by kernel, is compiled by them.

Knows which steps requests come to: one text's decode or a batch's, prompts of every length, alone and together. Not
requests, nor what becomes of a step.
"""

from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from quengine.config import MIXED_CHUNK
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.launch.compile_ahead import compiling_only, marker
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.platform.machine import physical_cores
from quengine.runners.cuda_batch import BUCKETS, bucket_of
from quengine.runners.cuda_batch_graphs import BatchGraphs
from quengine.runners.cuda_prompts import PromptGraphs, StepSize
from quengine.runners.graph_sampling import GREEDY, GraphKey

_PROMPT_ROWS = (4, 12, 24, 40, 100, 130, 144)
"""Lengths of prompts: short ones, whose numbers of rows choose among kernels, long ones, and long ones in whole groups
of 16, which Triton compiles apart; and behind them all multiples of the following, since the number of blocks of rows
chooses among kernels too."""
_BLOCK_ROWS = 128

_TOGETHER = (2, 12, 24, 40, 100)
"""Numbers of prompts in a step: behind the last layer's attention each is a row."""

_TOP_K = (1, 64, 0)
"""Samplings: greedy, with a top-k, and without one, which takes a thread some seconds."""

_COMPILERS = 8


@dataclass(frozen=True)
class Rehearsal:
    """The steps that requests to a model come to. `prompts`: recorded ones of the same model and cache.

    `batch_rows`: rows of a decode step that are expected at most; `draft_rows`: those of drafts (0: there are none);
    `prompt_rows`: tokens of prompts in a step at most, in blocks of several.
    """

    decoder: Decoder
    cache: KVCache
    prompts: PromptGraphs
    batch_rows: int
    draft_rows: int
    prompt_rows: int

    @torch.no_grad()
    def compile_kernels(self) -> None:
        """Compile all kernels, once for a model on a GPU. Computes nothing.

        Rarer variants (penalties, more rows) are still compiled when they are met.
        """
        done = self._marker()
        if done.is_file():
            return
        with compiling_only(min(_COMPILERS, physical_cores())):
            self.all_steps()
        torch.cuda.synchronize(self.device)
        with suppress(OSError):  # a cache that cannot be written: searched again next time
            done.touch()

    def all_steps(self) -> None:
        """One of every kind, computed in earnest where nobody says otherwise, in a cache that holds nothing."""
        self._batches()
        for rows in (*_PROMPT_ROWS, *range(2 * _BLOCK_ROWS, self.most_rows + 1, _BLOCK_ROWS)):
            if rows <= self.most_rows:
                self.prompt_step(rows)
        for size in self.sizes:
            self.prompts.rehearse(size)
        for count in _TOGETHER:
            self.prompts_step([min(2, self._longest)] * count)

    @property
    def device(self) -> torch.device:
        return self.decoder.backend.device

    @property
    def sizes(self) -> list[StepSize]:
        """Of prompts' recorded steps."""
        return self.prompts.sizes(MIXED_CHUNK["cuda"])

    @property
    def buckets(self) -> tuple[int, ...]:
        """Rows of decode's recorded steps."""
        return BUCKETS[: BUCKETS.index(bucket_of(self.batch_rows)) + 1]

    @property
    def most_rows(self) -> int:
        """Tokens of prompts in a step at most."""
        return max(self._longest, self.prompt_rows)

    @torch.no_grad()
    def prompt_step(self, rows: int) -> None:
        """So many tokens, eagerly: of one prompt, and of several."""
        if rows <= self._longest:
            self.prompts_step([rows])
            self.prompts_step([rows - 1, 1])
        else:
            rest = rows % self._longest
            self.prompts_step([self._longest] * (rows // self._longest) + [rest] * (rest > 0))

    @torch.no_grad()
    def prompts_step(self, lengths: Seq[int]) -> None:
        """Prompts of these lengths, eagerly."""
        tables = [self._padding_blocks(max(lengths))] * len(lengths)
        batch = prefill_batch([[0] * length for length in lengths], [0] * len(lengths), tables, self.device)
        self.decoder.forward(batch, self.cache.layers)

    def _batches(self) -> None:
        batches = BatchGraphs(self.decoder, self.cache, self.buckets[-1], self.draft_rows > 0)
        for bucket in self.buckets:
            batches.rehearse(bucket, GREEDY)
        for top_k in _TOP_K:
            batches.rehearse(1, GraphKey(top_k, bias=False, penalties=False))

    def _marker(self) -> Path:
        """Says that all was compiled for such a model, cache and requests."""
        stored = [tensor.dtype for layer in self.cache.layers[:1] for tensor in layer.tensors]
        blocks_of_rows = -(-self.most_rows // _BLOCK_ROWS)
        shape = (self.decoder.config, self.decoder.bytes_per_token, blocks_of_rows, stored)
        batches = (self.buckets[-1], self.draft_rows)
        backend = self.decoder.backend
        fixed = ("fixed",) if isinstance(backend, CudaBackend) and backend.batch_invariant else ()
        return marker(torch.cuda.get_device_name(self.device), *shape, *batches, *fixed)

    @property
    def _longest(self) -> int:
        """Tokens of one prompt in a step."""
        return min(self.cache.ctx_size, self.decoder.chunk_size)

    def _padding_blocks(self, rows: int) -> list[int]:
        return [self.cache.padding_block] * -(-rows // BLOCK_SIZE)
