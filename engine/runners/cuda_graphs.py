"""The steps of a model on a CUDA device, captured or not: decode steps with sampling, and steps of prompts.

A graph is found by its key (graph_keys.py). All graphs read one set of static inputs (static_inputs.py) and share one
memory pool, since they run one after another; results for the host are copied, or read, before the next one runs.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quengine.config import BACKLOG_CHUNK, MIXED_CHUNK
from quengine.kernels.cuda.backend import CudaBackend, has_dependent_launch
from quengine.kernels.cuda.launch.compile_ahead import finish_compiling
from quengine.kernels.cuda.sampling.batch_rows import ChosenTokens, place_rows, take_drafts
from quengine.kernels.cuda.sampling.sampling import (
    DecodeState,
    SamplingBuffers,
    SamplingSettings,
    sample_step,
)
from quengine.kernels.cuda.sampling.sampling_state import send
from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.kv.cache_types import PADDING_BLOCK, blocks_for
from quengine.kernels.lora.adapted import Adapted
from quengine.kernels.moe.host_experts import FollowedExperts
from quengine.kernels.phase import Phase
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.parallel.wire import (
    Capture,
    Configure,
    LaunchDecode,
    PlannedStep,
    Prompts,
    SetAdapters,
    Together,
    alone,
)
from quengine.request.adapter_scales import Scales
from quengine.request.sampling_params import SamplingParams
from quengine.runners.graph_capture import CapturedStep, FollowedGraph, capture_step
from quengine.runners.graph_keys import (
    CAPTURED_AT,
    MOST_PADDING,
    UNMOVED_ROWS,
    WHOLE_CAPTURED_AT,
    WHOLE_CHUNK,
    GraphKey,
    SamplingKind,
    biased_keys,
    decode_key,
    decode_keys,
    expected_keys,
    padded_rows,
    prefill_key,
    rarer_keys,
    sharing_keys,
)
from quengine.runners.image_rows import angles_of_step, embeds_of
from quengine.runners.static_inputs import DecodeInputs, PrefillInputs, PromptEnds
from quengine.sampler import Sampler
from quengine.slot import Slot
from quengine.step_plan import TOKENS_ALONE, GivenRows, SequenceRows, forward_batch

PENDING = 4
"""Default for the most decode steps in flight, whose tokens have not been read yet."""

_ONE_SEQUENCE = 8
"""Rows of a decode step that one sequence usually has with drafts."""


LaunchedStep: TypeAlias = tuple[Tensor, torch.cuda.Event, dict[int, Tensor]]
"""`tokens`, `arrived` and `logits` of a step, as `StepPlan` has them."""


class CudaGraphs:
    """`model_runner.StepGraphs` of a decoder on a CudaBackend.

    Args:
        rows: most rows of a decode step.
        prefill_tokens: most prompt tokens in a step.
        shares_sequences: whether there are decode steps in which a sequence may have several rows.
        pending: most steps of a phase in flight, whose tokens have not been read yet.
        capture: `graph_capture.capture_step`.
        slots: most sequences that run at once; None: one for each row.
        takes_embeds: whether rows of captured prefill steps may be given as embeddings.
        adapted: whether rows may have the LoRA adapters of the backend's weights.

    `drafted`: `history` of the graphs of a model that drafts for this one, set before a step is captured; None: the
    host gives all drafts.
    """

    captured_at = CAPTURED_AT

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: int,
        prefill_tokens: int = 0,
        shares_sequences: bool = False,
        pending: int = PENDING,
        capture: Callable[[Callable[[], Tensor], Callable[[], Tensor], Any], CapturedStep] = capture_step,
        slots: int | None = None,
        takes_embeds: bool = False,
        adapted: bool = True,
    ) -> None:
        assert isinstance(decoder.backend, CudaBackend)
        device = decoder.backend.device
        self.decoder, self.cache, self.rows = decoder, cache, padded_rows(rows)
        self.prefill_tokens = max(prefill_tokens, self.longest_chunk)
        self.shares_sequences = shares_sequences
        slots = self.rows if slots is None else slots
        turns = takes_embeds and bool(decoder.config.rope_axes)
        backend = decoder.backend
        self.adapters = backend.adapter_count if adapted and isinstance(backend, Adapted) else 0
        self.inputs = DecodeInputs(
            self.rows, slots, blocks_for(cache.ctx_size), len(cache.pools), device, turns, self.adapters
        )
        self.prompts = PrefillInputs(
            cache.ctx_size,
            decoder.chunk_size,
            decoder.backend.batch_invariant,
            len(cache.pools),
            device,
            decoder.config.embedding_length if takes_embeds else 0,
            turns,
            self.adapters,
            self.whole_chunks,
        )
        self._takes_embeds = takes_embeds
        held = len(self.inputs.of_slots.tokens)
        self._history = torch.zeros(held, cache.ctx_size, dtype=torch.int32, device=device)
        self._chosen = ChosenTokens.allocate(pending, self.inputs.rows, device)
        self._ends = PromptEnds(slots, pending, device)
        events = range(0 if device.type == "meta" else pending)
        self._events = [torch.cuda.Event() for _ in events]  # type: ignore[no-untyped-call]
        self._prompt_events = [torch.cuda.Event() for _ in events]  # type: ignore[no-untyped-call]
        self._launched = self._launched_prompts = 0
        self._sampling: dict[SamplingKind, SamplingBuffers] = {}
        self._steps: dict[GraphKey, CapturedStep] = {}
        self._seen: Counter[GraphKey] = Counter()
        self._padding: Counter[GraphKey] = Counter()
        self._capture_step = capture
        self._pool: Any = None
        self._backend = decoder.backend
        self._moves = -1
        self.drafted: Tensor | None = None
        self.together: Together = alone
        self.kernels_per_step: int | None = None

    @property
    def longest_chunk(self) -> int:
        """The most tokens of one prompt in a step."""
        return min(self.cache.ctx_size, self.decoder.chunk_size)

    @property
    def whole_chunks(self) -> bool:
        """Whether nearly whole chunks of one prompt are captured: where ranks share the model."""
        return self.decoder.config.ranks > 1

    @property
    def history(self) -> Tensor:
        """int32 [slots, context], the tokens that steps have sampled for each slot, by position."""
        return self._history

    @property
    def keys(self) -> list[GraphKey]:
        """The keys of the steps of ordinary requests, largest first."""
        mixed = (MIXED_CHUNK["cuda"],) if self.rows == 1 else (MIXED_CHUNK["cuda"], BACKLOG_CHUNK["cuda"])
        chunk, whole = self.decoder.chunk_size, self.whole_chunks
        keys = expected_keys(self._plain_rows, chunk, *mixed, whole_chunks=whole)
        if self.shares_sequences:
            keys += sharing_keys(expected_keys(self.rows, 0))
        return [key for key in self._with_adapters(keys) if self._captures(key)]

    def _with_adapters(self, keys: list[GraphKey]) -> list[GraphKey]:
        """These keys, and those of the same steps with adapters, where the model has some."""
        return keys + [key._replace(adapted=True) for key in keys] if self.adapters else keys

    @property
    def _plain_rows(self) -> int:
        """Rows of the largest decode step in which each sequence has one."""
        slots = self.inputs.slots
        return self.rows if slots >= self.rows else padded_rows(slots)

    @property
    def captured(self) -> list[GraphKey]:
        return list(self._steps)

    def lookup(
        self, phase: Phase, rows: Seq[SequenceRows], embeds: EmbeddedRows | None = None
    ) -> GraphKey | None:
        """The captured step for prompts' chunks; None if they are to be computed eagerly.

        Decode steps are run by `launch`.
        """
        lengths = [len(part.ids) for part in rows]
        key = prefill_key(lengths, self.whole_chunks) if phase == "prefill" else None
        if key is not None and any(part.adapters is not None for part in rows):
            key = key._replace(adapted=True)
        takes = embeds is None or (self._takes_embeds and embeds.later is None and not embeds.spans)
        if key is None or not takes or not self._captures(key):
            return None
        step = self._or_larger(key)
        often = WHOLE_CAPTURED_AT if key.rows == WHOLE_CHUNK else CAPTURED_AT
        return step if step in self._steps or self._seen[key] >= often else None

    def replay(
        self,
        key: GraphKey,
        rows: Seq[SequenceRows],
        embeds: EmbeddedRows | None = None,
        angles: Seq[int] | None = None,
    ) -> Tensor:
        """Logits fp32 [sequences, vocab] after the last row of each of these sequences; valid until the next step."""
        step = self.capture(key)
        self.prompts.send(key, rows, embeds, angles)
        step.graph.replay()
        return step.logits[: len(rows)]

    @torch.no_grad()
    def prefill(
        self,
        rows: Seq[SequenceRows],
        slots: Seq[int],
        kind: SamplingKind,
        on_host: Seq[int] = (),
        given: GivenRows = TOKENS_ALONE,
        configure: Callable[[], None] = lambda: None,
    ) -> LaunchedStep:
        """Starts a step of prompts' chunks, captured or not, and samples after their last rows; returns without
        waiting.

        slots: for each chunk the slot that takes its token; `inputs.slots`: none. If no slot takes a token, there is
        none to wait for. configure: sets the slots' sampling for `kind`. It is called while the device computes the
        rows, or before them if there are other ranks, which sample in the same step. on_host: the chunks after which
        the host samples. given: rows that images give.
        """
        number = self._launched_prompts % len(self._prompt_events)
        self._launched_prompts += 1
        if self.together is not alone:
            configure()
        step = PlannedStep("prefill", rows, "tokens", slots=slots, kind=kind)
        with self.together(step.giving(given, self.decoder.config.embedding_length)):
            angles = angles_of_step(self.decoder, self.cache.ctx_size, rows, given)
            embeds = embeds_of(self.decoder, given)
            key = self.lookup("prefill", rows, embeds)
            if key is None:
                batch = forward_batch("prefill", rows, self._backend.device, False, embeds, angles)
                logits = self.decoder.forward(batch, self.cache.layers)
            else:
                logits = self.replay(key, rows, embeds, angles)
            if self.together is alone:
                configure()
            if any(slot != self.inputs.slots for slot in slots):
                self._ends.send(slots, [part.end - 1 for part in rows], number)
                self._sample_ends(logits, kind)
        kept = _copies(logits, on_host)
        self._prompt_events[number].record()
        return self._ends.chosen.tokens[number], self._prompt_events[number], kept

    @torch.no_grad()
    def launch(
        self,
        slots: list[Slot],
        given: Mapping[int, SequenceRows],
        kind: SamplingKind,
        on_host: Seq[int] = (),
    ) -> LaunchedStep:
        """Starts a decode step of these slots, in the smallest captured step that holds its rows; returns without
        waiting. given: as in `static_inputs.step_rows`; a slot then has one row or more. on_host: the rows after which
        the host samples.

        The slots' block tables have been set in `inputs`, and their sampling for `kind` by `configure`.
        """
        rows = self.inputs.set_rows(slots, given)
        key = decode_key(padded_rows(rows), kind, rows > len(slots))
        if self.adapters and any(slot.adapted for slot in slots):
            key = key._replace(adapted=True)
        with self.together(LaunchDecode(key, self.inputs.changes)):
            step = self.decode_step(key)
            self.inputs.send()
            step.graph.replay()
        number = self._launched % len(self._events)
        self._launched += 1
        kept = _copies(step.logits, on_host)
        self._events[number].record()
        return self._chosen.tokens[number], self._events[number], kept

    def decode_step(self, key: GraphKey) -> CapturedStep:
        """The captured step that computes a decode step of this key, captured now if missing."""
        key = self._or_larger(key)
        step = self._steps.get(key)
        if step is None or key.rows > UNMOVED_ROWS:
            step = self.capture(key)
        self.kernels_per_step = step.kernels
        return step

    def configure(
        self,
        slot: int,
        kind: SamplingKind,
        params: SamplingParams,
        sampler: Sampler,
        ids: list[int],
        in_flight: int = 0,
    ) -> None:
        """Sets the sampling of a slot in steps of `kind`, with the seed of `sampler`. `ids`: the slot's tokens, to
        which steps in flight add `in_flight` more.
        """
        settings, bias = settings_of(params, sampler), dict(params.logit_bias)
        counted, total = (ids, len(ids) + in_flight) if params.penalizes else ([], 0)
        with self.together(Configure(slot, kind, vars(settings), bias, counted, total)):
            self.set_sampling(slot, kind, settings, bias, counted, total)

    def set_adapters(self, slot: int, scales: Scales | None) -> None:
        """Sets the scales of a slot's LoRA adapters."""
        if scales is not None or self.inputs.has_adapters(slot):
            with self.together(SetAdapters(slot, scales)):
                self.inputs.set_adapters(slot, scales)

    def set_sampling(
        self,
        slot: int,
        kind: SamplingKind,
        settings: SamplingSettings,
        bias: dict[int, float],
        ids: list[int],
        total: int,
    ) -> None:
        """Sets the sampling of a slot in steps of `kind`. `ids`: the slot's known tokens, or none if no penalty counts
        them. `total`: the tokens in its history; those after `ids` are sampled on the device.
        """
        history = self._history[slot, :total]
        if ids:
            send(ids, history[: len(ids)])
        self.sampling_buffers(kind).set(slot, settings, history, bias)

    @torch.no_grad()
    def capture(self, key: GraphKey) -> CapturedStep:
        """The captured step of a key, captured now if missing."""
        if key.phase == "prefill" or key.rows > UNMOVED_ROWS:
            self._drop_stale()
        step = self._steps.get(key)
        if step is None:
            # Torch frees the memory of a pool without graphs, also once it is used again.
            if self._history.is_cuda and (self._pool is None or not self._steps):
                self._pool = torch.cuda.graph_pool_handle()
            if key.sampling is not None:
                self.sampling_buffers(key.sampling)  # outside the capture: graphs of other sizes share them
            step = self._captured(key)
            self._drop_stale()
            self._steps[key] = step
        return step

    def _captured(self, key: GraphKey) -> CapturedStep:
        """Captures a step; where experts are in host memory, with the CPU's part of it."""
        host, launches = self.decoder.host_experts, list[Any]()
        if host is None:
            return self._capture_step(lambda: self.run_padding(key), lambda: self._run(key), self._pool)
        assert isinstance(host, FollowedExperts)

        def recorded() -> Tensor:
            with host.recording() as made:
                logits = self._run(key)
            launches.extend(made)
            return logits

        step = self._capture_step(lambda: self.run_padding(key), recorded, self._pool)
        return replace(step, graph=FollowedGraph(host.followed(step.graph.replay, launches)))

    def warm_up(self, params: SamplingParams | None = None) -> None:
        """Captures the steps of ordinary requests; with `params`, only decode steps of one sequence with
        these settings.
        """
        if params is not None:
            keys = decode_keys(1, params)
            if self.shares_sequences:
                keys += sharing_keys(decode_keys(min(_ONE_SEQUENCE, self.rows), params))
            keys = self._with_adapters(keys)
        else:
            keys = self.keys
            finish_compiling()  # the processors are then free for what is timed next
            lengths = self.lengths_of(self.prefill_tokens)
            with self.together(Prompts(lengths)):
                self.run_prompts(lengths)  # allocates the most memory that is ever needed
        for key in keys:
            with self.together(Capture(key)):
                self.capture(key)

    def release(self) -> None:
        """Destroys the graphs: NCCL's communicator, which some use, cannot end before they do."""
        self._steps.clear()

    def capture_next(self) -> bool:
        """Captures one more step of rarer requests; False if none is left."""
        keys = rarer_keys(self._plain_rows, self.prefill_tokens) if self.rows > 1 else []
        if self.shares_sequences:
            keys += sharing_keys(biased_keys(self.rows))
        key = next((each for each in keys if each not in self._steps and self._captures(each)), None)
        if key is not None:
            with self.together(Capture(key)):
                self.capture(key)
        return key is not None

    def lengths_of(self, tokens: int) -> list[int]:
        """Lengths of the fewest chunks that make a step of `tokens` tokens."""
        whole, rest = divmod(tokens, self.longest_chunk)
        return [self.longest_chunk] * whole + [rest] * (rest > 0)

    @torch.no_grad()
    def run_prompts(self, lengths: Seq[int]) -> None:
        """Runs a step of prompts of these lengths, eagerly; it writes only to the padding block."""
        tables = [[PADDING_BLOCK] * blocks_for(max(lengths))] * len(self.cache.pools)
        rows = [SequenceRows([0] * length, 0, tables) for length in lengths]
        self.decoder.forward(forward_batch("prefill", rows, self.decoder.backend.device), self.cache.layers)

    @torch.no_grad()
    def run_padding(self, key: GraphKey) -> Tensor:
        """Runs a step of padding rows, uncaptured: compiles its kernels, and writes only to the padding block."""
        if key.sampling is None:
            self.prompts.send(key, [])
            return self._run(key)
        device = self._history.device
        turns = self.inputs.turns
        blocks, groups = self.inputs.blocks, self.inputs.groups
        inputs = DecodeInputs(key.rows, 1, blocks, groups, device, turns, self.adapters)
        held = len(inputs.of_slots.tokens)
        history = torch.zeros(held, self._history.shape[1], dtype=torch.int32, device=device)
        chosen = ChosenTokens.allocate(self._chosen.tokens.shape[0], inputs.rows, device)
        buffers = self._new_buffers(key.sampling, max(held, inputs.rows))
        return self._decode(key, inputs, history, buffers, chosen)

    def _or_larger(self, key: GraphKey) -> GraphKey:
        """The step to run for `key`: a larger captured one if the padding is affordable, see MOST_PADDING. A
        step of one sequence is not padded, so that a sequence alone always uses the same kernels.
        """
        if key in self._steps:
            return key
        self._seen[key] += 1
        if key.sequences == 1:
            return key
        larger = min((each for each in self._steps if each.holds(key) and self._captures(each)), default=key)
        self._padding[key] += larger.rows - key.rows
        return larger if self._padding[key] <= MOST_PADDING else key

    def _captures(self, key: GraphKey) -> bool:
        """Whether a step may be captured.

        Ranks capture and drop steps together. Ranks with different layers may replace buffers at different times, so
        they capture only steps that are never dropped. Prefill steps are not captured where layers attend within chunks
        of positions, since the host cuts a prompt's rows (`ForwardBatch.with_chunks`), or with experts in host memory,
        where a prompt takes so long that its launches do not matter.
        """
        if key.phase == "prefill" and (self.decoder.chunk or self.decoder.host_experts is not None):
            return False
        stays = key.phase == "decode" and key.rows <= UNMOVED_ROWS
        return stays or self.decoder.config.stage is None

    def _run(self, key: GraphKey) -> Tensor:
        if key.sampling is None:
            return self.decoder.forward(self.prompts.batch(key), self.cache.layers)
        buffers = self.sampling_buffers(key.sampling)
        return self._decode(key, self.inputs, self._history, buffers, self._chosen)

    def _decode(
        self,
        key: GraphKey,
        inputs: DecodeInputs,
        history: Tensor,
        buffers: SamplingBuffers,
        chosen: ChosenTokens,
    ) -> Tensor:
        """Logits fp32 [rows, vocab] of the first rows; the tokens are stored in `chosen`."""
        rows, step, slots = key.rows, inputs.step, inputs.of_slots
        batch = inputs.batch(rows, key.shares, key.adapted)
        pdl = has_dependent_launch(batch.device)
        if self.drafted is not None and key.shares:
            take_drafts(step, self.drafted, rows, pdl)
        place_rows(step, slots, inputs.placed, chosen, rows, pdl)
        inputs.turn(rows)
        logits = self.decoder.forward(batch, self.cache.layers)
        state = DecodeState(
            slots.tokens, slots.positions, history, step.slots, step.targets, inputs.placed.positions, chosen
        )
        sample_step(logits, state, buffers, pdl)
        return logits

    def _sample_ends(self, logits: Tensor, kind: SamplingKind) -> None:
        """Samples after the rows that `_ends` has."""
        held, ends = self.inputs.of_slots, self._ends
        taking = (ends.slots, ends.slots, ends.positions)
        state = DecodeState(held.tokens, held.positions, self._history, *taking, ends.chosen)
        sample_step(logits, state, self.sampling_buffers(kind), has_dependent_launch(logits.device))

    def sampling_buffers(self, kind: SamplingKind) -> SamplingBuffers:
        if kind not in self._sampling:
            self._sampling[kind] = self._new_buffers(kind, max(len(self._history), self.inputs.rows))
        return self._sampling[kind]

    def _new_buffers(self, kind: SamplingKind, rows: int) -> SamplingBuffers:
        vocab, device = self.decoder.config.vocab_size, self._history.device
        return SamplingBuffers.allocate(rows, vocab, kind.top_k, device, kind.bias, kind.penalties)

    def _drop_stale(self) -> None:
        """Drops steps captured with memory that the backend has since replaced by a larger allocation."""
        moves = self._backend.rooms_left
        if moves != self._moves:
            self._moves = moves
            self._steps = {
                key: step
                for key, step in self._steps.items()
                if key.phase == "decode" and key.rows <= UNMOVED_ROWS
            }


def _copies(logits: Tensor, rows: Seq[int]) -> dict[int, Tensor]:
    """Copies of these rows of logits for the host, in stream order, before the next step is launched."""
    return {row: logits[row].to("cpu", non_blocking=True, copy=True) for row in rows}


def settings_of(params: SamplingParams, sampler: Sampler) -> SamplingSettings:
    """A sequence's sampling settings in the device's form."""
    return SamplingSettings(
        temperature=params.temperature,
        top_k=1 if params.greedy else params.top_k,
        typical_p=params.typical_p,
        top_p=params.top_p,
        min_p=params.min_p,
        repeat=params.repeat_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repeat_last_n=params.repeat_last_n,
        seed=sampler.seed,
        stream=sampler.stream,
    )
