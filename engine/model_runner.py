"""Runs a step: the decoder on a batch, over the cache, and sampling."""

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

    captured_at: the time that a step of some size comes at which it is captured; it then takes the time that it takes
        from then on.
    kernels_per_step: kernels of the newest captured decode step; None where they are not counted.
    together: `ModelRunner.together`.
    """

    captured_at: int
    kernels_per_step: int | None
    together: Together

    def lookup(self, phase: Phase, rows: Seq[SequenceRows]) -> GraphKey | None:
        """The captured step for these rows; None where they are to be computed eagerly."""
        ...

    def replay(self, key: GraphKey, rows: Seq[SequenceRows]) -> Tensor:
        """What `Decoder.forward` gives for these rows; valid until the next step."""
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
    """A step that is computed, or on its way on a device.

    results(ahead): of each sequence of `batch`, in order, once they are known; None for one that was cancelled
        meanwhile. ahead: the next step will have just these sequences, and may be launched now.
    may_follow: another step may be launched before the results are taken.
    """

    batch: Batch
    results: Callable[[bool], list[Result]]
    may_follow: bool = False


class ModelRunner:
    """Runs a decoder over its cache. `ranks`: the group whose rank 0 this is; None: it is told, or computes alone.

    Args:
        decoder, cache: of one model.
        graphs: captured steps; None: every step is computed eagerly.
        device_decoder: decode steps with the sampling in them; None: tokens are chosen on the host.
        choose: chooses tokens on the host.
        packs_prompts: chunks of several prompts in one step take less time than one after the other.
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
        """From now on tell the other ranks of a group what is computed."""
        self.ranks = ranks
        if self.graphs is not None:
            self.graphs.together = ranks.together

    def release(self) -> None:
        """Drop what was captured: no step can be computed any more. Ranks of a group then leave it."""
        if self.graphs is not None:
            self.graphs.release()
        if self.ranks is not None:
            self.ranks.close()

    def launch(self, batch: Batch) -> LaunchedStep:
        """Begin to compute a batch: on a device that chooses tokens itself without waiting for it, else `run` it."""
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
        """Compute a batch: a result for each of its sequences, in order. What concerns them all is raised."""
        if batch.phase == "decode":
            return self.decode(batch.sequences)
        if any(chunk.sequence.pool is not None for chunk in batch.chunks):
            return [self._embed(chunk) for chunk in batch.chunks]
        if any(chunk.scored_rows for chunk in batch.chunks):
            return self._score(batch.chunks)
        return self.prefill(batch.chunks)

    def decode(self, sequences: Seq[Sequence]) -> list[Result]:
        """One more token in the cache of each of these sequences, in one step; a result each, in order.

        A sequence's first row is `token_ids[num_cached_tokens]` at position `num_cached_tokens`: its newest token, of
        which a Sample follows; or, when what was generated is computed again, an earlier one (`next_is_newest` is
        false), and the result is None. The tokens of its `draft` are further rows, which are computed as if they had
        been generated; the result is then Verified. A sequence fails alone: its result is then the exception, an
        EngineError where its logits are not finite. What is raised concerns all rows; none has then advanced, and the
        call may be repeated with fewer of them.

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
        """Compute chunks of several prompts in one step; a token follows from those that end with the newest one.

        Also computes again what was generated before a sequence lost its blocks. A sequence whose logits are not finite
        fails alone.
        """
        with Range("prefill"):
            logits = self.forward("prefill", prefill_rows(chunks)).float().cpu()
        return _sampled(chunks, logits)

    @torch.no_grad()
    def forward(
        self, phase: Phase, rows: Seq[SequenceRows], all_logits: bool = False, eager: bool = False
    ) -> Tensor:
        """Logits of these rows: in prefill after each sequence's last, [sequences, vocab], or after all, [T, vocab];
        in decode after all. `eager`: no captured step.

        In the backend's dtype, on its device; valid until the next step.
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
        """The rows that the output matrix would read, of all tokens of prompts' chunks: [T, embedding length]."""
        with self.together(Hidden(rows)):
            batch = forward_batch("prefill", rows, self.decoder.backend.device)
            return self.decoder.hidden(batch, self.cache.layers)

    @torch.no_grad()
    def logits_of_parts(self, rows: Seq[SequenceRows], parts: Seq[Seq[int]]) -> Iterator[Tensor]:
        """Logits [n, vocab] of each of `parts` of the rows of prompts' chunks, each computed when it is asked for; all
        must be."""
        with self.together(Parts(rows, parts)):
            device = self.decoder.backend.device
            batch = forward_batch("prefill", rows, device)
            tensors = (torch.tensor(part, device=device) for part in parts)
            yield from self.decoder.forward_parts(batch, self.cache.layers, tensors)

    def copy_states(self, copies: Seq[StateCopy]) -> None:
        """Copy states of sequences, behind the steps that were launched before."""
        with self.together(CopyStates(copies)):
            self.cache.copy_states(copies)

    def together(self, message: Message) -> AbstractContextManager[None]:
        """What is inside is computed by all ranks, as `message` tells the others."""
        return alone(message) if self.ranks is None else self.ranks.together(message)

    def warm_up(self, params: SamplingParams | None = None) -> None:
        """Capture what the first steps would otherwise wait for; nothing may be under way.

        All steps that ordinary requests come to; with `params` the decode steps of one sequence with such settings.
        """
        if self.graphs is not None:
            self.graphs.warm_up(params)

    def capture_next(self) -> bool:
        """Capture one more step, that rarer requests come to, while nothing is under way; False where none is left."""
        return self.graphs is not None and self.graphs.capture_next()

    @property
    def settles_after(self) -> int:
        """How often a step of some size comes before it takes the time that it takes from then on."""
        return 1 if self.graphs is None else self.graphs.captured_at

    @property
    def kernels_per_step(self) -> int | None:
        """Kernels of the newest captured decode step; None where none was captured or they are not counted."""
        return None if self.graphs is None else self.graphs.kernels_per_step

    def logits(self, ids: Seq[int], start: int, phase: Phase) -> Tensor:
        """Logits [T, vocab] on the host after each of `ids` at positions start, ..., in the cache's first blocks.

        In one prefill step, or one decode step a token. What other sequences had there is lost.
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
        """The results of a device, with the reasons for those that have no token."""
        pairs = zip(sequences, results, strict=True)
        return [self._explain(s) if result is NO_CHOICE and s.block_tables else result for s, result in pairs]

    def _explain(self, sequence: Sequence) -> Result:
        """The result of a sequence of which a device found no token: computed eagerly, to say what is wrong."""
        sequence.draft = []
        return self._decode_on_host([sequence])[0]

    @torch.no_grad()
    def _score(self, chunks: Seq[Chunk]) -> list[Result]:
        """As `prefill`, where log-probabilities of prompts' tokens are wanted: they go to their sequences' `scores`."""
        scored, sampled = _wanted_rows(chunks, self.decoder.config.vocab_size)
        # A row alone would be multiplied as a decode step's is: with another it has the bits that it has in any part.
        parts = [rows if len(rows) > 1 else 2 * rows for _, rows in scored]
        if sampled:  # by themselves, as where nothing is scored
            parts.append(list(sampled.values()))
        results: dict[Sequence, Result] = dict.fromkeys(chunk.sequence for chunk in chunks)
        with Range("prefill"):
            logits = self.logits_of_parts(prefill_rows(chunks), parts)
            for (sequence, rows), of_rows in zip(scored, logits, strict=False):
                if results[sequence] is None:
                    results[sequence] = _add_scores(sequence, of_rows[: len(rows)])
            rows_left = next(logits).float().cpu() if sampled else ()
            next(logits, None)  # the step has ended on all ranks
        with Range("sample"):
            for sequence, row in zip(sampled, rows_left, strict=True):
                if results[sequence] is None:
                    results[sequence] = sequence.sample_next(row)
        return list(results.values())

    @torch.no_grad()
    def _embed(self, chunk: Chunk) -> Result:
        """Compute a chunk of a prompt that has a pool, and pool its hidden rows; what is not finite is returned."""
        sequence = chunk.sequence
        assert sequence.pool is not None
        with Range("embedding chunk"):
            hidden = self.hidden(prefill_rows([chunk]))
        try:
            sequence.pool.add(hidden)
        except EngineError as error:
            return error
        return None


def _are_only_sampled(chunks: Seq[Chunk]) -> bool:
    """Whether of these chunks only the last rows are wanted, for the tokens that follow."""
    return all(chunk.sequence.pool is None and not chunk.scored_rows for chunk in chunks)


def _sampled(chunks: Seq[Chunk], logits: Tensor) -> list[Result]:
    """The tokens behind prompts that end with their chunk, given the logits [chunks, vocab] on the host."""
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
    """Rows of a step of these chunks: those that score prompts, in parts, and of each sequence the one whose logits
    give its next token, if one does."""
    scored, sampled, first = list[tuple[Sequence, list[int]]](), dict[Sequence, int](), 0
    for chunk in chunks:
        for part in split_rows(chunk.scored_rows, vocab_size):
            scored.append((chunk.sequence, [first + row for row in part]))
        first += len(chunk.ids)
        if chunk.samples:
            sampled[chunk.sequence] = first - 1
    return scored, sampled


def _add_scores(sequence: Sequence, logits: Tensor) -> Result:
    """Score the next tokens of a sequence's prompt; why it cannot be done is returned."""
    assert sequence.scores is not None
    try:
        sequence.scores.add(logits)
    except EngineError as error:
        return error
    return None
