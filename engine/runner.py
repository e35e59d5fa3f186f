"""Turns a batch into the next token: the only place where the decoder and its cache meet."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quengine.batch import Batch, Chunk
from quengine.errors import EngineError
from quengine.kernels import forward_batch, sampling
from quengine.kernels.forward_batch import BlockTables, Phase
from quengine.kernels.sampling import Choose
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.platform.ranges import Range
from quengine.request.prompt_scores import split_rows
from quengine.request.sequence import Sequence
from quengine.sampler import Sample

Result: TypeAlias = "Sample | Verified | Exception | None"
"""What a step came to for one sequence: its next token, several where it had a draft, why it cannot go on, or None
where no token was due."""


@dataclass(frozen=True)
class Verified:
    """What a step came to for a sequence with a draft: the token behind its newest one, and those behind the drafted
    ones, asked for one by one.

    `later(n)`: the token behind the first n drafted ones, once the sequence has taken just these; or why there is
    none. Valid until the runner's next step.
    """

    first: Sample
    later: "Callable[[int], Result]"


@dataclass(frozen=True)
class Row:
    """One row of a decode step: `token` at `position` of the sequence whose cache lies in `block_tables`."""

    token: int
    position: int
    block_tables: BlockTables


def rows_of(sequences: Seq[Sequence]) -> list[Row]:
    """Of each sequence the first token that is not in the cache, and behind it its draft."""
    return [
        Row(token, sequence.num_cached_tokens + number, sequence.block_tables)
        for sequence in sequences
        for number, token in enumerate([sequence.token_ids[sequence.num_cached_tokens], *sequence.draft])
    ]


class Runner:
    """Runs the decoder eagerly and samples on the host."""

    choose: Choose = staticmethod(sampling.sample)
    """Chooses tokens on the host."""

    packs_prompts = True
    """Whether chunks of several prompts in one step take less time than one after the other."""

    settles_after = 1
    """How often a step of some size runs before it takes the time that it will take from then on."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder = decoder
        self.cache = cache

    def run(self, batch: Batch) -> list[Result]:
        """Compute a batch: a result for each of its sequences, in order. What concerns them all is raised."""
        if batch.phase == "decode":
            return self.decode(batch.sequences)
        if any(chunk.sequence.pool is not None for chunk in batch.chunks):
            return [self._embed(chunk) for chunk in batch.chunks]
        if any(chunk.scored_rows for chunk in batch.chunks):
            return self._score(batch.chunks)
        return self.prefill(batch.chunks)

    @torch.no_grad()
    def prefill(self, chunks: Seq[Chunk]) -> list[Result]:
        """Compute chunks of several prompts in one step; a token follows from those that end with the newest one.

        Also computes again what was generated before a sequence lost its blocks. A sequence whose logits are not finite
        fails alone.
        """
        with Range("prefill"):
            logits = self.prefill_logits(
                [chunk.ids for chunk in chunks],
                [chunk.start for chunk in chunks],
                [chunk.sequence.block_tables for chunk in chunks],
            )
            logits = logits.float().cpu()
        with Range("sample"):
            return [
                _sample(chunk.sequence, row) if chunk.samples else None
                for chunk, row in zip(chunks, logits, strict=True)
            ]

    @torch.no_grad()
    def prefill_logits(
        self, ids: Seq[Seq[int]], starts: Seq[int], tables: Seq[BlockTables], all_logits: bool = False
    ) -> Tensor:
        """Logits after the last token of each of these chunks, [chunks, vocab], or after all tokens, [T, vocab].

        In the backend's dtype, on its device; valid until the next step.
        """
        batch = forward_batch.prefill_batch(ids, starts, tables, self.decoder.backend.device, all_logits)
        return self.decoder.forward(batch, self.cache.layers)

    @torch.no_grad()
    def _score(self, chunks: Seq[Chunk]) -> list[Result]:
        """As `prefill`, where log-probabilities of prompts' tokens are wanted: they go to their sequences' `scores`."""
        device = self.decoder.backend.device
        batch = forward_batch.prefill_batch(
            [chunk.ids for chunk in chunks],
            [chunk.start for chunk in chunks],
            [chunk.sequence.block_tables for chunk in chunks],
            device,
        )
        scored, sampled = _wanted_rows(chunks, self.decoder.config.vocab_size)
        # A row alone would be multiplied as a decode step's is: with another it has the bits that it has in any part.
        parts = [rows if len(rows) > 1 else 2 * rows for _, rows in scored]
        if sampled:  # by themselves, as where nothing is scored
            parts.append(list(sampled.values()))
        results: dict[Sequence, Result] = dict.fromkeys(chunk.sequence for chunk in chunks)
        with Range("prefill"):
            tensors = (torch.tensor(rows, device=device) for rows in parts)
            logits = self.decoder.forward_parts(batch, self.cache.layers, tensors)
            for (sequence, rows), of_rows in zip(scored, logits, strict=False):
                if results[sequence] is None:
                    results[sequence] = _add_scores(sequence, of_rows[: len(rows)])
            rows_left = next(logits).float().cpu() if sampled else ()
        with Range("sample"):
            for sequence, row in zip(sampled, rows_left, strict=True):
                if results[sequence] is None:
                    results[sequence] = _sample(sequence, row)
        return list(results.values())

    @torch.no_grad()
    def _embed(self, chunk: Chunk) -> Result:
        """Compute a chunk of a prompt that has a pool, and pool its hidden rows; what is not finite is returned."""
        sequence, device = chunk.sequence, self.decoder.backend.device
        assert sequence.pool is not None
        batch = forward_batch.prefill_batch([chunk.ids], [chunk.start], [sequence.block_tables], device)
        try:
            with Range("embedding chunk"):
                sequence.pool.add(self.decoder.hidden(batch, self.cache.layers))
        except EngineError as error:
            return error
        return None

    def decode(self, sequences: Seq[Sequence]) -> list[Result]:
        """One more token in the cache of each of B sequences, in one step; a result each, in order.

        A sequence's first row is `token_ids[num_cached_tokens]` at position `num_cached_tokens`: its newest token, of
        which a Sample follows; or, when what was generated is computed again, an earlier one (`next_is_newest` is
        false), and the result is None. The tokens of its `draft` are further rows, which are computed as if they had
        been generated; the result is then Verified. A sequence fails alone: its result is then the exception, an
        EngineError where its logits are not finite. What is raised concerns all rows; none has then advanced, and the
        call may be repeated with fewer of them.

        `block_tables` cover these positions, and without a draft the one after them, if the sequence can come to it, so
        that a runner may be a step ahead. From call to call sequences come and go; one that stayed has its Sample's
        token appended.
        """
        with Range("decode step"):
            logits = self.decode_rows(rows_of(sequences))
        with Range("sample"):
            return self.sample_rows(sequences, logits)

    @torch.no_grad()
    def decode_rows(self, rows: Seq[Row]) -> Tensor:
        """Logits [rows, vocab] fp32 on the host after each row's token, all written to the cache.

        Rows of one sequence stand in order. Valid until the runner's next step.
        """
        tables = [row.block_tables for row in rows]
        batch = forward_batch.decode_batch(
            [row.token for row in rows],
            [row.position for row in rows],
            tables,
            self.decoder.backend.device,
            shares_sequences=len({id(table) for table in tables}) < len(rows),
        )
        return self.decoder.forward(batch, self.cache.layers).float().cpu()

    def sample_rows(self, sequences: Seq[Sequence], logits: Tensor) -> list[Result]:
        """The results of sequences, given the logits of `rows_of` them."""
        results, start = [], 0
        for sequence in sequences:
            end = start + 1 + len(sequence.draft)
            results.append(self._sample_rows(sequence, logits[start:end]))
            start = end
        return results

    def _sample_rows(self, sequence: Sequence, rows: Tensor) -> Result:
        first = self.sample_row(sequence, rows[0])
        if not sequence.draft or not isinstance(first, Sample):
            return first
        return Verified(first, lambda number: self.sample_row(sequence, rows[number]))

    def sample_row(self, sequence: Sequence, logits: Tensor) -> Result:
        """The token after a sequence's newest one, given the host's logits [vocab] there; what fails is returned."""
        return _sample(sequence, logits) if sequence.next_is_newest else None

    def warm_up(self) -> None:
        """Do ahead what the first steps would otherwise wait for, where there is something. Nothing must run."""

    @property
    def kernels_per_step(self) -> int | None:
        """Kernels that the newest captured decode step launches; None where none was captured."""
        return None

    def logits(self, ids: Seq[int], start: int, phase: Phase) -> Tensor:
        """Logits [T, vocab] on the CPU after each of `ids` at positions start, ..., in the cache's first blocks.

        In one prefill step, or one decode step a token. What other sequences had there is lost.
        """
        tables = self.cache.whole_tables
        if phase == "prefill":
            return self.prefill_logits([ids], [start], [tables], all_logits=True).cpu()
        return torch.cat(
            [self.decode_rows([Row(token, start + n, tables)]).clone() for n, token in enumerate(ids)]
        )

    def teacher_forced(self, ids: Seq[int], chunk: int, phase: Phase) -> Tensor:
        """Logits [T, vocab] on the CPU after each of `ids`, computed from an empty cache, `chunk` tokens a step."""
        starts = range(0, len(ids), chunk)
        return torch.cat([self.logits(ids[s : s + chunk], s, phase) for s in starts])


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


def _sample(sequence: Sequence, logits: Tensor) -> Result:
    """The token after a sequence's newest one, or why there is none."""
    try:
        return sequence.sampler.sample(logits, sequence.token_ids, len(sequence.token_ids))
    except Exception as error:
        return error
