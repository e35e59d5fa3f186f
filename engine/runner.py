"""Turns a batch into the next token: the only place where the decoder and its cache meet."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels import sampling
from quengine.kernels.backend import Chunk, DecodeBatch, Position, PromptBatch, rectangle
from quengine.kernels.sampling import Choose
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.ranges import Range
from quengine.sampler import Sample
from quengine.scheduler import Batch, DecodeStep, PromptStep
from quengine.sequence import Sequence

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
    """One row of a decode step: `token` at `position` of the sequence whose cache lies in `block_table`."""

    token: int
    position: int
    block_table: list[int]


def rows_of(sequences: Seq[Sequence]) -> list[Row]:
    """Of each sequence the first token that is not in the cache, and behind it its draft."""
    return [
        Row(token, sequence.num_cached_tokens + number, sequence.block_table)
        for sequence in sequences
        for number, token in enumerate([sequence.token_ids[sequence.num_cached_tokens], *sequence.draft])
    ]


class Runner:
    """Runs the decoder eagerly and samples on the host; knows no text."""

    choose: Choose = staticmethod(sampling.sample)
    """Chooses tokens on the host."""

    packs_prompts = True
    """Whether chunks of several prompts in one step take less time than one after the other."""

    settles_after = 1
    """How often a step of some size runs before it takes the time that it will take from then on."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder = decoder
        self.cache = cache

    @torch.no_grad()
    def forward(self, ids: Seq[int], start: int, last_only: bool = True) -> Tensor:
        """Logits of `ids` at positions start .. start + T - 1, given the rows before them in the cache.

        Returns [1, vocab] for the last token, or [T, vocab], in the backend's dtype, on its device.
        """
        part = torch.tensor(ids, device=self.decoder.backend.device)
        return self.decoder.forward(part, self.cache.layers, start, last_only)

    def run(self, batch: Batch | PromptStep | DecodeStep) -> list[Result]:
        """Compute a batch: a result for each of its sequences, in order. What concerns them all is raised."""
        if isinstance(batch, DecodeStep):
            return self.decode_batch(batch.sequences)
        if isinstance(batch, PromptStep):
            return self.prefill_batch(batch.chunks)
        try:
            if batch.sequence.pool is not None:
                self.embed(batch)
                return [None]
            return [self.prefill(batch) if self.cache.num_blocks else self.step(batch)]
        except EngineError as error:
            return [error]

    def step(self, batch: Batch) -> Sample | None:
        """Compute a batch of the one sequence that has the cache (contiguous).

        Where it ends with the newest token, the one after it is chosen.

        Raises:
            EngineError: the logits are not finite (with the token's position).
        """
        with Range("prefill chunk" if len(batch.ids) > 1 else "decode step"):
            logits = self.forward(batch.ids, batch.start)[0].float()
        if not batch.samples:
            return None
        ids = batch.sequence.token_ids
        with Range("sample"):
            return batch.sequence.sampler.sample(logits, ids, len(ids))

    @torch.no_grad()
    def prefill(self, batch: Batch) -> Sample | None:
        """`step` for a sequence whose cache lies in the blocks of its `block_table` (paged cache).

        Also computes again what was generated before the sequence lost its blocks.

        Raises:
            EngineError: the logits are not finite (with the token's position).
        """
        sequence = batch.sequence
        with Range("prefill chunk"):
            logits = self.compute_chunk(batch.ids, batch.start, sequence.block_table)
        if not batch.samples:
            return None
        with Range("sample"):
            return sequence.sampler.sample(logits, sequence.token_ids, len(sequence.token_ids))

    @torch.no_grad()
    def prefill_batch(self, chunks: Seq[Batch]) -> list[Result]:
        """`prefill` for several sequences in one step; a sequence whose logits are not finite fails alone."""
        with Range("prefill chunks"):
            logits = self.compute_chunks(chunks).cpu()
        with Range("sample"):
            return [
                _sample(chunk.sequence, row) if chunk.samples else None
                for chunk, row in zip(chunks, logits, strict=True)
            ]

    @torch.no_grad()
    def compute_chunk(self, ids: Seq[int], start: int, block_table: Seq[int]) -> Tensor:
        """Logits [vocab] fp32 after the last of `ids` at positions `start`, ... of a sequence (paged cache)."""
        device = self.decoder.backend.device
        chunk = Chunk(start, torch.tensor(block_table, dtype=torch.int32, device=device))
        given = torch.tensor(ids, device=device)
        return self.decoder.forward(given, self.cache.layers, chunk)[0].float()

    @torch.no_grad()
    def compute_chunks(self, chunks: Seq[Batch]) -> Tensor:
        """Logits [chunks, vocab] fp32 after the last token of each (paged cache)."""
        device = self.decoder.backend.device
        given = torch.tensor([token for chunk in chunks for token in chunk.ids], device=device)
        lengths = [len(chunk.ids) for chunk in chunks]
        tables = [chunk.sequence.block_table for chunk in chunks]
        start = PromptBatch.of([chunk.start for chunk in chunks], lengths, tables, device)
        return self.decoder.forward(given, self.cache.layers, start).float()

    @torch.no_grad()
    def embed(self, batch: Batch) -> None:
        """Compute a chunk of a prompt that has a pool, and pool its hidden rows.

        Raises:
            EngineError: they are not finite.
        """
        sequence, device = batch.sequence, self.decoder.backend.device
        assert sequence.pool is not None
        start: Position = batch.start
        if self.cache.num_blocks:
            table = torch.tensor(sequence.block_table, dtype=torch.int32, device=device)
            start = Chunk(batch.start, table)
        with Range("embedding chunk"):
            ids = torch.tensor(batch.ids, device=device)
            sequence.pool.add(self.decoder.hidden(ids, self.cache.layers, start))

    def decode_batch(self, sequences: Seq[Sequence]) -> list[Result]:
        """One more token in the cache of each of B sequences, in one step (paged cache); a result each, in order.

        A sequence's first row is `token_ids[num_cached_tokens]` at position `num_cached_tokens`: its newest token, of
        which a Sample follows; or, when what was generated is computed again, an earlier one (`next_is_newest` is
        false), and the result is None. The tokens of its `draft` are further rows, which are computed as if they had
        been generated; the result is then Verified. A sequence fails alone: its result is then the exception, an
        EngineError where its logits are not finite. What is raised concerns all rows; none has then advanced, and the
        call may be repeated with fewer of them.

        `block_table` covers these positions, and without a draft the one after them, if the sequence can come to it, so
        that a runner may be a step ahead. From call to call sequences come and go; one that stayed has its Sample's
        token appended.
        """
        with Range("decode step"):
            logits = self.decode_rows(rows_of(sequences))
        with Range("sample"):
            return self.sample_rows(sequences, logits)

    @torch.no_grad()
    def decode_rows(self, rows: Seq[Row]) -> Tensor:
        """Logits [rows, vocab] fp32 on the host after each row's token, all written to the cache (paged).

        Rows of one sequence stand in order. Valid until the runner's next step.
        """
        device = self.decoder.backend.device
        ids = torch.tensor([row.token for row in rows], device=device)
        positions = torch.tensor([row.position for row in rows], dtype=torch.int32, device=device)
        tables = rectangle([row.block_table for row in rows])
        consecutive = len({id(row.block_table) for row in rows}) < len(rows)
        start = DecodeBatch(positions, torch.tensor(tables, dtype=torch.int32, device=device), consecutive)
        return self.decoder.forward(ids, self.cache.layers, start, last_only=False).float().cpu()

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

    def teacher_forced(self, ids: Seq[int], chunk: int) -> Tensor:
        """Logits [T, vocab] after each of `ids`, computed `chunk` tokens at a time from an empty cache.

        chunk = 1 goes through the decode kernels, a larger one through those of the prefill. In the backend's
        dtype, on the CPU. What the cache held is gone afterwards.
        """
        self.cache.tokens.clear()
        starts = range(0, len(ids), chunk)
        return torch.cat([self.forward(ids[s : s + chunk], s, last_only=False).cpu() for s in starts])


def _sample(sequence: Sequence, logits: Tensor) -> Result:
    """The token after a sequence's newest one, or why there is none."""
    try:
        return sequence.sampler.sample(logits, sequence.token_ids, len(sequence.token_ids))
    except Exception as error:
        return error
