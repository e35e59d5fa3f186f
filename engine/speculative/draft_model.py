"""A draft model: a second, small model with weights and a cache of its own, over the target's block tables.

Its cache has as many blocks as the target's first cache group, which then keeps all positions. So one block table of a
sequence serves both models; the blocks that the draft model has computed are tracked here. It samples like the
sequence, with the same random numbers: if the logits of both models are alike, they sample the same token. The text
does not depend on its drafts.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.model_runner import ModelRunner
from quengine.platform.ranges import ProfilerRange
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.sampler import Sampler
from quengine.slot import Slot
from quengine.step_plan import SequenceRows

MOST_ROWS = 4
"""Maximum number of missing tokens computed as rows of the first draft step; more are computed as a prefill chunk."""


@dataclass(frozen=True)
class DraftJob:
    """A request for a draft of `count` tokens after `tokens`, which are at positions start, start + 1, ... and not
    cached yet."""

    tokens: list[int]
    start: int
    block_table: list[int]
    count: int
    history: list[int]
    sampler: Sampler


class DraftSteps(Protocol):
    """Runs the draft model's decode steps."""

    def draft(self, jobs: Seq[DraftJob]) -> Seq[Seq[int]]:
        """Returns the drafted tokens of each job. Where none can be sampled, they are fewer, or token 0."""
        ...


class StepsOnDevice(Protocol):
    """The part of `draft_graphs.DraftGraphs` that the host plans with."""

    @property
    def window(self) -> int: ...

    def goes_on(self, slot: Slot) -> bool: ...

    def most_drafted(self, sequences: int) -> int: ...

    def warm_up(self, *settings: SamplingParams) -> None: ...

    def capture_next(self) -> bool: ...


class HostDraftSteps:
    """Runs one step of all jobs at a time, sampled on the host."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._groups = len(runner.cache.pools)

    def draft(self, jobs: Seq[DraftJob]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in jobs]
        inputs = {index: job.tokens for index, job in enumerate(jobs)}  # of the jobs that go on
        while inputs:
            rows = []
            for index, tokens in inputs.items():
                start = jobs[index].start if not drafts[index] else len(jobs[index].history) - 1
                rows.append(SequenceRows(tokens, start, [jobs[index].block_table] * self._groups))
            logits = self._runner.forward("decode", rows).float().cpu()
            ends = accumulate(len(tokens) for tokens in inputs.values())
            chosen = {
                index: sampled(jobs[index].sampler, logits[end - 1], jobs[index].history)
                for index, end in zip(inputs, ends, strict=True)
            }
            inputs = {}
            for index, token in chosen.items():
                if token is not None:
                    drafts[index].append(token)
                    jobs[index].history.append(token)
                    if len(drafts[index]) < jobs[index].count:
                        inputs[index] = [token]
        return drafts


def sampled(sampler: Sampler, logits: Tensor, history: Seq[int]) -> int | None:
    """The token after these, by its logits [vocab_size]; None where none can be sampled."""
    try:
        return sampler.sample(logits, history, len(history)).token
    except EngineError:  # no finite logits, or the biases ban every token
        return None


@dataclass
class Progress:
    """A sequence's state in the draft model's cache: `cached` valid tokens, then the draft `ahead` without its last
    token, which is not computed yet.

    `keys` identify its full blocks, each with all tokens before it.
    """

    block_table: list[int]
    sampler: Sampler
    cached: int = 0
    ahead: Seq[int] = ()
    keys: list[int] = field(default_factory=list)


class DraftModel:
    """The draft model, see the module docstring.

    Args:
        runner: runs the draft model, over a paged cache with as many blocks as the target's first cache group.
        steps: runs its decode steps.
        on_device: steps that draft on the device; None: there are none.
    """

    def __init__(
        self, runner: ModelRunner, steps: DraftSteps, on_device: StepsOnDevice | None = None
    ) -> None:
        self._runner = runner
        self._steps = steps
        self._on_device = on_device
        self._progresses: WeakKeyDictionary[Sequence, Progress] = WeakKeyDictionary()
        # the key of each full block that this model has computed, by block number
        self._contents: dict[int, int] = {}

    def warm_up(self, params: SamplingParams | None) -> None:
        """See `ModelRunner.warm_up`."""
        self._runner.warm_up(params)
        self._warm_up_on_device(params)

    def _warm_up_on_device(self, params: SamplingParams | None) -> None:
        if self._on_device is not None:
            given = (SamplingParams(temperature=0), SamplingParams()) if params is None else (params,)
            self._on_device.warm_up(*given)

    def capture_next(self) -> bool:
        """Captures one more step that drafts on the device; False if none is left."""
        return self._on_device is not None and self._on_device.capture_next()

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that one drafted token reads."""
        return self._runner.decoder.bytes_per_token

    @property
    def cache_bytes(self) -> int:
        return self._runner.cache.nbytes

    def room(self, sequence: Sequence) -> int:
        """Number of tokens that can be drafted before the draft model's own context ends."""
        return self._runner.cache.ctx_size - len(sequence.token_ids)

    def follow(self, sequence: Sequence, end: int) -> None:
        """Computes the uncached ones among a sequence's first `end` tokens, as far as this model's context reaches."""
        self.follow_all({sequence: end})

    def follow_all(self, ends: Mapping[Sequence, int]) -> None:
        """`follow` for several sequences, whose chunks are computed together where they are short."""
        most = self._runner.cache.ctx_size
        left = {sequence: min(end, most) for sequence, end in ends.items()}
        with ProfilerRange("draft chunk"):
            while left := {each: end for each, end in left.items() if self._progress(each).cached < end}:
                self._follow_step(left)

    def _follow_step(self, ends: Mapping[Sequence, int]) -> None:
        """Computes one step with chunks of these sequences, filled up to the most tokens of a step."""
        room, chunks = self._runner.decoder.chunk_size, dict[Sequence, SequenceRows]()
        for sequence, end in ends.items():
            progress = self._progresses[sequence]
            ids = sequence.token_ids[progress.cached : min(end, progress.cached + room)]
            if not ids:
                break
            room -= len(ids)
            tables = [progress.block_table] * len(self._runner.cache.pools)
            chunks[sequence] = SequenceRows(ids, progress.cached, tables)
        self._runner.forward("prefill", list(chunks.values()))
        for sequence, chunk in chunks.items():
            progress = self._progresses[sequence]
            self._wrote(progress, chunk.start, len(chunk.ids))
            self._confirm(progress, sequence, len(chunk.ids))

    def most_on_device(self, sequences: int) -> int:
        """The most tokens for each of `sequences` sequences that the device drafts and verifies in one step by itself;
        0: it does not."""
        return 0 if self._on_device is None else self._on_device.most_drafted(sequences)

    def fits_device(self, _sequence: Sequence) -> bool:
        """Whether the device can draft after a sequence of this length."""
        return True

    def goes_on(self, sequence: Sequence) -> bool:
        """Whether the device can draft in a sequence's next step without input from the host."""
        return self._on_device is not None and self._on_device.goes_on(sequence.slot)

    def begin_on_device(self, ends: Mapping[Sequence, int]) -> None:
        """Prepares for a step in which the device drafts after these sequences, up to position `ends[sequence]`."""
        raise NotImplementedError

    def computed(self, sequence: Sequence, count: int) -> None:
        """Notes that the device has computed a sequence's first `count` tokens and drafted after them."""
        raise NotImplementedError

    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, Seq[int]]:
        """Drafts up to counts[sequence] tokens after each sequence's newest one, for all sequences in the same steps.

        The sequences' block tables cover these tokens. Drafts may lie on the device until their tokens are read.
        """
        jobs = [self._job(sequence, count) for sequence, count in counts.items()]
        with ProfilerRange("draft steps"):
            drafts = self._steps.draft(jobs)
        for sequence, job, draft in zip(counts, jobs, drafts, strict=True):
            progress = self._progresses[sequence]
            progress.ahead = draft
            self._wrote(progress, job.start, len(job.tokens) + max(0, len(draft) - 1))
            self._confirm(progress, sequence, len(job.tokens))
        return dict(zip(counts, drafts, strict=True))

    def _job(self, sequence: Sequence, count: int) -> DraftJob:
        newest = len(sequence.token_ids) - 1
        progress = self._progress(sequence)
        if newest - progress.cached >= MOST_ROWS:
            self.follow(sequence, newest)
        # The newest token is computed, if need be again, for the logits after it.
        progress.cached = min(progress.cached, newest)
        progress.sampler.reset()  # it has seen drafted tokens that were rejected
        ids, start = list(sequence.token_ids), progress.cached
        return DraftJob(ids[start:], start, progress.block_table, count, ids, progress.sampler)

    def _progress(self, sequence: Sequence) -> Progress:
        """The sequence's progress, updated by its last draft's accepted tokens; a new one if its blocks are new."""
        progress = self._progresses.get(sequence)
        if progress is None or progress.block_table is not sequence.block_tables[0]:
            same = progress is not None and progress.sampler.stream == sequence.sampler.stream
            sampler = progress.sampler if progress is not None and same else self._sampler(sequence)
            progress = self._progresses[sequence] = Progress(sequence.block_tables[0], sampler)
            self._share(progress, sequence)
            return progress
        taken = 0
        for token, drafted in zip(sequence.token_ids[progress.cached :], progress.ahead[:-1], strict=False):
            if token != drafted:
                break
            taken += 1
        progress.ahead = ()
        self._confirm(progress, sequence, taken)
        return progress

    def _sampler(self, sequence: Sequence) -> Sampler:
        """A sampler like the sequence's, but without log-probabilities, constraint and token ids that only the target
        has."""
        params, vocab = sequence.params, self._runner.decoder.config.vocab_size
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab}
        plain: SamplingParams = replace(
            params.plain(),
            logit_bias=bias,
            logprobs=None,
            constraint=None,
            stop_token_ids=(),
            seed=sequence.sampler.seed,
        )
        return Sampler(plain, vocab, sequence.sampler.stream)

    def _share(self, progress: Progress, sequence: Sequence) -> None:
        """Reuses the leading blocks that already hold these tokens."""
        for index, number in enumerate(progress.block_table[: len(sequence.token_ids) // BLOCK_SIZE]):
            key = _key(progress.keys, sequence, index)
            if self._contents.get(number) != key:
                return
            progress.keys.append(key)
            progress.cached += BLOCK_SIZE

    def _wrote(self, progress: Progress, start: int, count: int) -> None:
        """Drops the keys of the blocks of these rows, which have been overwritten."""
        for index in range(start // BLOCK_SIZE, (start + count - 1) // BLOCK_SIZE + 1):
            self._contents.pop(progress.block_table[index], None)

    def _confirm(self, progress: Progress, sequence: Sequence, count: int) -> None:
        """Notes that `count` more rows hold the sequence's own tokens."""
        progress.cached += count
        while (len(progress.keys) + 1) * BLOCK_SIZE <= progress.cached:
            index = len(progress.keys)
            progress.keys.append(_key(progress.keys, sequence, index))
            self._contents[progress.block_table[index]] = progress.keys[index]


def _key(before: list[int], sequence: Sequence, index: int) -> int:
    """A key of a block's tokens and all tokens before it. A collision would only make drafts worse."""
    own = tuple(sequence.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
    return hash((before[index - 1] if index else 0, own))
