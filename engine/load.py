"""From a model's name to something that runs: device, backend, context, decoder, cache."""

import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from quengine.block_manager import CachePool
from quengine.config import DEFAULT_CHUNK, EngineConfig
from quengine.errors import EngineError
from quengine.kernels.backend import Backend
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kv_cache import KVCache
from quengine.memory import (
    CONTEXT_STEP,
    RANKS_WORKSPACE,
    CacheNeeds,
    DeviceMemory,
    choose_context,
    choose_pools,
    gib,
    wanted_bytes,
    workspace_bytes,
)
from quengine.model_runner import ModelRunner
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.config import Stage
from quengine.models.decoder import Decoder
from quengine.models.hub.hub import resolve_model
from quengine.models.layer_split import layer_bounds, layer_bytes
from quengine.models.split_checkpoint import SplitCheckpoint
from quengine.models.tensor_split import Rank, SplitTensors
from quengine.models.tokenizer import Tokenizer
from quengine.platform import cuda_start
from quengine.platform.device import choose_device, device_name, on_device
from quengine.platform.host_experts import ExpertPlacement, split_tensors
from quengine.platform.machine import available_memory, thread_count
from quengine.platform.weight_loader import CudaTransfer, WeightLoader
from quengine.speculative.draft_length import draft_rows, draft_tokens
from quengine.speculative.draft_model import MOST_ROWS, DraftModel, DraftSteps, HostDraftSteps
from quengine.speculative.load_draft import open_draft

if TYPE_CHECKING:
    from quengine.parallel.group import RankGroup, RankPlan

logger = logging.getLogger(__name__)
T = TypeVar("T")

REFERENCE_BYTES_A_WEIGHT = 8


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and the one that drafts for it. `notes` are lines for the user: what was chosen and why.
    `experts`: those of the model in host memory beside a CUDA device. `ranks`: the processes that share the model."""

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

    @property
    def decoder(self) -> Decoder:
        return self.runner.decoder

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    @property
    def nbytes(self) -> int:
        """Of weights and caches."""
        drafts = 0 if self.draft is None else self.draft.cache_bytes
        files = (self.checkpoint, self.draft_checkpoint)
        return sum(file.nbytes for file in files if file is not None) + self.cache.nbytes + drafts

    def close(self) -> None:
        """End the other ranks, and unmap the files."""
        if self.ranks is not None:
            self.runner.release()
        self.checkpoint.close()
        if self.draft_checkpoint is not None:
            self.draft_checkpoint.close()


def load_model(
    model: str | Path, config: EngineConfig, progress: Callable[[str], None] | None = None
) -> LoadedModel:
    """Resolve, open, check and load a model; `progress` is called with how far the weights are.

    Raises:
        EngineError: no such model, its file is wrong, or more threads than this process has processors.
        CannotRunError: no such device here, or too little memory.
    """
    began = time.perf_counter()
    threads = thread_count(config.threads)
    path = resolve_model(str(model))
    checkpoint = open_checkpoint(path)
    _log_checkpoint("model", checkpoint)
    tokenizer = _in_thread(checkpoint.tokenizer)
    draft = open_draft(config, checkpoint)
    if draft is not None:
        _log_checkpoint("draft model", draft)
    device, why = choose_device(_of_rank(config, 0))
    config = replace(config, tensor_parallel=_rank_count(config, checkpoint, draft, device))
    for rank in range(1, config.ranks):
        choose_device(_of_rank(replace(config, device=device.type), rank))
    stages = _stages(config, checkpoint, device)
    part = _part(checkpoint, stages[0] if stages else Rank(0, config.ranks, config.expert_parallel))
    threads = max(1, threads // config.ranks) if device.type == "cpu" else threads
    torch.set_num_threads(threads)
    free = _free_memory(device, config.ranks)
    logger.info("device %s: %s; %s of memory free", device, device_name(device), gib(free))
    experts = ExpertPlacement.choose(config, part, device.type)
    experts.check_host_memory(available_memory())
    ctx_size, pools = _choose_cache(config, part, draft, device, free, experts)
    if stages:
        ctx_size, pools = _fit_stages(config, checkpoint, draft, device, stages, ctx_size)
    made = _Machine(config, device, threads, free, progress, experts)
    with on_device(device):
        shared = part is not checkpoint
        runner = made.ranks(path, part, ctx_size, pools) if shared else made.runner(part, ctx_size, pools)
        drafts, said = made.drafts_beside(runner, draft, pools)
    notes = [*checkpoint.notes, *why, *_notes(config, checkpoint, part, runner, experts), *said]
    load_s = time.perf_counter() - began
    for note in notes:
        logger.info("%s", note)
    logger.info(
        "loaded in %.2f s: %s backend, %d threads, up to %d tokens of a prompt at once",
        *(load_s, runner.decoder.backend.name, threads, runner.decoder.chunk_size),
    )
    return LoadedModel(
        *(path, checkpoint, tokenizer.result(), runner, device, threads, load_s, notes, experts),
        *(drafts, draft, runner.ranks),
    )


def _in_thread(make: Callable[[], T]) -> Future[T]:
    """What `make` gives, made while the weights are on their way to the device."""
    pool = ThreadPoolExecutor(1, "quengine-load")
    made = pool.submit(make)
    pool.shutdown(wait=False)
    return made


def load_rank(plan: "RankPlan", communicator: Communicator) -> ModelRunner:
    """The part of the model of a rank other than rank 0, with its cache. Raises as `load_model`."""
    config = EngineConfig(**plan.options)
    device, _ = choose_device(config)
    stage = Stage(plan.number, tuple(plan.bounds)) if plan.bounds else None
    part = _part(open_checkpoint(Path(plan.model)), stage or plan.rank)
    torch.set_num_threads(plan.threads)
    experts = ExpertPlacement.choose(config, part, device.type)
    made = _Machine(config, device, plan.threads, _free_memory(device, plan.count), None, experts)
    return made.runner(part, plan.ctx_size, [CachePool(*pool) for pool in plan.pools], communicator)


def _part(checkpoint: Checkpoint, part: Rank | Stage) -> Checkpoint:
    """What a rank has of a model. Raises EngineError where so many ranks cannot share it."""
    return checkpoint if part.count == 1 else SplitCheckpoint(checkpoint, part)


def _stages(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> list[Stage]:
    """Which rank has which layers, by the shares that are asked for or by free memory; empty where none has whole
    layers. Raises EngineError for more ranks than layers."""
    if config.split != "layer" or config.ranks == 1:
        return []
    count = config.ranks
    shares = config.shares or [float(free) for free in _free_of_ranks(config, device)]
    bounds = layer_bounds(layer_bytes(checkpoint.config, checkpoint.tensors), shares)
    return [Stage(number, bounds) for number in range(count)]


def _free_of_ranks(config: EngineConfig, device: torch.device) -> list[int]:
    """Bytes for each rank. Asking a CUDA device makes its context."""
    devices = [_of_rank(replace(config, device=device.type), rank) for rank in range(config.ranks)]
    own = [device, *(torch.device(each.device) for each in devices[1:])]
    return [_free_memory(each, config.ranks) for each in own]


def _fit_stages(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    device: torch.device,
    stages: Sequence[Stage],
    ctx_size: int,
) -> tuple[int, list[CachePool]]:
    """The cache that every rank has room for, where `ctx_size` positions fit the first one."""
    free = _free_of_ranks(config, device)
    asked = replace(config, make_room=None)
    parts = [_part(checkpoint, stage) for stage in stages]
    on = [
        torch.device(_of_rank(replace(config, device=device.type), stage.number).device) for stage in stages
    ]

    def choose(positions: int | None) -> list[tuple[int, list[CachePool]]]:
        return [
            _choose_cache(
                *(replace(asked, ctx_size=positions), part, draft, where, room),
                ExpertPlacement.choose(config, part, device.type),
            )
            for part, where, room in zip(parts, on, free, strict=True)
        ]

    ctx_size = min(ctx_size, *(positions for positions, _ in choose(config.ctx_size)))
    pools = [chosen for _, chosen in choose(ctx_size)]
    fewest = [min(pool.num_blocks for pool in group) for group in zip(*pools, strict=True)]
    return ctx_size, [replace(pool, num_blocks=count) for pool, count in zip(pools[0], fewest, strict=True)]


def _of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """As if the rank were alone: with its own device, where devices are named or it is not rank 0."""
    named = config.devices is not None or (rank > 0 and config.device != "cpu")
    device = config.device_of(rank) if named else config.device
    return replace(config, device=device, devices=None, tensor_parallel=1, split="tensor", tensor_split=None)


def _log_checkpoint(what: str, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    types = ", ".join(f"{count} {name}" for name, count in checkpoint.types.items())
    logger.info(
        "%s %s: %r, %s, %d layers, %.1f million weights in %s; tensors: %s",
        *(what, checkpoint.path, config.name, config.architecture, config.block_count),
        *(checkpoint.weights / 1e6, gib(checkpoint.nbytes), types),
    )


@dataclass(frozen=True)
class _Machine:
    """The device that models are loaded onto, and how. experts: where those of the model lie."""

    config: EngineConfig
    device: torch.device
    threads: int
    free: int
    progress: Callable[[str], None] | None
    experts: ExpertPlacement

    def runner(
        self,
        checkpoint: Checkpoint,
        ctx_size: int,
        pools: Sequence[CachePool],
        communicator: Communicator = ONE_RANK,
        drafts: bool = False,
    ) -> ModelRunner:
        """The weights on the device, with a cache; `drafts`: of the model that drafts for the other."""
        config, device = self.config, self.device
        backend = _make_backend(config, checkpoint, device, self.threads, self.free)
        backend.communicator = communicator
        cache = KVCache.allocate(checkpoint.config, ctx_size, device, config.cache_type, pools)
        chunk_size = min(config.chunk_size or DEFAULT_CHUNK[device.type], ctx_size)
        if backend.name == "cuda" and communicator.rank == 0 and (drafts or not self.experts.layers):
            self._compile_ahead(checkpoint, ctx_size, pools, chunk_size, drafts)
        experts = ExpertPlacement() if drafts else self.experts
        with _weights(checkpoint, device, config.mmap, self.progress, experts.layers) as tensors:
            host = experts.operations(backend, self.threads)
            decoder = Decoder(checkpoint.config, tensors, backend, ctx_size, chunk_size, host)
        logger.debug("weights loaded")
        if self.experts.layers:
            return ModelRunner(decoder, cache)  # a step waits for the host: nothing to capture
        return _make_runner(config, decoder, cache, drafts)

    def ranks(self, path: Path, part: Checkpoint, ctx_size: int, pools: Sequence[CachePool]) -> ModelRunner:
        """Rank 0 of a group, whose other ranks load their parts meanwhile."""
        from quengine.parallel.group import RankGroup, RankPlan

        def plan(number: int, meeting: str) -> RankPlan:
            sizes = tuple((pool.num_blocks, pool.window, pool.chunk) for pool in pools)
            options = _of_rank(replace(self.config, device=self.device.type), number).values()
            options["draft_model"] = None if self.config.draft_model is None else str(self.config.draft_model)
            count = self.config.ranks
            bounds = () if part.config.stage is None else part.config.stage.bounds
            return RankPlan(str(path), options, number, count, ctx_size, sizes, self.threads, meeting, bounds)

        group = RankGroup(self.config.ranks)
        try:
            communicator = group.load(plan, self.device, self.config.deterministic)
            runner = self.runner(part, ctx_size, pools, communicator)
            group.wait_until_loaded()
        except BaseException:
            group.close()
            raise
        runner.lead(group)
        return runner

    def drafts_beside(
        self, target: ModelRunner, checkpoint: Checkpoint | None, pools: Sequence[CachePool]
    ) -> tuple[DraftModel | None, list[str]]:
        """The model that drafts for `target`, and lines for the user. Where it fails, the ranks of `target` end."""
        if checkpoint is None:
            return None, []
        ctx_size = target.cache.ctx_size
        drafts_ctx = min(ctx_size, checkpoint.config.context_length)
        draft_pools = [CachePool(pools[0].num_blocks) for _ in checkpoint.config.cache_groups]
        try:
            runner = self.runner(checkpoint, drafts_ctx, draft_pools, drafts=True)
            model = DraftModel(runner, self.draft_steps(runner))
        except BaseException:
            if target.ranks is not None:
                target.ranks.close()
            raise
        return model, [_draft_note(checkpoint, runner.cache, ctx_size)]

    def _compile_ahead(
        self, checkpoint: Checkpoint, ctx_size: int, pools: Sequence[CachePool], chunk_size: int, drafts: bool
    ) -> None:
        """Begin to compile kernels that are not there yet; who launches one waits for it."""
        from quengine.kernels.cuda.launch.gpu import gpu_of
        from quengine.runners.compile_kernels import KernelPlan, compile_ahead, stored_tensors

        config, gpu, tensors = self.config, gpu_of(self.device), checkpoint.tensors
        assert gpu is not None
        plan = KernelPlan(
            checkpoint.config,
            tensors.stored() if isinstance(tensors, SplitTensors) else stored_tensors(tensors),
            ctx_size,
            pools,
            chunk_size,
            config.cache_type,
            _graph_rows(config, drafts),
            config.chunk_size or DEFAULT_CHUNK["cuda"],
            config.speculates,
            config.deterministic,
        )
        compile_ahead(plan, gpu, self.progress)

    def draft_steps(self, runner: ModelRunner) -> DraftSteps:
        """Runs the decode steps of a draft model."""
        if self.device.type != "cuda" or self.experts.layers:
            return HostDraftSteps(runner)
        from quengine.runners.cuda_graphs import CudaGraphs
        from quengine.speculative.device_drafts import DeviceDraftSteps

        assert isinstance(runner.graphs, CudaGraphs)
        return DeviceDraftSteps(runner.graphs)


def _free_memory(device: torch.device, ranks: int) -> int:
    """Bytes for one rank: of a device of its own, or of the host's memory, which they share."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory() // ranks


def _rank_count(
    config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None, device: torch.device
) -> int:
    """How many devices share the model: what the options say, or the fewest CUDA devices that hold it."""
    told = (
        config.tensor_parallel is not None or config.devices is not None or config.device.startswith("cuda:")
    )
    if told or device.type != "cuda" or config.places_experts or torch.cuda.device_count() <= 1:
        return config.ranks
    from quengine.parallel.device_count import USABLE_CONTEXT, fewest_devices

    def needed(count: int, usable: bool) -> int | None:
        layers = config.split == "layer"
        try:
            part = checkpoint if layers else _part(checkpoint, Rank(0, count, config.expert_parallel))
        except EngineError:
            return None
        shared = replace(config, tensor_parallel=count)
        needs, memory = _memory_needs(shared, part, draft, device, 0, ExpertPlacement())
        least = min(checkpoint.config.context_length, USABLE_CONTEXT) if usable else CONTEXT_STEP
        own = memory.weights + needs.nbytes(config.ctx_size or least, config.cache_type)
        return memory.workspace + (own // count if layers else own)

    # What other models hold can be freed where there is `make_room`. Asking for it makes a device's context.
    which = 0 if config.make_room is None else 1
    free = [torch.cuda.mem_get_info(device)[which]]
    if (needed(1, True) or 0) > free[0]:
        free += [torch.cuda.mem_get_info(index)[which] for index in range(1, torch.cuda.device_count())]
    return fewest_devices(free, needed)


def _memory_needs(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    device: torch.device,
    free: int,
    experts: ExpertPlacement,
) -> tuple[CacheNeeds, DeviceMemory]:
    """What a context takes, and a device with room for one and the padding blocks beside it, and as much again."""
    shape, cache_type = checkpoint.config, config.cache_type
    chunk = config.chunk_size or DEFAULT_CHUNK[device.type]
    if config.parallel == 1:
        chunk = min(chunk, config.ctx_size or shape.context_length)
    rows = max(config.parallel, draft_rows(config, device.type))
    weights = checkpoint.nbytes - sum(experts.host.values())
    workspace = workspace_bytes(device.type, shape, weights, chunk, rows)
    workspace += RANKS_WORKSPACE[device.type] if config.ranks > 1 else 0
    if draft is not None:
        workspace += workspace_bytes(device.type, draft.config, draft.nbytes, chunk, rows, draft=True)
        weights += draft.nbytes
    needs = CacheNeeds(shape, chunk, None if draft is None else draft.config)
    padding = 2 * sum(needs.block_bytes(cache_type))
    return needs, DeviceMemory(str(device), free, weights, workspace + padding, experts.device)


def _choose_cache(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    device: torch.device,
    free: int,
    experts: ExpertPlacement,
) -> tuple[int, list[CachePool]]:
    """Positions of a sequence, and the pools of the cache's blocks."""
    needs, memory = _memory_needs(config, checkpoint, draft, device, free, experts)
    cache_type = config.cache_type
    if config.make_room is not None:
        wanted = wanted_bytes(needs, memory, config.ctx_size, config.parallel, cache_type)
        while config.make_room(wanted, memory.free, str(device)):
            memory = replace(memory, free=_free_memory(device, config.ranks))
    ctx_size = choose_context(needs, config.ctx_size, memory, cache_type)
    room = memory.room + 2 * sum(needs.block_bytes(cache_type))  # the padding blocks are among those chosen
    return ctx_size, choose_pools(needs, ctx_size, config.parallel, room, cache_type)


def _notes(
    config: EngineConfig,
    checkpoint: Checkpoint,
    part: Checkpoint,
    runner: ModelRunner,
    experts: ExpertPlacement,
) -> list[str]:
    """What was chosen, for the user. part: what this rank has of the model."""
    notes = [_sizes_note(config, checkpoint, runner.cache)]
    if runner.ranks is not None:
        each = f"each with weights of {gib(part.nbytes)}; {runner.ranks.note}"
        if (stage := part.config.stage) is not None:
            counts = [end - first for first, end in pairwise(stage.bounds)]
            each = f"with {' + '.join(map(str, counts))} layers, the first with weights of {gib(part.nbytes)}"
        notes.append(f"shared by {config.ranks} ranks, {each}")
    if config.places_experts:
        notes.append(experts.note())
    if config.draft_ngram:
        notes.append(f"drafts by look-up of up to {config.draft_ngram} tokens in the text itself")
    return notes


def _sizes_note(config: EngineConfig, checkpoint: Checkpoint, cache: KVCache) -> str:
    """What context, cache and weights take, for the user."""
    trained = checkpoint.config.context_length
    cut = "" if config.ctx_size or cache.ctx_size == trained else f", cut from {trained} to fit"
    held = f"cache {gib(cache.nbytes)} ({config.cache_type})"
    if config.parallel > 1:
        tokens = max(pool.num_blocks for pool in cache.pools) * BLOCK_SIZE
        held += f" for {tokens} tokens of up to {config.parallel} sequences at once"
    return f"context {cache.ctx_size} tokens{cut}, {held}, weights {gib(checkpoint.nbytes)}"


def _draft_note(draft: Checkpoint, cache: KVCache, ctx_size: int) -> str:
    """What the draft model takes, and where it ends before the other does."""
    short = "" if cache.ctx_size == ctx_size else f", up to position {cache.ctx_size} only, its own context"
    return f"drafts by {draft.path.name}: weights {gib(draft.nbytes)}, cache {gib(cache.nbytes)}{short}"


@contextmanager
def _weights(
    checkpoint: Checkpoint,
    device: torch.device,
    mapped: bool,
    progress: Callable[[str], None] | None,
    host_layers: int,
) -> Iterator[Mapping[str, QuantTensor]]:
    """The tensors as the decoder takes them: on the CPU the mapped file's, or copies; read ahead for a CUDA device, but
    for the experts of the first `host_layers` layers."""
    if device.type != "cuda":
        yield checkpoint.tensors if mapped else _copied(checkpoint, progress)
        return
    host, rest = split_tensors(checkpoint.tensors, host_layers) if host_layers else ({}, checkpoint.tensors)
    nbytes = checkpoint.nbytes - sum(tensor.nbytes for tensor in host.values())
    with WeightLoader(rest, CudaTransfer(device), nbytes, progress) as tensors:
        yield ChainMap(host, tensors) if host else tensors  # type: ignore[arg-type]  # it is not written to
    if progress is not None:
        progress("")  # the next output begins a line of its own
    # What lay there before it was repacked is not needed again.
    torch.cuda.empty_cache()


def _copied(checkpoint: Checkpoint, progress: Callable[[str], None] | None) -> Mapping[str, QuantTensor]:
    from quengine.platform.weight_copy import copy_weights

    try:
        return copy_weights(checkpoint.tensors, checkpoint.release_pages, progress)
    finally:
        if progress is not None:
            progress("")


def _make_backend(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, threads: int, free: int
) -> Backend[Any]:
    if config.backend == "reference":
        from quengine.kernels.reference import ReferenceBackend

        return ReferenceBackend(keep=REFERENCE_BYTES_A_WEIGHT * checkpoint.weights < free // 2)
    if device.type == "cuda":
        from quengine.kernels.cuda.backend import CudaBackend
        from quengine.platform.compile_notice import announce_compilation

        cuda_start.wait()
        announce_compilation(torch.cuda.get_device_name(device))
        return CudaBackend(device, batch_invariant=config.deterministic)
    from quengine.kernels.cpu.backend import CpuBackend

    return CpuBackend(threads)


def _make_runner(config: EngineConfig, decoder: Decoder, cache: KVCache, drafts: bool) -> ModelRunner:
    device = decoder.backend.device
    if config.backend == "reference":
        return ModelRunner(decoder, cache)
    if device.type == "cuda":
        return _cuda_runner(config, decoder, cache, drafts)
    from quengine.kernels.cpu.ops import sampling
    from quengine.runners.cpu_steps import CpuSteps

    shape = decoder.config
    if (
        shape.ranks > 1 or shape.stage is not None
    ):  # between the kernels of a step it waits for other processes
        return ModelRunner(decoder, cache, choose=sampling.sample, packs_prompts=False)
    # A dozen rows of one prompt keep the processor as busy as those of many.
    return ModelRunner(
        decoder,
        cache,
        CpuSteps(decoder, cache, max(config.parallel, draft_rows(config, device.type))),
        choose=sampling.sample,
        packs_prompts=False,
    )


def _graph_rows(config: EngineConfig, drafts: bool) -> int:
    """Rows of a captured decode step at most; `drafts`: of the model that drafts."""
    from quengine.runners.graph_keys import DECODE_ROWS

    rows = draft_rows(config, "cuda")
    # As many jobs as a step has rows to check drafts, or sequences; at first with the tokens they make up for.
    rows = MOST_ROWS * min(config.parallel, rows) if drafts else max(config.parallel, rows)
    return min(DECODE_ROWS[-1], rows)


def _cuda_runner(config: EngineConfig, decoder: Decoder, cache: KVCache, drafts: bool) -> ModelRunner:
    from quengine.kernels.cuda.launch.compile_ahead import finish_compiling
    from quengine.parallel.communicator import CudaCommunicator
    from quengine.runners.cuda_graphs import PENDING, CudaGraphs
    from quengine.runners.device_decode import DeviceDecoder
    from quengine.runners.graph_keys import UNMOVED_ROWS

    rows = _graph_rows(config, drafts)
    graphs = CudaGraphs(
        decoder,
        cache,
        rows if decoder.config.stage is None else min(rows, UNMOVED_ROWS),
        config.chunk_size or DEFAULT_CHUNK["cuda"],
        shares_sequences=config.speculates,
        pending=draft_tokens(config, "cuda") if drafts else PENDING,
    )
    communicator = decoder.backend.communicator
    if isinstance(communicator, CudaCommunicator):
        communicator.one_first(finish_compiling)
    return ModelRunner(decoder, cache, graphs, None if drafts else DeviceDecoder(graphs))
