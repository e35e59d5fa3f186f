"""Runs steps: the decoder on a batch, over the cache, and the sampling of the next tokens."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quengine.batch import Batch, Chunk
from quengine.block_manager import StateCopy
from quengine.errors import EngineError
from quengine.kernels import sampling
from quengine.kernels.forward_batch import Phase
from quengine.kernels.sampling import Choose
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.parallel.wire import CopyStates, Forward, Hidden, Message, Parts, Together, alone
from quengine.platform.ranges import Range
from quengine.request.pooling import RANK
from quengine.request.prompt_scores import split_rows
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.runners.graph_keys import GraphKey
from quengine.runners.host_copy import HostCopy
from quengine.runners.state_copies import copies_before
from quengine.runners.step_rows import SequenceRows, decode_rows, forward_batch, prefill_rows
from quengine.sampler import NO_CHOICE, Result, Sample, Verified

if TYPE_CHECKING:
    from quengine.parallel.group import RankGroup
    from quengine.runners.device_decode import DeviceDecoder


class StepGraphs(Protocol):
    """Captured steps: CUDA graphs, or the CPU's lists of compiled kernels.

    captured_at: a step of a given size is captured when it occurs for the `captured_at`-th time; the steps after that
    take a steady time.
    kernels_per_step: number of kernels of the most recently captured decode step; None if they are not counted.
    together: `ModelRunner.together`.
    """

    captured_at: int
    kernels_per_step: int | None
    together: Together

    def lookup(self, phase: Phase, rows: Seq[SequenceRows]) -> GraphKey | None:
        """The key of the captured step for these rows; None if they are to be computed eagerly."""
        ...

    def replay(self, key: GraphKey, rows: Seq[SequenceRows]) -> Tensor:
        """The logits that `Decoder.forward` returns for these rows; valid until the next step."""
        ...

    def warm_up(self, params: SamplingParams | None) -> None:
        """See `ModelRunner.warm_up`."""
        ...

    def release(self) -> None:
        """See `ModelRunner.release`."""
        ...

    def capture_next(self) -> bool:
        """See `ModelRunner.capture_next`."""
        ...


@dataclass(frozen=True)
class LaunchedStep:
    """A step that has been computed, or is in flight on a device.

    results(ahead): waits for the results of the sequences of `batch`, in order; None for a sequence cancelled
    meanwhile. ahead: the next step will have exactly these sequences, and may be launched now.
    may_follow: another step may be launched before the results are taken.
    """

    batch: Batch
    results: Callable[[bool], list[Result]]
    may_follow: bool = False


class ModelRunner:
    """Runs a decoder over its cache.

    `ranks`: the group of which this runner is rank 0; None on the other ranks, and without ranks.

    Args:
        decoder, cache: decoder and KV cache of one model.
        graphs: captured steps; None: every step is computed eagerly.
        device_decoder: decode steps that sample on the device; None: tokens are sampled on the host.
        choose: samples tokens on the host.
        packs_prompts: whether chunks of several prompts are faster in one step than one after the other.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        graphs: StepGraphs | None = None,
        device_decoder: "DeviceDecoder | None" = None,
        choose: Choose = sampling.sample,
        packs_prompts: bool = True,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.graphs = graphs
        self.device_decoder = device_decoder
        self.choose = choose
        self.packs_prompts = packs_prompts
        self.ranks: RankGroup | None = None
        self._has_states = any(pool.is_state for pool in cache.pools)
        if device_decoder is not None and self._has_states:
            device_decoder.before_launch = self._keep_states

    def lead(self, ranks: "RankGroup") -> None:
        """Makes this the runner of rank 0, which sends every step to the other ranks of the group."""
        self.ranks = ranks
        if self.graphs is not None:
            self.graphs.together = ranks.together

    def release(self) -> None:
        """Releases the captured steps, after which no step can be computed. Other ranks then leave the group."""
        if self.graphs is not None:
            self.graphs.release()
        if self.ranks is not None:
            self.ranks.close()

    def launch(self, batch: Batch) -> LaunchedStep:
        """Launches a batch without waiting for it if tokens are sampled on the device; otherwise calls `run`."""
        if self.device_decoder is not None and batch.phase == "decode":
            with Range("launch decode step"):
                step = self.device_decoder.launch(batch.sequences)
            if step is not None:
                decoder, may_follow = self.device_decoder, step.on_device
                return LaunchedStep(
                    batch,
                    lambda ahead: self._explained(step.sequences, decoder.results(step, ahead)),
                    may_follow,
                )
        elif self.device_decoder is not None and _are_only_sampled(batch.chunks):
            with Range("launch prefill"):
                logits = HostCopy(self.forward("prefill", prefill_rows(batch.chunks)).float())
            return LaunchedStep(batch, lambda _: _sampled(batch.chunks, logits.wait()), True)
        results = self.run(batch)
        return LaunchedStep(batch, lambda _: results)

    def run(self, batch: Batch) -> list[Result]:
        """Computes a batch and returns a result per sequence, in order. Raises errors of the whole batch."""
        if batch.phase == "decode":
            return self.decode(batch.sequences)
        if any(chunk.sequence.pool is not None for chunk in batch.chunks):
            return [self._embed(chunk) for chunk in batch.chunks]
        if any(chunk.scored_rows for chunk in batch.chunks):
            return self._score(batch.chunks)
        return self.prefill(batch.chunks)

    def decode(self, sequences: Seq[Sequence]) -> list[Result]:
        """Adds one more token of each of these sequences to the cache, in one step; returns one result each, in order.

        A sequence's first row is `token_ids[num_cached_tokens]` at position `num_cached_tokens`. If that is its newest
        token, the result is a Sample of the next one; if generated tokens are being recomputed, it is an earlier token
        (`next_is_newest` is false), and the result is None. The tokens of its `draft` are further rows, computed as if
        they had been generated; the result is then Verified. A sequence fails alone: its result is then the exception,
        an EngineError if its logits are not finite. An exception that is raised concerns all rows; no sequence has
        then advanced, and the call may be repeated with fewer of them.

        Tokens in front of it that the states lack (`Sequence.replay`) are further rows, whose results nobody wants.

        `block_tables` cover these positions, and without a draft the one after them, if the sequence can come to it,
        since a device decoder may be a step ahead. From call to call sequences come and go; one that stayed has its
        Sample's token appended.
        """
        if self.device_decoder is not None:
            with Range("decode step"):
                results = self.device_decoder.step(sequences)  # copies the states itself
            if results is not None:
                return self._explained(sequences, results)
        return self._decode_on_host(sequences)

    def prefill(self, chunks: Seq[Chunk]) -> list[Result]:
        """Computes chunks of several prompts in one step, and samples those that end with their newest token.

        This includes the generated tokens of sequences that were preempted. A sequence whose logits are not finite
        fails alone.
        """
        with Range("prefill"):
            logits = self.forward("prefill", prefill_rows(chunks)).float().cpu()
        return _sampled(chunks, logits)

    @torch.no_grad()
    def forward(
        self, phase: Phase, rows: Seq[SequenceRows], all_logits: bool = False, eager: bool = False
    ) -> Tensor:
        """Logits of these rows, in the backend's dtype and on its device; valid until the next step.

        In prefill [sequences, vocab], after each sequence's last row, or with `all_logits` [T, vocab]; in decode
        always [T, vocab]. `eager`: use no captured step.
        """
        with self.together(Forward(phase, rows, all_logits, eager)):
            captures = self.graphs is not None and not all_logits and not eager
            key = self.graphs.lookup(phase, rows) if self.graphs is not None and captures else None
            if self.graphs is not None and key is not None:
                return self.graphs.replay(key, rows)
            batch = forward_batch(phase, rows, self.decoder.backend.device, all_logits)
            return self.decoder.forward(batch, self.cache.layers)

    @torch.no_grad()
    def hidden(self, rows: Seq[SequenceRows]) -> Tensor:
        """The hidden rows that the output matrix would read, of all tokens of these chunks: [T, embedding length]."""
        with self.together(Hidden(rows)):
            batch = forward_batch("prefill", rows, self.decoder.backend.device)
            return self.decoder.hidden(batch, self.cache.layers)

    @torch.no_grad()
    def logits_of_parts(self, rows: Seq[SequenceRows], parts: Seq[Seq[int]]) -> Iterator[Tensor]:
        """Logits [n, vocab] of each of `parts` of these rows, computed lazily; the caller must take them all."""
        with self.together(Parts(rows, parts)):
            device = self.decoder.backend.device
            batch = forward_batch("prefill", rows, device)
            tensors = (torch.tensor(part, device=device) for part in parts)
            yield from self.decoder.forward_parts(batch, self.cache.layers, tensors)

    def copy_states(self, copies: Seq[StateCopy]) -> None:
        """Copies sequences' states, in stream order after the steps launched so far."""
        with self.together(CopyStates(copies)):
            self.cache.copy_states(copies)

    def together(self, message: Message) -> AbstractContextManager[None]:
        """A block that all ranks compute: `message` tells the others what to do."""
        return alone(message) if self.ranks is None else self.ranks.together(message)

    def warm_up(self, params: SamplingParams | None = None) -> None:
        """Captures the steps that the first requests would otherwise wait for; no step may be in flight.

        Without `params` all steps that ordinary requests use; with them the decode steps of one sequence with such
        settings.
        """
        if self.graphs is not None:
            self.graphs.warm_up(params)

    def capture_next(self) -> bool:
        """Captures one more step that rarer requests use, while no step is in flight; False if none is left."""
        return self.graphs is not None and self.graphs.capture_next()

    @property
    def settles_after(self) -> int:
        """Number of times that a step of a given size runs before its time is steady."""
        return 1 if self.graphs is None else self.graphs.captured_at

    @property
    def kernels_per_step(self) -> int | None:
        """Number of kernels of the newest captured decode step; None if there is none or they are not counted."""
        return None if self.graphs is None else self.graphs.kernels_per_step

    def logits(self, ids: Seq[int], start: int, phase: Phase) -> Tensor:
        """Logits [T, vocab] on the host after each of `ids` at positions start, ..., in the cache's first blocks.

        Computed in one prefill step, or in one decode step per token. Overwrites what other sequences had in these
        blocks.
        """
        tables = self.cache.whole_tables
        if phase == "prefill":
            return self.forward("prefill", [SequenceRows(ids, start, tables)], all_logits=True).cpu()
        steps = [[SequenceRows([token], start + n, tables)] for n, token in enumerate(ids)]
        return torch.cat([self.forward("decode", rows).float().cpu().clone() for rows in steps])

    def _decode_on_host(self, sequences: Seq[Sequence]) -> list[Result]:
        """`decode`, with tokens chosen on the host."""
        if self._has_states:
            self._keep_states([(s, s.num_cached_tokens - s.replay) for s in sequences])
        with Range("decode step"):
            logits = self.forward("decode", decode_rows(sequences)).float().cpu()
        with Range("sample"):
            results, start = list[Result](), 0
            for sequence in sequences:
                start += sequence.replay
                end = start + 1 + len(sequence.draft)
                results.append(_choose(sequence, logits[start:end]))
                start = end
        return results

    def _keep_states(self, rows: Seq[tuple[Sequence, int]]) -> None:
        """Copy states that a decode step changes, given each sequence with the position of its first row."""
        copies = [copy for each, at in rows for copy in copies_before(self.cache.pools, each, at)]
        if copies:
            self.copy_states(copies)

    def _explained(self, sequences: Seq[Sequence], results: list[Result]) -> list[Result]:
        """The results of a device, with the error for each sequence for which it found no token."""
        pairs = zip(sequences, results, strict=True)
        return [self._explain(s) if result is NO_CHOICE and s.block_tables else result for s, result in pairs]

    def _explain(self, sequence: Sequence) -> Result:
        """Recomputes the step of a sequence for which a device found no token, on the host, to get the error."""
        sequence.draft = []
        return self._decode_on_host([sequence])[0]

    @torch.no_grad()
    def _score(self, chunks: Seq[Chunk]) -> list[Result]:
        """`prefill` for prompts whose tokens are scored: log-probabilities are added to the sequences' `scores`."""
        scored, sampled = _wanted_rows(chunks, self.decoder.config.vocab_size)
        # A single row would be multiplied by a decode kernel: doubled, it has the same bits as in any larger part.
        parts = [rows if len(rows) > 1 else 2 * rows for _, rows in scored]
        if sampled:  # by themselves, as without scoring
            parts.append(list(sampled.values()))
        results: dict[Sequence, Result] = dict.fromkeys(chunk.sequence for chunk in chunks)
        with Range("prefill"):
            logits = self.logits_of_parts(prefill_rows(chunks), parts)
            for (sequence, rows), of_rows in zip(scored, logits, strict=False):
                if results[sequence] is None:
                    results[sequence] = _add_scores(sequence, of_rows[: len(rows)])
            rows_left = next(logits).float().cpu() if sampled else ()
            next(logits, None)  # ends the step on all ranks
        with Range("sample"):
            for sequence, row in zip(sampled, rows_left, strict=True):
                if results[sequence] is None:
                    results[sequence] = sequence.sample_next(row)
        return list(results.values())

    @torch.no_grad()
    def _embed(self, chunk: Chunk) -> Result:
        """Computes a chunk of a pooled prompt, and pools its hidden rows; returns the error if they are not finite."""
        sequence = chunk.sequence
        assert sequence.pool is not None
        with Range("embedding chunk"):
            hidden = self.hidden(prefill_rows([chunk]))
        try:
            if sequence.pool.pooling == RANK:
                hidden = self.decoder.scores(hidden[0])[None]
            sequence.pool.add(hidden)
        except EngineError as error:
            return error
        return None


def _are_only_sampled(chunks: Seq[Chunk]) -> bool:
    """Whether only the logits of the chunks' last rows are needed, to sample the next tokens."""
    return all(chunk.sequence.pool is None and not chunk.scored_rows for chunk in chunks)


def _sampled(chunks: Seq[Chunk], logits: Tensor) -> list[Result]:
    """The next tokens of prompts that end with their chunk, given the logits [chunks, vocab] on the host."""
    with Range("sample"):
        return [
            chunk.sequence.sample_next(row) if chunk.samples and chunk.sequence.block_tables else None
            for chunk, row in zip(chunks, logits, strict=True)
        ]


def _choose(sequence: Sequence, logits: Tensor) -> Result:
    """The result of a sequence, given the logits of its rows."""
    if not sequence.next_is_newest:
        return None
    first = sequence.sample_next(logits[0])
    if not sequence.draft or not isinstance(first, Sample):
        return first
    return Verified(first, lambda number: sequence.sample_next(logits[number]))


def _wanted_rows(
    chunks: Seq[Chunk], vocab_size: int
) -> tuple[list[tuple[Sequence, list[int]]], dict[Sequence, int]]:
    """Rows of a step of these chunks: those that score prompts, in parts, and the last row of each sampled sequence."""
    scored, sampled, first = list[tuple[Sequence, list[int]]](), dict[Sequence, int](), 0
    for chunk in chunks:
        for part in split_rows(chunk.scored_rows, vocab_size):
            scored.append((chunk.sequence, [first + row for row in part]))
        first += len(chunk.ids)
        if chunk.samples:
            sampled[chunk.sequence] = first - 1
    return scored, sampled


def _add_scores(sequence: Sequence, logits: Tensor) -> Result:
    """Scores the next tokens of a sequence's prompt; returns the error if that fails."""
    assert sequence.scores is not None
    try:
        sequence.scores.add(logits)
    except EngineError as error:
        return error
    return None
