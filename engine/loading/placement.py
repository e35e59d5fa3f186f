"""Which part of a model each rank holds, and the context and cache that fit beside it."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from quengine.block_pool import CachePool
from quengine.config import DEFAULT_CHUNK, EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.memory import (
    CONTEXT_STEP,
    RANKS_WORKSPACE,
    USABLE_CONTEXT,
    CacheNeeds,
    DeviceMemory,
    adapted_step_bytes,
    choose_context,
    choose_pools,
    cold_checkpoints,
    draft_step_bytes,
    gib,
    wanted_bytes,
    workspace_bytes,
)
from quengine.models.checkpoint import Checkpoint
from quengine.models.config import Stage
from quengine.models.layer_split import layer_bounds, layer_bytes
from quengine.models.split_checkpoint import SplitCheckpoint
from quengine.models.tensor_split import Rank
from quengine.platform.host_experts import ExpertPlacement
from quengine.platform.machine import available_memory
from quengine.speculative.draft_length import draft_rows


def part_of(checkpoint: Checkpoint, part: Rank | Stage) -> Checkpoint:
    """The part of a model that a rank holds. Raises EngineError where `part.count` ranks cannot share it."""
    if part.count > 1 and checkpoint.config.encoder is not None:
        raise EngineError(f"a {checkpoint.config.architecture} model is an encoder, which ranks do not share")
    return checkpoint if part.count == 1 else SplitCheckpoint(checkpoint, part)


def stages_of(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> list[Stage]:
    """The layers of each rank, by the requested shares or by free memory; empty unless `split` is "layer". Raises
    EngineError for more ranks than layers."""
    if config.split != "layer" or config.ranks == 1:
        return []
    count = config.ranks
    shares = config.shares or [float(free) for free in _free_of_ranks(config, device)]
    bounds = layer_bounds(layer_bytes(checkpoint.config, checkpoint.tensors), shares)
    return [Stage(number, bounds) for number in range(count)]


def _free_of_ranks(config: EngineConfig, device: torch.device) -> list[int]:
    """Free bytes of each rank. To ask a CUDA device creates its context."""
    devices = [of_rank(replace(config, device=device.type), rank) for rank in range(config.ranks)]
    own = [device, *(torch.device(each.device) for each in devices[1:])]
    return [free_memory(each, config.ranks) for each in own]


def fit_stages(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    device: torch.device,
    stages: Sequence[Stage],
    ctx_size: int,
) -> tuple[int, list[CachePool]]:
    """The positions of a sequence, at most `ctx_size`, and the pools for which every rank has room."""
    free = _free_of_ranks(config, device)
    asked = replace(config, make_room=None)
    parts = [part_of(checkpoint, stage) for stage in stages]
    on = [torch.device(of_rank(replace(config, device=device.type), stage.number).device) for stage in stages]

    def choose(positions: int | None) -> list[tuple[int, list[CachePool]]]:
        return [
            choose_cache(
                *(replace(asked, ctx_size=positions), part, draft, where, room),
                ExpertPlacement.choose(config, part, device.type),
            )
            for part, where, room in zip(parts, on, free, strict=True)
        ]

    ctx_size = min(ctx_size, *(positions for positions, _ in choose(config.ctx_size)))
    pools = [chosen for _, chosen in choose(ctx_size)]
    return ctx_size, [_fewest(group) for group in zip(*pools, strict=True)]


def _fewest(pools: Sequence[CachePool]) -> CachePool:
    """A pool with the smallest number of blocks, checkpoints and cold blocks, for which every rank has room."""
    blocks, checkpoints, cold = (
        min(getattr(pool, name) for pool in pools) for name in ("num_blocks", "checkpoints", "cold")
    )
    return replace(pools[0], num_blocks=blocks, checkpoints=checkpoints, cold=cold)


def of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """The options of a rank as if it were alone, with its own device."""
    named = config.devices is not None or (rank > 0 and config.device != "cpu")
    device = config.device_of(rank) if named else config.device
    return replace(config, device=device, devices=None, tensor_parallel=1, split="tensor", tensor_split=None)


def free_memory(device: torch.device, ranks: int) -> int:
    """Free bytes of one rank: those of its CUDA device, or its share of the host's memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory() // ranks


def rank_count(
    config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None, device: torch.device
) -> int:
    """The number of devices that share the model: as the options say, or the fewest CUDA devices that hold it."""
    told = (
        config.tensor_parallel is not None or config.devices is not None or config.device.startswith("cuda:")
    )
    if told or device.type != "cuda" or config.places_experts or torch.cuda.device_count() <= 1:
        return config.ranks
    from quengine.parallel.device_count import fewest_devices

    def needed(count: int, usable: bool) -> int | None:
        layers = config.split == "layer"
        try:
            part = checkpoint if layers else part_of(checkpoint, Rank(0, count, config.expert_parallel))
        except EngineError:
            return None
        shared = replace(config, tensor_parallel=count)
        needs, memory = _memory_needs(shared, part, draft, device, 0, ExpertPlacement())
        least = min(checkpoint.config.context_length, USABLE_CONTEXT) if usable else CONTEXT_STEP
        own = memory.weights + needs.nbytes(config.ctx_size or least, config.cache_type)
        return memory.workspace + (own // count if layers else own)

    # With `make_room` the total counts, since memory that other models hold can be freed. Each query creates a CUDA
    # context on its device.
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
    """The memory that a context takes, and the device's memory, whose workspace includes twice the padding blocks."""
    shape, cache_type = checkpoint.config, config.cache_type
    chunk = config.chunk_size or DEFAULT_CHUNK[device.type]
    if config.parallel == 1:
        chunk = min(chunk, config.ctx_size or shape.context_length)
    rows = max(config.parallel, draft_rows(config, device.type))
    weights = checkpoint.nbytes - experts.host_bytes
    workspace = workspace_bytes(device.type, shape, weights, chunk, rows)
    workspace += RANKS_WORKSPACE[device.type] if config.ranks > 1 else 0
    if config.lora and device.type == "cuda":
        workspace += adapted_step_bytes(shape, chunk, rows)
    if draft is not None:
        workspace += workspace_bytes(device.type, draft.config, draft.nbytes, chunk, rows, draft=True)
        weights += draft.nbytes
        if device.type == "cuda" and draft.config.is_draft_layer:
            context = config.ctx_size or shape.context_length
            workspace += draft_step_bytes(shape, draft.config, config.parallel, rows, context)
    shares = config.reuse_prefix or config.parallel > 1
    needs = CacheNeeds(
        shape,
        chunk,
        None if draft is None else draft.config,
        config.parallel,
        config.drafts_on_host,
        config.state_checkpoints if shares else 0,
        rows if device.type == "cuda" else 0,
    )
    padding = 2 * sum(needs.block_bytes(cache_type))
    return needs, DeviceMemory(str(device), free, weights, workspace + padding, experts.device)


def _expert_share(
    config: EngineConfig, needs: CacheNeeds, memory: DeviceMemory, experts: ExpertPlacement
) -> int:
    """Bytes of the device that the cache leaves to copies of experts in host memory.

    That is the size of the requested number of experts (`gpu_experts`), or at most half of the memory that one sequence
    of the requested context, or of a usable one, leaves. Raises CannotRunError if the requested number does not fit.
    """
    placed = experts.holding(config, 1, memory.room)
    if config.gpu_experts is not None:
        share = placed.device_bytes(placed.held)
        left = max(0, memory.room - needs.nbytes(config.ctx_size or CONTEXT_STEP, config.cache_type))
        if placed.held and share > left:
            raise CannotRunError(
                f"not enough memory on {memory.where}: {placed.held} experts of each layer need {gib(share)} of the "
                f"{gib(left)} that the others and the context leave; lower --gpu-experts, or leave it out"
            )
        return share
    least = config.ctx_size or min(USABLE_CONTEXT, needs.config.context_length)
    beyond = memory.room - needs.nbytes(least, config.cache_type)
    every = replace(placed, held=experts.experts).shared_bytes if placed.held else 0
    return max(0, min(beyond // 2, every))


def place_experts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    device: torch.device,
    free: int,
    experts: ExpertPlacement,
    ctx_size: int,
    pools: Sequence[CachePool],
) -> ExpertPlacement:
    """`experts`, with copies of the most used ones in the device's memory that the chosen cache leaves."""
    model = checkpoint.config.experts
    if not experts.layers or model is None:
        return experts
    needs, memory = _memory_needs(config, checkpoint, draft, device, free, experts)
    sizes = zip(pools, needs.block_bytes(config.cache_type), strict=True)
    cache = needs.table_bytes(ctx_size) + sum(pool.num_blocks * size for pool, size in sizes)
    return experts.holding(config, model.router.used, memory.room - cache)


def choose_cache(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    device: torch.device,
    free: int,
    experts: ExpertPlacement,
) -> tuple[int, list[CachePool]]:
    """The positions of a sequence, and the pools of the cache's blocks."""
    needs, memory = _memory_needs(config, checkpoint, draft, device, free, experts)
    cache_type = config.cache_type
    if config.make_room is not None:
        wanted = wanted_bytes(needs, memory, config.ctx_size, config.parallel, cache_type)
        while config.make_room(wanted, memory.free, str(device)):
            memory = replace(memory, free=free_memory(device, config.ranks))
    memory = replace(memory, weights=memory.weights + _expert_share(config, needs, memory, experts))
    ctx_size = choose_context(needs, config.ctx_size, memory, cache_type)
    room = memory.room + 2 * sum(needs.block_bytes(cache_type))  # the padding blocks are among those chosen
    pools = choose_pools(needs, ctx_size, config.parallel, room, cache_type)
    if device.type != "cuda":  # states are in host memory anyway
        return ctx_size, pools
    free_in_host = available_memory() - experts.host_bytes
    cold = cold_checkpoints(needs, config.host_checkpoints, free_in_host, config.ranks)
    return ctx_size, [replace(pool, cold=cold) if pool.is_state else pool for pool in pools]
