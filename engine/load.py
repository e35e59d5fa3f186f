"""Loading a model by name: device, backend, context size, decoder, KV cache."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from quengine.block_pool import CachePool
from quengine.config import DEFAULT_CHUNK, EngineConfig
from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.moe.host_experts import FollowedExperts
from quengine.kv_cache import KVCache
from quengine.loading.automatic_drafts import fit_drafts, settle_drafts
from quengine.loading.expert_uses import write_uses
from quengine.loading.load_vision import open_vision, projector_path
from quengine.loading.machine import Machine
from quengine.loading.open_adapters import open_adapters
from quengine.loading.placement import (
    fit_stages,
    free_memory,
    of_rank,
    part_of,
    place_experts,
    rank_count,
    stages_of,
)
from quengine.memory import gib, image_room
from quengine.model_runner import ModelRunner
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.config import Stage
from quengine.models.decoder import Decoder
from quengine.models.hub.hub import resolve_model
from quengine.models.tensor_split import Rank
from quengine.models.tokenizer import Tokenizer
from quengine.platform import early_compiler
from quengine.platform.device import choose_device, device_name, on_device
from quengine.platform.host_experts import ExpertPlacement
from quengine.platform.machine import available_memory, thread_count
from quengine.request.adapter_scales import NO_ADAPTERS, AdapterScales
from quengine.request.image_prompts import Vision
from quengine.speculative.draft_model import DraftModel
from quengine.speculative.load_draft import check_generates, check_shared, open_draft

if TYPE_CHECKING:
    from quengine.parallel.communicator import RankCommunicator
    from quengine.parallel.group import RankGroup
    from quengine.parallel.wire import RankPlan

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its draft model, if any.

    notes: lines for the user about the choices made in loading, and why.
    experts: which experts are in host memory (on a CUDA device).
    ranks: the processes that share the model; None: one process has all of it.
    vision: encodes images into rows of prompts, with the weights of `projector`; None: the model reads text alone.
    kept_images: bytes of the device's memory for encoded images.
    config: the options, with the choices made for drafts.
    adapters: the LoRA adapters and their scales. adapter_bytes: an upper bound of their memory.
    """

    path: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    runner: ModelRunner
    device: torch.device
    threads: int
    load_s: float
    notes: list[str]
    experts: ExpertPlacement
    draft: DraftModel | None = None
    draft_checkpoint: Checkpoint | None = None
    ranks: "RankGroup | None" = None
    vision: Vision | None = None
    projector: Path | None = None
    kept_images: int = 0
    config: EngineConfig = field(default_factory=EngineConfig)
    adapters: AdapterScales = NO_ADAPTERS
    adapter_bytes: int = 0

    @property
    def decoder(self) -> Decoder:
        return self.runner.decoder

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    @property
    def nbytes(self) -> int:
        """Bytes of weights, adapters and caches, the draft model's included."""
        drafts = 0 if self.draft is None else self.draft.cache_bytes
        files = (self.checkpoint, self.draft_checkpoint)
        weights = sum(file.nbytes for file in files if file is not None) + self.adapter_bytes
        return weights + self.cache.nbytes + drafts

    def keep_uses(self) -> None:
        """Keeps how often experts in host memory were used, for the next start."""
        experts = self.decoder.host_experts
        if isinstance(experts, FollowedExperts) and (uses := experts.last_uses) is not None:
            write_uses(self.checkpoint.path, uses)

    def close(self) -> None:
        """Ends the other ranks, releases the weights, cache and captured steps, and unmaps the files."""
        self.keep_uses()
        self.runner.release()
        self.checkpoint.close()
        if self.draft_checkpoint is not None:
            self.draft_checkpoint.close()


def load_model(
    model: str | Path, config: EngineConfig, progress: Callable[[str], None] | None = None
) -> LoadedModel:
    """Resolves, opens, checks and loads a model; `progress` is called with lines about the weights loaded so far.

    Raises:
        EngineError: there is no such model, its file is wrong, or there are more threads than available processors.
        CannotRunError: this machine has no such device, or too little memory.
    """
    began = time.perf_counter()
    threads = thread_count(config.threads)
    path = resolve_model(str(model))
    checkpoint = open_checkpoint(path)
    check_generates(checkpoint)
    _log_checkpoint("model", checkpoint)
    tokenizer = _in_thread(checkpoint.tokenizer)
    draft = open_draft(config, checkpoint)
    if draft is not None:
        _log_checkpoint("draft model", draft)
    device, why = choose_device(of_rank(config, 0))
    config = replace(config, tensor_parallel=rank_count(config, checkpoint, draft, device))
    check_shared(config, draft)
    for rank in range(1, config.ranks):
        choose_device(of_rank(replace(config, device=device.type), rank))
    adapters = open_adapters(config, checkpoint)
    stages = stages_of(config, checkpoint, device)
    part = part_of(checkpoint, stages[0] if stages else Rank(0, config.ranks, config.expert_parallel))
    threads = max(1, threads // config.ranks) if device.type == "cpu" else threads
    torch.set_num_threads(threads)
    vision, sees = open_vision(config, path, checkpoint.config, device)
    if stages and vision is not None and vision.deepstack > len(stages[0].layers):
        raise EngineError(
            f"the projector's rows are added to in the first {vision.deepstack} layers, and the first device has "
            f"{len(stages[0].layers)}: give it more with --tensor-split"
        )
    config, own = settle_drafts(config, checkpoint, device, vision is not None)
    draft = draft if own is None else own
    free = free_memory(device, config.ranks)
    kept_images = 0 if vision is None else image_room(device.type, free, config.image_cache)
    free -= kept_images + (0 if vision is None else vision.workspace)
    free -= adapters.nbytes(config.chunk_size or DEFAULT_CHUNK[device.type])
    logger.info("device %s: %s; %s of memory free", device, device_name(device), gib(free))
    experts = ExpertPlacement.choose(config, part, device.type)
    experts.check_host_memory(available_memory())
    config, draft, ctx_size, pools, short = fit_drafts(config, part, draft, device, free, experts)
    if stages:
        ctx_size, pools = fit_stages(config, checkpoint, draft, device, stages, ctx_size)
    experts = place_experts(config, part, draft, device, free, experts, ctx_size, pools)
    layer = draft if draft is not None and draft.config.hidden_width else None
    of_part = adapters.of_part(part)
    made = Machine(config, device, threads, free, progress, experts, layer, vision is not None, of_part)
    with on_device(device):
        shared = part is not checkpoint
        runner = made.ranks(path, part, ctx_size, pools) if shared else made.runner(part, ctx_size, pools)
        drafts, of_drafts = made.drafts_beside(runner, draft, pools)
    notes = [*checkpoint.notes, *why, *_notes(config, checkpoint, part, runner, experts)]
    notes += [*short, *of_drafts, *sees, *adapters.notes]
    early_compiler.end(device.type == "cuda")
    load_s = time.perf_counter() - began
    in_vain = experts.note() if config.places_experts and not experts.layers else None
    for note in notes:
        logger.log(logging.WARNING if note == in_vain else logging.INFO, "%s", note)
    logger.info(
        "loaded in %.2f s: %s backend, %d threads, up to %d tokens of a prompt at once",
        *(load_s, runner.decoder.backend.name, threads, runner.decoder.chunk_size),
    )
    return LoadedModel(
        *(path, checkpoint, tokenizer.result(), runner, device, threads, load_s, notes, experts),
        *(drafts, draft, runner.ranks, vision, None if vision is None else projector_path(config, path)),
        *(kept_images, config, adapters.scales, adapters.nbytes(0)),
    )


def _in_thread(make: Callable[[], T]) -> Future[T]:
    """Calls `make` in a thread of its own, while the weights are being loaded, and returns the future result."""
    pool = ThreadPoolExecutor(1, "quengine-load")
    made = pool.submit(make)
    pool.shutdown(wait=False)
    return made


def load_rank(plan: "RankPlan", communicator: "RankCommunicator") -> ModelRunner:
    """Loads the part of the model of a rank other than rank 0, with its cache. Raises as `load_model` does."""
    from quengine.parallel.observed_inputs import ObservedInputs

    config = EngineConfig(**plan.options)
    device, _ = choose_device(config)
    stage = Stage(plan.number, plan.bounds) if plan.bounds else None
    whole = open_checkpoint(Path(plan.model))
    part = part_of(whole, stage or plan.rank)
    adapters = open_adapters(config, whole).of_part(part)
    torch.set_num_threads(plan.threads)
    experts = ExpertPlacement.choose(config, part, device.type)
    takes_images = bool(plan.options["mmproj"])
    free = free_memory(device, plan.count)
    made = Machine(config, device, plan.threads, free, None, experts, None, takes_images, adapters)
    runner = made.runner(part, plan.ctx_size, plan.pools, communicator)
    runner.observed = ObservedInputs(runner.decoder, part.tensors, plan.ctx_size, communicator)
    return runner


def _log_checkpoint(what: str, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    types = ", ".join(f"{count} {name}" for name, count in checkpoint.types.items())
    logger.info(
        "%s %s: %r, %s, %d layers, %.1f million weights in %s; tensors: %s",
        *(what, checkpoint.path, config.name, config.architecture, config.block_count),
        *(checkpoint.weights / 1e6, gib(checkpoint.nbytes), types),
    )


def _notes(
    config: EngineConfig,
    checkpoint: Checkpoint,
    part: Checkpoint,
    runner: ModelRunner,
    experts: ExpertPlacement,
) -> list[str]:
    """Notes for the user about what was chosen. part: this rank's part of the model."""
    notes = [_sizes_note(config, checkpoint, runner.cache)]
    if runner.ranks is not None:
        each = f"each with weights of {gib(part.nbytes)}; {runner.ranks.note}"
        if (stage := part.config.stage) is not None:
            counts = [end - first for first, end in pairwise(stage.bounds)]
            each = f"with {' + '.join(map(str, counts))} layers, the first with weights of {gib(part.nbytes)}"
        notes.append(f"shared by {config.ranks} ranks, {each}")
    notes += _cold_in_vain(config, runner.cache, runner.decoder.backend.device)
    if config.places_experts:
        notes.append(experts.note())
    if config.draft_ngram:
        notes.append(f"drafts by look-up of up to {config.draft_ngram} tokens in the text itself")
    return notes


def _sizes_note(config: EngineConfig, checkpoint: Checkpoint, cache: KVCache) -> str:
    """A note for the user on the sizes of context, cache and weights."""
    trained = checkpoint.config.context_length
    cut = "" if config.ctx_size or cache.ctx_size == trained else f", cut from {trained} to fit"
    held = f"cache {gib(cache.nbytes)} ({config.cache_type})"
    if config.parallel > 1:
        tokens = max(pool.num_blocks for pool in cache.pools) * BLOCK_SIZE
        held += f" for {tokens} tokens of up to {config.parallel} sequences at once"
    held += "".join(_states_note(config, pool, cache) for pool in cache.pools if pool.is_state)
    return f"context {cache.ctx_size} tokens{cut}, {held}, weights {gib(checkpoint.nbytes)}"


def _states_note(config: EngineConfig, pool: CachePool, cache: KVCache) -> str:
    """The part of the cache that states take, for the user."""
    size = sum(part[:, 0].nbytes for parts in cache.states for part in parts)
    copies = ", as many copies for drafts" if pool.spares else ""
    cold = f", up to {pool.cold} more in host memory ({gib(size * pool.cold)})" if pool.cold else ""
    return (
        f", of it {gib(size * pool.num_blocks)} for states of {gib(size)}: {config.parallel} of sequences{copies}, "
        f"{pool.checkpoints} checkpoints{cold}"
    )


def _cold_in_vain(config: EngineConfig, cache: KVCache, device: torch.device) -> list[str]:
    """A note where host memory is requested for checkpoints and there is nothing to keep in it."""
    if not config.host_checkpoints or any(pool.cold for pool in cache.pools):
        return []
    pools = [pool for pool in cache.pools if pool.is_state]
    why = "it is less than a state takes"
    if not pools:
        why = "the model's layers keep no states"
    elif device.type != "cuda":
        why = f"the states of a model on the {device.type} are in host memory anyway"
    elif not any(pool.checkpoints for pool in pools):
        why = "no checkpoints are kept"
    return [f"host_checkpoints {config.host_checkpoints} MiB: not used, {why}"]
