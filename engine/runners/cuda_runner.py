"""The runner of a CUDA device: decode steps, with the sampling in them, and short prompts as captured CUDA graphs.

The newest tokens and their positions stay on the device. A step's graph is launched before the tokens of the step
before it are read on the host, so that text, stop strings and printing happen behind the computation (cuda_batch.py).
Settings that are not sampled on the device (log-probabilities, a constraint) are sampled on the host. More rows than
the largest captured size are computed eagerly, and so are long prompts.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from quengine.kernels.forward_batch import BlockTables
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.platform.ranges import Range
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.runner import Result, Runner
from quengine.runners.cuda_batch import BUCKETS, BatchDecoder, bucket_of
from quengine.runners.cuda_batch_graphs import BatchGraphs
from quengine.runners.cuda_prompts import RECORDED_AT, PromptChunk, PromptGraphs
from quengine.runners.cuda_rehearsal import Rehearsal
from quengine.runners.graph_sampling import GREEDY, GraphKey
from quengine.speculative.cuda_drafts import DraftedDecoder


class CudaRunner(Runner):
    """See the module docstring.

    `draft_rows`: rows of a step up to which sequences have drafts, a row a token (cuda_drafts.py); 0: they have none.
    `prompt_rows`: tokens of prompts in a step at most, where those are more than the decoder takes of one.
    """

    settles_after = RECORDED_AT

    def __init__(self, decoder: Decoder, cache: KVCache, draft_rows: int = 0, prompt_rows: int = 0) -> None:
        super().__init__(decoder, cache)
        self._draft_rows = draft_rows
        self._prompt_rows = prompt_rows
        self.prompts = PromptGraphs(decoder, cache)
        self.batches: BatchGraphs | None = None
        self._batch_decoder: BatchDecoder | DraftedDecoder | None = None

    def compile_kernels(self) -> None:
        """Compile what a first request would wait for kernel by kernel, once for a model on a GPU. Computes nothing."""
        self._rehearsal().compile_kernels()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Capture the steps that the first requests take, greedy ones and those of the default settings."""
        rehearsal = self._rehearsal()
        # The most rows first: the room of what is captured behind it then stays where it is.
        rehearsal.prompt_step(rehearsal.most_rows)
        for size in reversed(rehearsal.sizes):
            self.prompts.record(size)
        self._decoder_of(rehearsal.buckets[-1])
        assert self.batches is not None
        for key in {GREEDY, GraphKey.of(SamplingParams()) or GREEDY}:
            for rows in rehearsal.buckets:
                self.batches.record(rows, key)

    def _rehearsal(self) -> Rehearsal:
        rows = self._expected_rows()
        return Rehearsal(self.decoder, self.cache, self.prompts, rows, self._draft_rows, self._prompt_rows)

    def _expected_rows(self) -> int:
        """Sequences that run at once, as far as the size of the cache tells, or their drafts' rows."""
        held = min(-(-pool.num_blocks // pool.most_blocks(self.cache.ctx_size)) for pool in self.cache.pools)
        return min(BUCKETS[-1], max(self._draft_rows, held))

    def decode(self, sequences: Seq[Sequence]) -> list[Result]:
        rows = sum(1 + len(sequence.draft) for sequence in sequences)
        if rows > BUCKETS[-1]:
            self.batches = self._batch_decoder = None
            return super().decode(sequences)
        with Range("decode step"):
            return self._decoder_of(rows).step(sequences)

    def _decoder_of(self, count: int) -> BatchDecoder | DraftedDecoder:
        """With room for so many rows; what a smaller one had under way is computed again."""
        if self._batch_decoder is None or self.batches is None or self.batches.rows < count:
            rows = bucket_of(max(count, self._expected_rows()))
            drafts = self._draft_rows > 0
            device = self.batches = BatchGraphs(self.decoder, self.cache, rows, drafts)
            if drafts:
                most = device.board.blocks
                self._batch_decoder = DraftedDecoder(device, most, self._alone, self.sample_row)
            else:
                self._batch_decoder = BatchDecoder(device, self._alone, self.sample_row)
        return self._batch_decoder

    def _alone(self, sequence: Sequence) -> Result:
        """One sequence's token, eagerly: says what is wrong with its logits."""
        return super().decode([sequence])[0]

    def prefill_logits(
        self, ids: Seq[Seq[int]], starts: Seq[int], tables: Seq[BlockTables], all_logits: bool = False
    ) -> Tensor:
        captured = None
        if not all_logits:
            chunks = [PromptChunk(*chunk) for chunk in zip(ids, starts, tables, strict=True)]
            captured = self.prompts.compute(chunks)
        return super().prefill_logits(ids, starts, tables, all_logits) if captured is None else captured

    @property
    def kernels_per_step(self) -> int | None:
        nodes = None if self.batches is None else self.batches.nodes
        return None if nodes is None else nodes.kernels
