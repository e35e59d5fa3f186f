"""A second, small model that drafts: its own weights and cache, over the blocks of the model that it drafts for.

Its cache has as many blocks as the other's first group of layers, which then keeps all positions, so a sequence's block
table serves both; what of a block it has computed itself
is noted here. It samples as the sequence does, with the same random numbers: where both models see it alike they choose
the same token. Whatever it drafts, the text does not depend on it.

Knows sequences, tokens and blocks; not whether a draft was right, nor how drafts are sampled (DraftSteps).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.platform.ranges import Range
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.runner import Row, Runner
from quengine.sampler import Sampler

MOST_ROWS = 4
"""Tokens that a first step makes up for, as rows of it; more are computed as a chunk."""


@dataclass(frozen=True)
class DraftJob:
    """`count` tokens wanted behind `tokens`, which are at positions `start`, ... and not in the draft model's cache."""

    tokens: list[int]
    start: int
    block_table: list[int]
    count: int
    history: list[int]
    sampler: Sampler


class DraftSteps(Protocol):
    """Runs the draft model's decode steps."""

    def draft(self, jobs: Seq[DraftJob]) -> list[list[int]]:
        """Of each job the drafted tokens; fewer than wanted where the logits give none."""
        ...


class HostDraftSteps:
    """A step of all jobs at a time, sampled on the host."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._groups = len(runner.cache.pools)

    def draft(self, jobs: Seq[DraftJob]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in jobs]
        inputs = {index: job.tokens for index, job in enumerate(jobs)}  # of the jobs that go on
        while inputs:
            rows, last = [], []
            for index, tokens in inputs.items():
                start = jobs[index].start if not drafts[index] else len(jobs[index].history) - 1
                tables = [jobs[index].block_table] * self._groups
                rows += [Row(token, start + number, tables) for number, token in enumerate(tokens)]
                last.append(len(rows) - 1)
            logits = self._runner.decode_rows(rows)
            chosen = {
                index: _sampled(jobs[index], logits[row]) for index, row in zip(inputs, last, strict=True)
            }
            inputs = {}
            for index, token in chosen.items():
                if token is not None:
                    drafts[index].append(token)
                    jobs[index].history.append(token)
                    if len(drafts[index]) < jobs[index].count:
                        inputs[index] = [token]
        return drafts


def _sampled(job: DraftJob, logits: Tensor) -> int | None:
    try:
        return job.sampler.sample(logits, job.history, len(job.history)).token
    except EngineError:  # no finite logits, or none that the biases leave
        return None


@dataclass
class _Progress:
    """How far a sequence is in the draft model's cache: `cached` tokens of it, and behind them what was drafted.

    `keys` name what its full blocks hold, one for each, with all that is before it.
    """

    block_table: list[int]
    sampler: Sampler
    cached: int = 0
    ahead: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)


class DraftModel:
    """See the module docstring.

    Args:
        runner: the draft model's, over a paged cache with as many blocks as the other's.
        steps: run its decode steps.
    """

    def __init__(self, runner: Runner, steps: DraftSteps) -> None:
        self._runner = runner
        self._steps = steps
        self._texts: WeakKeyDictionary[Sequence, _Progress] = WeakKeyDictionary()
        self._holds: dict[int, int] = {}  # full blocks that this model has computed: the key of their content

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that one drafted token reads."""
        return self._runner.decoder.bytes_per_token

    def room(self, sequence: Sequence) -> int:
        """Tokens that can be drafted before the draft model's own context ends."""
        return self._runner.cache.ctx_size - len(sequence.token_ids)

    def follow(self, sequence: Sequence, end: int) -> None:
        """Compute a sequence's first `end` tokens, as far as they are not in the cache and fit this model's context."""
        text = self._progress(sequence)
        end = min(end, self._runner.cache.ctx_size)
        size = self._runner.decoder.chunk_size
        with Range("draft chunk"):
            while text.cached < end:
                ids = sequence.token_ids[text.cached : min(end, text.cached + size)]
                tables = [text.block_table] * len(self._runner.cache.pools)
                self._runner.prefill_logits([ids], [text.cached], [tables])
                self._wrote(text, text.cached, len(ids))
                self._confirm(text, sequence, len(ids))

    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Up to so many tokens behind each sequence's newest one, all sequences in the same steps.

        Their block tables cover these tokens.
        """
        jobs = [self._job(sequence, count) for sequence, count in counts.items()]
        with Range("draft steps"):
            drafts = self._steps.draft(jobs)
        for sequence, job, draft in zip(counts, jobs, drafts, strict=True):
            text = self._texts[sequence]
            # The last drafted token was not computed. The others are, if the sequence takes them.
            text.ahead = draft[:-1]
            self._wrote(text, job.start, len(job.tokens) + len(text.ahead))
            self._confirm(text, sequence, len(job.tokens))
        return dict(zip(counts, drafts, strict=True))

    def _job(self, sequence: Sequence, count: int) -> DraftJob:
        newest = len(sequence.token_ids) - 1
        text = self._progress(sequence)
        if newest - text.cached >= MOST_ROWS:
            self.follow(sequence, newest)
        text.cached = min(
            text.cached, newest
        )  # the newest token is computed for what follows it, again if need be
        text.sampler.forget()  # of tokens that were drafted and not taken
        tokens = sequence.token_ids[text.cached :]
        return DraftJob(tokens, text.cached, text.block_table, count, list(sequence.token_ids), text.sampler)

    def _progress(self, sequence: Sequence) -> _Progress:
        """Brought up to the tokens that the sequence took of the last draft, or begun anew with its new blocks."""
        text = self._texts.get(sequence)
        if text is None or text.block_table is not sequence.block_tables[0]:
            sampler = self._sampler(sequence) if text is None else text.sampler
            text = self._texts[sequence] = _Progress(sequence.block_tables[0], sampler)
            self._share(text, sequence)
            return text
        ids, taken = sequence.token_ids, 0
        for token, drafted in zip(ids[text.cached : text.cached + len(text.ahead)], text.ahead, strict=False):
            if token != drafted:
                break
            taken += 1
        text.ahead = []
        self._confirm(text, sequence, taken)
        return text

    def _sampler(self, sequence: Sequence) -> Sampler:
        """As the sequence samples, but for what only its own model's rows can tell."""
        params, vocab = sequence.params, self._runner.decoder.config.vocab_size
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab}
        plain: SamplingParams = replace(
            params,
            logit_bias=bias,
            logprobs=None,
            constraint=None,
            stop_token_ids=(),
            seed=sequence.sampler.seed,
        )
        return Sampler(plain, vocab, sequence.sampler.stream)

    def _share(self, text: _Progress, sequence: Sequence) -> None:
        """Take over the blocks in front that hold these tokens already."""
        for index, number in enumerate(text.block_table[: len(sequence.token_ids) // BLOCK_SIZE]):
            key = _key(text.keys, sequence, index)
            if self._holds.get(number) != key:
                return
            text.keys.append(key)
            text.cached += BLOCK_SIZE

    def _wrote(self, text: _Progress, start: int, count: int) -> None:
        """These rows hold something else now than what their blocks were known for."""
        for index in range(start // BLOCK_SIZE, (start + count - 1) // BLOCK_SIZE + 1):
            self._holds.pop(text.block_table[index], None)

    def _confirm(self, text: _Progress, sequence: Sequence, count: int) -> None:
        """So many further rows hold the sequence's own tokens."""
        text.cached += count
        while (len(text.keys) + 1) * BLOCK_SIZE <= text.cached:
            index = len(text.keys)
            text.keys.append(_key(text.keys, sequence, index))
            self._holds[text.block_table[index]] = text.keys[index]


def _key(before: list[int], sequence: Sequence, index: int) -> int:
    """Of a block's content with all before it. Equal keys of different contents would only make worse drafts."""
    own = tuple(sequence.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
    return hash((before[index - 1] if index else 0, own))
