"""The runner of a CUDA device: decode as one captured graph with the sampling in it, prompts as graphs too where the
host would be in the way (cuda_prompts.py), else eagerly.

The newest token and its position stay on the device. A step's graph is launched before the token of the step before
it is read on the host, so that text, stop strings and printing happen behind the computation; the step that turns out
to follow an end token is thrown away. Settings that are not sampled on the device (log-probabilities, a constraint)
take the eager path of Runner.

Over a paged cache the same goes for many sequences: cuda_batch.py says who is computed, cuda_batch_graphs.py how. More
than the largest bucket holds are computed eagerly.

Where the backend has fixed kernels (a deterministic run), all tokens of a prompt go through the kernels of prompts,
also one that is a chunk of its own; a prompt of one token is a decode step there too.
"""

from collections import deque
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from quengine.cuda_batch import BUCKETS, BatchDecoder, bucket_of
from quengine.cuda_batch_graphs import BatchGraphs
from quengine.cuda_drafts import DraftedDecoder
from quengine.cuda_prompts import RECORDED_AT, PromptChunk, PromptGraphs
from quengine.cuda_rehearsal import Rehearsal
from quengine.graph_capture import capture
from quengine.graph_nodes import GraphNodes, count_nodes
from quengine.graph_sampling import GREEDY, GraphKey, settings_of
from quengine.kernels.backend import BLOCK_SIZE, prompt_scope
from quengine.kernels.cuda.sampling import NO_TOKEN, DecodeState, SamplingBuffers, sample_step
from quengine.kernels.cuda_backend import CudaBackend, has_dependent_launch
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.ranges import Range
from quengine.runner import Result, Runner
from quengine.sampler import Sample
from quengine.sampling_params import SamplingParams
from quengine.scheduler import Batch
from quengine.sequence import Sequence


class DecodeGraph(Protocol):
    """One captured decode step; `nodes` says what one launch of it runs."""

    nodes: GraphNodes

    def begin(self, sequence: Sequence) -> None:
        """Continue with this sequence: its newest token is the next input."""
        ...

    def launch(self) -> "PendingToken":
        """Start the next step; returns at once."""
        ...


class PendingToken(Protocol):
    """A token that the device is choosing."""

    def wait(self) -> int: ...


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
        self.graphs: dict[GraphKey, DecodeGraph] = {}
        self.prompts = PromptGraphs(decoder, cache)
        self._run = _Run(None, None)
        self.batches: BatchGraphs | None = None
        self._batch_decoder: BatchDecoder | DraftedDecoder | None = None

    def compile_kernels(self) -> None:
        """Compile what a first request would wait for kernel by kernel, once for a model on a GPU. Computes nothing."""
        self._rehearsal().compile_kernels()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Record the steps that the first requests take, greedy ones and those of the default settings."""
        rehearsal = self._rehearsal()
        # The most rows first: the room of what is recorded behind it then stays where it is.
        rehearsal.prompt_step(rehearsal.most_rows)
        for size in reversed(rehearsal.sizes):
            self.prompts.record(size)
        for key in {GREEDY, GraphKey.of(SamplingParams()) or GREEDY}:
            if not self.cache.num_blocks:
                self._graph_of(key)
                continue
            self._decoder_of(rehearsal.buckets[-1])
            assert self.batches is not None
            for rows in rehearsal.buckets:
                self.batches.record(rows, key)

    def _rehearsal(self) -> Rehearsal:
        rows = self._expected_rows()
        return Rehearsal(self.decoder, self.cache, self.prompts, rows, self._draft_rows, self._prompt_rows)

    def _expected_rows(self) -> int:
        """Sequences that run at once, as far as the size of the cache tells, or their drafts' rows."""
        whole = -(-self.cache.ctx_size // BLOCK_SIZE)
        return min(BUCKETS[-1], max(self._draft_rows, -(-self.cache.num_blocks // whole)))

    def decode_batch(self, sequences: Seq[Sequence]) -> list[Result]:
        rows = sum(1 + len(sequence.draft) for sequence in sequences)
        if rows > BUCKETS[-1]:
            self.batches = self._batch_decoder = None
            return super().decode_batch(sequences)
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
        return super().decode_batch([sequence])[0]

    def step(self, batch: Batch) -> Sample | None:
        key = GraphKey.of(batch.sequence.params)
        if len(batch.ids) != 1 or not batch.samples or key is None or self._is_chunk(batch):
            self._run = _Run(None, None)
            with prompt_scope(self.decoder.backend) if self._is_chunk(batch) else nullcontext():
                return super().step(batch)
        run = self._run
        if run.sequence is not batch.sequence or run.next_start != batch.start:
            graph = self._graph_of(key)
            graph.begin(batch.sequence)
            run = self._run = _Run(batch.sequence, graph, batch.start)
        with Range("decode step"):
            token = run.take(self.cache.ctx_size)
        if token == NO_TOKEN:
            self._run = _Run(None, None)
            return super().step(batch)  # says what is wrong with the logits
        return Sample(token)

    def _graph_of(self, key: GraphKey) -> DecodeGraph:
        if key not in self.graphs:
            self.graphs[key] = CapturedStep(self.decoder, self.cache, key)
        return self.graphs[key]

    def forward(self, ids: Seq[int], start: int, last_only: bool = True) -> torch.Tensor:
        recorded = self.prompts.compute([PromptChunk(ids, start)]) if last_only else None
        if recorded is not None:
            return recorded
        with prompt_scope(self.decoder.backend) if len(ids) > 1 else nullcontext():
            return super().forward(ids, start, last_only)

    def compute_chunk(self, ids: Seq[int], start: int, block_table: Seq[int]) -> torch.Tensor:
        recorded = self.prompts.compute([PromptChunk(ids, start, block_table)])
        return super().compute_chunk(ids, start, block_table) if recorded is None else recorded[0]

    def compute_chunks(self, chunks: Seq[Batch]) -> torch.Tensor:
        given = [PromptChunk(chunk.ids, chunk.start, chunk.sequence.block_table) for chunk in chunks]
        recorded = self.prompts.compute(given)
        return super().compute_chunks(chunks) if recorded is None else recorded

    def prefill(self, batch: Batch) -> Sample | None:
        with prompt_scope(self.decoder.backend):
            return super().prefill(batch)

    def prefill_batch(self, chunks: Seq[Batch]) -> list[Result]:
        with prompt_scope(self.decoder.backend):
            return super().prefill_batch(chunks)

    def embed(self, batch: Batch) -> None:
        with prompt_scope(self.decoder.backend):
            super().embed(batch)

    def teacher_forced(self, ids: Seq[int], chunk: int) -> torch.Tensor:
        with prompt_scope(self.decoder.backend) if chunk > 1 else nullcontext():
            return super().teacher_forced(ids, chunk)

    @property
    def _fixed(self) -> bool:
        return isinstance(self.decoder.backend, CudaBackend) and self.decoder.backend.fixed_kernels

    def _is_chunk(self, batch: Batch) -> bool:
        """Whether these tokens must be computed as all others of their prompt are, be it a single one."""
        return self._fixed and batch.sequence.num_prompt_tokens > max(1, batch.start)

    @property
    def kernels_per_step(self) -> int | None:
        if self.batches is not None:
            return None if self.batches.nodes is None else self.batches.nodes.kernels
        return None if self._run.graph is None else self._run.graph.nodes.kernels


@dataclass
class _Run:
    """A sequence being decoded by a graph; `next_start` is the position of the input whose token comes next."""

    sequence: Sequence | None
    graph: DecodeGraph | None
    next_start: int = 0
    pending: deque[PendingToken] = field(default_factory=deque)

    def take(self, ctx_size: int) -> int:
        """The next token, with one more step under way where the sequence may need it."""
        assert self.sequence is not None and self.graph is not None
        limit = self.sequence.params.max_tokens
        left = ctx_size if limit is None else limit - len(self.sequence.generated)
        wanted = min(2, left, ctx_size - self.next_start)
        while len(self.pending) < wanted:
            self.pending.append(self.graph.launch())
        self.next_start += 1
        return self.pending.popleft().wait()


@dataclass(frozen=True)
class _HostToken:
    """A token on its way to pinned memory."""

    memory: torch.Tensor
    arrived: torch.cuda.Event

    def wait(self) -> int:
        self.arrived.synchronize()
        return int(self.memory)


class CapturedStep:
    """The decode step of one sequence as a CUDA graph: embedding to logits, sampling, and the move to the next token.

    Two pinned words take turns, as at most two steps are under way.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, key: GraphKey) -> None:
        device = decoder.backend.device
        vocab = decoder.config.vocab_size
        self.state = DecodeState.allocate(1, cache.ctx_size, device)
        self.buffers = SamplingBuffers.allocate(1, vocab, key.top_k, device, key.bias, key.penalties)
        self.host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self.launched = 0
        self.graph = self._capture(decoder, cache)
        self.nodes = count_nodes(self.graph.raw_cuda_graph())

    def begin(self, sequence: Sequence) -> None:
        ids = sequence.token_ids
        self.buffers.set(0, settings_of(sequence), ids, dict(sequence.params.logit_bias))
        self.state.history[0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.state.tokens.fill_(ids[-1])
        self.state.positions.fill_(len(ids) - 1)

    def launch(self) -> _HostToken:
        slot = self.launched % 2
        self.launched += 1
        self.graph.replay()
        self.host[slot].copy_(self.state.tokens[0], non_blocking=True)
        self.events[slot].record()
        return _HostToken(self.host[slot], self.events[slot])

    @torch.no_grad()
    def _capture(self, decoder: Decoder, cache: KVCache) -> torch.cuda.CUDAGraph:
        pdl = has_dependent_launch(decoder.backend.device)

        def step() -> None:
            logits = decoder.forward(self.state.tokens, cache.layers, self.state.positions)
            sample_step(logits, self.state, self.buffers, pdl)

        # The first run writes one row of the cache, at the last position, and leaves the state to `begin`.
        self.state.positions.fill_(cache.ctx_size - 1)
        graph, _ = capture(step, step)
        return graph
