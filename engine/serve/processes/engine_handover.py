"""The handover of a prompt's blocks from the engine that computed it to the one that generates, through shared memory.

A part of a region (shared_region.py) holds consecutive tensors [blocks, BLOCK_SIZE, kv_heads, width], ordered by group
of layers, then layer, then tensor (k, v, and their scales). On a CUDA device the memory is pinned, and is copied on the
device's stream between two steps.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from quengine.block_manager import extend_keys
from quengine.context.saved_prefix import read_blocks, restore_blocks
from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.llm import LLM
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.serve.processes.shared_engine import (
    BlocksReady,
    BlocksTaken,
    Event,
    Finished,
    Piece,
    Prefill,
    Prefilled,
    TakeBlocks,
)
from quengine.serve.processes.shared_region import BlockRegion

logger = logging.getLogger("quengine.serve")

_FULL_SECONDS = 0.001
"""Seconds between two looks for a free part, while there is nothing to compute."""


class SharedBlocks:
    """A region, viewed as tensors of one engine's KV cache."""

    def __init__(self, llm: LLM, descriptor: int) -> None:
        if llm.scheduler.blocks.has_states:
            raise EngineError(
                f"--prefill-replicas: {llm.model_config.architecture} models keep a state, which engines do not hand "
                "over; use --replicas"
            )
        self.region = BlockRegion(descriptor)
        self._llm = llm
        self._bytes = torch.frombuffer(self.region.memory, dtype=torch.uint8)
        if llm.loaded.device.type == "cuda":
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(self._bytes.data_ptr(), self._bytes.nbytes, 0))
            if code:  # not pinned: copies are staged
                logger.warning("memory between engines cannot be pinned: CUDA error %d", code)

    @property
    def blocks_in_part(self) -> int:
        """How many blocks fit a part, each with its keys and values of all groups of layers."""
        layers = self._llm.scheduler.cache.layers
        size = sum(
            prod((BLOCK_SIZE, *tensor.shape[1:])) * tensor.element_size()
            for layer in layers
            for tensor in layer.tensors
        )
        return self.region.part_bytes // size

    def views(self, part: int, held: Seq[Seq[int]]) -> Iterator[tuple[int, Tensor]]:
        """(layer, view of one of its tensors) for each tensor in a part with the blocks `held` of each group."""
        start, layers = self.region.start(part), self._llm.scheduler.cache.layers
        for group, indices in zip(self._llm.model_config.cache_groups, held, strict=True):
            for layer in group.layers:
                for tensor in layers[layer].tensors:
                    shape = (len(indices), BLOCK_SIZE, *tensor.shape[1:])
                    end = start + prod(shape) * tensor.element_size()
                    yield layer, self._bytes[start:end].view(tensor.dtype).view(shape)
                    start = end


@dataclass(eq=False)
class _Prompt:
    """A prompt that is computed for another engine. `next`: the first block that is not handed over yet."""

    sequence: Sequence
    next: int
    began: float
    computed: bool = False
    keys: list[bytes] = field(default_factory=list)


class BlockSender:
    """Hands over blocks, in the engine that computes prompts. All of it is called between two steps."""

    def __init__(self, llm: LLM, shared: SharedBlocks) -> None:
        self._llm = llm
        self._shared = shared
        self._prompts: dict[int, _Prompt] = {}

    def sequence(self, request: Prefill) -> Sequence:
        """The sequence of a prompt, which generates no tokens. Raises EngineError where it cannot be computed."""
        params = SamplingParams(temperature=0, max_tokens=0, ignore_eos=True)
        sequence = self._llm.stream(request.prompt, params).sequence
        prompt = _Prompt(sequence, request.first, time.perf_counter())
        extend_keys(prompt.keys, request.prompt)
        self._prompts[request.id] = prompt
        return sequence

    def cancel(self, request_id: int) -> None:
        self._prompts.pop(request_id, None)

    def after_step(self, events: list[Event]) -> list[Event]:
        """The events of a step, in which those of prompts are replaced by the events of their blocks."""
        kept: list[Event] = []
        for event in events:
            prompt = self._prompts.get(event.request_id)
            if prompt is None or not isinstance(event, Piece | Finished):
                self._prompts.pop(event.request_id, None)
                kept.append(event)
            elif isinstance(event, Finished):
                prompt.computed = True
        before = len(kept)
        for request_id, prompt in list(self._prompts.items()):
            kept += self._hand_over(request_id, prompt)
        if len(kept) == before and self._prompts and not self._llm.scheduler.sequences:
            time.sleep(_FULL_SECONDS)
        return kept

    def _hand_over(self, request_id: int, prompt: _Prompt) -> Iterator[Event]:
        tokens = len(prompt.sequence.token_ids) if prompt.computed else prompt.sequence.num_cached_tokens
        end = min(tokens // BLOCK_SIZE, len(prompt.keys))
        while prompt.next < end:
            blocks = self._held(prompt, min(end, prompt.next + self._shared.blocks_in_part))
            if not any(blocks):  # other prompts have evicted them: the other engine computes them
                prompt.next = end
                break
            if (part := self._shared.region.take()) is None:
                return
            yield self._write(request_id, prompt, part, blocks)
        if prompt.computed:
            del self._prompts[request_id]
            seconds = time.perf_counter() - prompt.began
            yield Prefilled(request_id, prompt.sequence.reused_tokens, seconds)

    def _held(self, prompt: _Prompt, end: int) -> list[dict[int, int]]:
        """The blocks from `prompt.next` up to `end` in the cache: for each group, index in the prompt -> block."""
        held = self._llm.scheduler.blocks.held(prompt.keys[:end])
        return [{i: number for i, number in blocks.items() if i >= prompt.next} for blocks in held]

    def _write(
        self, request_id: int, prompt: _Prompt, part: int, blocks: Seq[Mapping[int, int]]
    ) -> BlocksReady:
        held = [list(of_group) for of_group in blocks]
        for (_, view), (_, values) in zip(
            self._shared.views(part, held),
            read_blocks(self._llm.scheduler, self._llm.model_config, blocks),
            strict=True,
        ):
            view.copy_(values, non_blocking=True)
        if (device := self._llm.loaded.device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        prompt.next = 1 + max(index for indices in held for index in indices)
        return BlocksReady(request_id, part, prompt.next, held)


class BlockReceiver:
    """Takes over blocks, in the engine that generates. All of it is called between two steps."""

    def __init__(self, llm: LLM, regions: Seq[SharedBlocks]) -> None:
        self._llm = llm
        self._regions = regions
        self._copied: list[tuple[int, torch.cuda.Event | None]] = []

    def take(self, request: TakeBlocks) -> None:
        """Copies blocks into the cache as far as there is room. This engine computes the rest again."""
        keys = [request.keys[start : start + 32] for start in range(0, len(request.keys), 32)]
        layers = [list[Tensor]() for _ in self._llm.scheduler.cache.layers]
        for layer, view in self._regions[request.region].views(request.part, request.held):
            layers[layer].append(view)
        try:
            restore_blocks(self._llm.scheduler, self._llm.model_config, keys, request.held, layers)
        except EngineError as error:
            logger.info("blocks of a prompt are not taken: %s", error)
        done = None
        if self._llm.loaded.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._llm.loaded.device))
        self._copied.append((request.id, done))

    def events(self, alone: bool) -> list[Event]:
        """The events of finished copies. `alone`: the engine has nothing to compute, so this waits for all copies."""
        ended = list[Event]()
        for request_id, done in list(self._copied):
            if done is not None and alone:
                done.synchronize()
            if done is None or done.query():  # type: ignore[no-untyped-call]
                self._copied.remove((request_id, done))
                ended.append(BlocksTaken(request_id))
        return ended
