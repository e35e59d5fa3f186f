"""Runs steps: the decoder on a batch, over the cache, and the sampling of the next tokens."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from quengine.block_pool import BlockCopy
from quengine.errors import EngineError
from quengine.kernels import sampling
from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.moe.host_experts import FollowedExperts
from quengine.kernels.phase import Phase
from quengine.kernels.sampling import Choose
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.parallel.wire import CopyBlocks, Message, PlannedStep, Together, alone
from quengine.platform.ranges import ProfilerRange
from quengine.request.adapter_scales import Scales
from quengine.request.pooling import RANK
from quengine.request.prompt_images import PromptImages
from quengine.request.prompt_scores import split_rows
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.runners.graph_keys import GraphKey
from quengine.runners.image_rows import angles_of_step, embeds_of
from quengine.runners.state_copies import copies_before
from quengine.sampler import Result
from quengine.slot import Slot
from quengine.step_plan import (
    TOKENS_ALONE,
    GivenRows,
    SequenceRows,
    StepPlan,
    forward_batch,
    given_rows,
    scored_rows,
)

if TYPE_CHECKING:
    from quengine.parallel.group import RankGroup
    from quengine.parallel.observed_inputs import ObservedInputs
    from quengine.runners.device_decode import DeviceDecoder

_NAMES: dict[Phase, str] = {"prefill": "prefill", "decode": "decode step"}
"""Names of the ranges of a profile, by phase."""


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

    def lookup(
        self, phase: Phase, rows: Seq[SequenceRows], embeds: EmbeddedRows | None = None
    ) -> GraphKey | None:
        """The key of the captured step for these rows; None if they are to be computed eagerly."""
        ...

    def replay(
        self,
        key: GraphKey,
        rows: Seq[SequenceRows],
        embeds: EmbeddedRows | None = None,
        angles: Seq[int] | None = None,
    ) -> Tensor:
        """The logits that `Decoder.forward` returns for these rows; valid until the next step. angles: as
        `step_plan.angle_rows`."""
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


class ModelRunner:
    """Runs a decoder over its cache.

    Attributes:
        ranks: the group of which this runner is rank 0; None on the other ranks, and without ranks.
        observed: on the other ranks, the inputs that their matrices read.
        adapters: the scales of LoRA adapters for rows that belong to no sequence (`logits`).

    Args:
        decoder, cache: decoder and KV cache of one model.
        graphs: captured steps; None: every step is computed eagerly.
        device_decoder: steps that sample on the device; None: tokens are sampled on the host.
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
        self.observed: ObservedInputs | None = None
        self.adapters: Scales | None = None
        self._has_states = any(pool.is_state for pool in cache.pools)

    def lead(self, ranks: "RankGroup") -> None:
        """Makes this the runner of rank 0, which sends every step to the other ranks of the group."""
        self.ranks = ranks
        if self.graphs is not None:
            self.graphs.together = ranks.together

    def release(self) -> None:
        """Releases the captured steps, the weights and the cache: no step can be computed any more. Other ranks leave
        the group."""
        if self.graphs is not None:
            self.graphs.release()
        if self.ranks is not None:
            self.ranks.close()
        if isinstance(self.decoder.host_experts, FollowedExperts):
            self.decoder.host_experts.close()
        self.graphs = self.device_decoder = None
        del self.decoder, self.cache

    def launch(self, plan: StepPlan, on_host: bool = False) -> StepPlan:
        """Launches a step and returns it with its results; on a CUDA device it does not wait for them. `on_host`:
        tokens are sampled on the host. The block tables cover the rows.

        A decode step adds one more token of each sequence to the cache: its first one that is neither in the cache nor
        in a step in flight. If that is its newest token, the result is a Sample of the next one. If generated tokens
        are being recomputed, it is an earlier one (`next_is_newest` is false), and the result is None. The tokens of
        its `draft` are further rows, computed as if they had been generated, and the result is then Verified. Tokens
        that the states lack (`Sequence.replay`) are rows before it, whose results are not used.

        A prefill step computes chunks of prompts; the generated tokens of a preempted sequence belong to its prompt. It
        samples after the chunks that end with their sequence's newest token.

        A sequence fails alone: its result is then the exception, an EngineError if its logits are not finite. An
        exception that is raised concerns all rows: no sequence has advanced, and fewer rows may be tried again.
        """
        if self.decoder.host_experts is not None:
            rows = sum(len(chunk.ids) for chunk in plan.chunks)
            self.decoder.host_experts.between_steps(rows or len(plan.sequences))
        if plan.phase == "prefill":
            plan.outcome = self._pooled_or_scored(plan)
            if plan.outcome is not None:
                return plan
        elif self._has_states:
            self._keep_states(plan)
        given, device = plan.given, self.device_decoder
        if device is not None and not on_host:
            with ProfilerRange(f"launch {_NAMES[plan.phase]}"):
                if plan.phase == "prefill":
                    device.launch_prompts(plan, given)
                    return plan
                if device.launch(plan):
                    return plan
        with ProfilerRange(_NAMES[plan.phase]):
            logits = self.forward(plan.phase, plan.rows, given=given).float().cpu()
        plan.sampled, plan.logits = plan.sampled_rows, dict(enumerate(logits))
        return plan

    def _pooled_or_scored(self, plan: StepPlan) -> list[Result] | None:
        """The results of a step of prompts that are pooled or scored; None for others."""
        pairs = list(zip(plan.sequences, plan.chunks, strict=True))
        if any(sequence.pool is not None for sequence, _ in pairs):
            return [self._embed(sequence, chunk) for sequence, chunk in pairs]
        return self._score(plan) if any(scored_rows(*pair) for pair in pairs) else None

    @torch.no_grad()
    def forward(
        self,
        phase: Phase,
        rows: Seq[SequenceRows],
        all_logits: bool = False,
        eager: bool = False,
        given: GivenRows = TOKENS_ALONE,
    ) -> Tensor:
        """Logits of these rows, in the backend's dtype and on its device; valid until the next step.

        In prefill [sequences, vocab], after each sequence's last row, or with `all_logits` [T, vocab]; in decode
        always [T, vocab]. `eager`: use no captured step. `given`: rows of a prefill step given as embeddings.
        """
        output: Literal["last logits", "all logits"] = "all logits" if all_logits else "last logits"
        step = PlannedStep(phase, rows, output, eager=eager)
        with self.together(step.giving(given, self.decoder.config.embedding_length)):
            embeds, angles = self._given(rows, given)
            graphs = self.graphs
            if graphs is not None and not all_logits and not eager:
                key = graphs.lookup(phase, rows, embeds)
                if key is not None:
                    return graphs.replay(key, rows, embeds, angles)
            batch = forward_batch(phase, rows, self.decoder.backend.device, all_logits, embeds, angles)
            return self.decoder.forward(batch, self.cache.layers)

    def _given(
        self, rows: Seq[SequenceRows], given: GivenRows
    ) -> tuple[EmbeddedRows | None, list[int] | None]:
        """The rows of a step that are given as embeddings, and the positions by which all rows are rotated."""
        angles = angles_of_step(self.decoder, self.cache.ctx_size, rows, given)
        return embeds_of(self.decoder, given), angles

    @torch.no_grad()
    def hidden(self, rows: Seq[SequenceRows], given: GivenRows = TOKENS_ALONE) -> Tensor:
        """The hidden rows [T, embedding length] of all tokens of these chunks, which the output matrix would read."""
        step = PlannedStep("prefill", rows, "hidden rows")
        with self.together(step.giving(given, self.decoder.config.embedding_length)):
            embeds, angles = self._given(rows, given)
            batch = forward_batch("prefill", rows, self.decoder.backend.device, False, embeds, angles)
            return self.decoder.hidden(batch, self.cache.layers)

    @torch.no_grad()
    def logits_of_parts(
        self, rows: Seq[SequenceRows], parts: Seq[Seq[int]], given: GivenRows = TOKENS_ALONE
    ) -> Iterator[Tensor]:
        """Yields the logits [n, vocab] of each of `parts`, which holds the numbers of n rows of the step. They are
        computed lazily, and the caller must take them all."""
        step = PlannedStep("prefill", rows, "logits of parts", parts=parts)
        with self.together(step.giving(given, self.decoder.config.embedding_length)):
            device = self.decoder.backend.device
            embeds, angles = self._given(rows, given)
            batch = forward_batch("prefill", rows, device, False, embeds, angles)
            tensors = (torch.tensor(part, device=device) for part in parts)
            yield from self.decoder.forward_parts(batch, self.cache.layers, tensors)

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """Copies blocks of the cache, in stream order after the steps launched so far."""
        with self.together(CopyBlocks(copies)):
            self.cache.copy_blocks(copies)

    def together(self, message: Message) -> AbstractContextManager[None]:
        """A block that all ranks compute together: this rank runs its body, the others handle `message`."""
        return alone(message) if self.ranks is None else self.ranks.together(message)

    def warm_up(self, params: SamplingParams | None = None) -> None:
        """Captures the steps that the first requests would otherwise wait for; no step may be in flight.

        params: only the decode steps of one sequence with such settings; None: all steps that ordinary requests use.
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

    def logits(self, ids: Seq[int], start: int, phase: Phase, images: PromptImages | None = None) -> Tensor:
        """Logits [T, vocab] on the host after each of `ids` at positions start, ..., in the cache's first blocks.

        Computed in one prefill step, in which `images` give rows, or in one decode step per token: on CUDA the captured
        one that serves requests. Overwrites what other sequences had in these blocks.
        """
        tables = self.cache.whole_tables
        if phase == "prefill":
            angles = None if images is None else images.angles(start, start + len(ids))
            chunk = SequenceRows(ids, start, tables, angles, self.adapters)
            given = given_rows(images, ids, start)
            return self.forward("prefill", [chunk], all_logits=True, given=given).cpu()
        rows = [
            SequenceRows([token], start + n, tables, adapters=self.adapters) for n, token in enumerate(ids)
        ]
        if self.device_decoder is not None:
            return self.device_decoder.logits(rows)
        return torch.cat([self.forward("decode", [row]).float().cpu().clone() for row in rows])

    def _keep_states(self, plan: StepPlan) -> None:
        """Copies the states that a decode step changes and its drafts may need back."""
        rows = zip(plan.sequences, plan.starts, strict=True)
        copies = [copy for each, at in rows for copy in copies_before(self.cache.pools, each, at)]
        if copies:
            self.copy_blocks(copies)

    def explain(self, plan: StepPlan, sequence: Sequence) -> Result:
        """Recomputes the step of a sequence for which the device found no token, and samples it on the host to get the
        error."""
        sequence.draft = ()
        # Another slot: a step in flight continues from NO_TOKEN, and its result does not count.
        sequence.slot = Slot(sequence.slot.index, sequence.slot.end)
        if plan.phase == "prefill":
            alone = StepPlan.prefill([sequence], [plan.chunks[plan.sequences.index(sequence)]])
        else:
            alone = StepPlan.decode([sequence])
        result = self.launch(alone, on_host=True).results()[0]
        sequence.slot.launched = 0
        return result

    @torch.no_grad()
    def _score(self, plan: StepPlan) -> list[Result]:
        """A prefill of prompts whose tokens are scored: log-probabilities are added to the sequences' `scores`."""
        scored, sampled = _wanted_rows(plan, self.decoder.config.vocab_size)
        # A single row would be multiplied by a decode kernel: doubled, it has the same bits as in any larger part.
        parts = [rows if len(rows) > 1 else 2 * rows for _, rows in scored]
        if sampled:  # by themselves, as without scoring
            parts.append(list(sampled.values()))
        results: dict[Sequence, Result] = dict.fromkeys(plan.sequences)
        with ProfilerRange("prefill"):
            logits = self.logits_of_parts(plan.chunks, parts, plan.given)
            for (sequence, rows), of_rows in zip(scored, logits, strict=False):
                if results[sequence] is None:
                    results[sequence] = _add_scores(sequence, of_rows[: len(rows)])
            rows_left = dict(enumerate(next(logits).float().cpu())) if sampled else {}
            next(logits, None)  # ends the step on all ranks
        for row, sequence in enumerate(sampled):
            if results[sequence] is None:
                results[sequence] = sequence.sampled_after(row, rows_left, ())
        return list(results.values())

    @torch.no_grad()
    def _embed(self, sequence: Sequence, chunk: SequenceRows) -> Result:
        """Computes a chunk of a pooled prompt, and pools its hidden rows; returns the error if they are not finite."""
        assert sequence.pool is not None
        with ProfilerRange("embedding chunk"):
            self.decoder.use_task(sequence.pool.task)
            hidden = self.hidden([chunk])
        try:
            if sequence.pool.pooling == RANK:
                hidden = self.decoder.scores(hidden)[None]
            sequence.pool.add(hidden)
            sequence.pool.projection = self.decoder.projected
        except EngineError as error:
            return error
        return None


def _wanted_rows(
    plan: StepPlan, vocab_size: int
) -> tuple[list[tuple[Sequence, list[int]]], dict[Sequence, int]]:
    """The rows of a prefill step whose logits are needed: those that score prompts, in parts, and the last row of each
    sequence that is sampled."""
    scored, sampled, first = list[tuple[Sequence, list[int]]](), dict[Sequence, int](), 0
    for sequence, chunk, ends in zip(plan.sequences, plan.chunks, plan.sampled_rows, strict=True):
        for part in split_rows(scored_rows(sequence, chunk), vocab_size):
            scored.append((sequence, [first + row for row in part]))
        first += len(chunk.ids)
        if ends is not None:
            sampled[sequence] = first - 1
    return scored, sampled


def _add_scores(sequence: Sequence, logits: Tensor) -> Result:
    """Scores the next tokens of a sequence's prompt; returns the error if that fails."""
    assert sequence.scores is not None
    try:
        sequence.scores.add(logits)
    except EngineError as error:
        return error
    return None
