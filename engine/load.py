"""From a model's name to something that runs: device, backend, context, decoder, cache."""

import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quengine.block_manager import CachePool
from quengine.config import DEFAULT_CHUNK, EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.backend import Backend
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.moe.host_experts import HostExperts
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kv_cache import KVCache
from quengine.memory import CacheNeeds, choose_context, choose_pools, gib, workspace_bytes
from quengine.model_runner import ModelRunner
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.hub.hub import resolve_model
from quengine.platform.host_experts import (
    check_host_memory,
    expert_bytes,
    host_layers,
    split_tensors,
)
from quengine.platform.machine import available_memory, cpu_model, simd_features, thread_count
from quengine.platform.weight_loader import CudaTransfer, WeightLoader
from quengine.speculative.draft_length import draft_rows, draft_tokens
from quengine.speculative.draft_model import MOST_ROWS, DraftModel, DraftSteps, HostDraftSteps
from quengine.speculative.load_draft import open_draft

logger = logging.getLogger(__name__)

REFERENCE_BYTES_A_WEIGHT = 8
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and the one that drafts for it. `notes` are lines for the user: what was chosen and why."""

    path: Path
    checkpoint: Checkpoint
    runner: ModelRunner
    device: torch.device
    threads: int
    load_s: float
    notes: list[str]
    draft: DraftModel | None = None
    draft_checkpoint: Checkpoint | None = None

    @property
    def decoder(self) -> Decoder:
        return self.runner.decoder

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    def close(self) -> None:
        """Unmap the files."""
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
    draft = open_draft(config, checkpoint)
    if draft is not None:
        _log_checkpoint("draft model", draft)
    device, why = choose_device(config)
    torch.set_num_threads(threads)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    logger.info("device %s: %s; %s of memory free", device, _device_name(device), gib(free))
    ctx_size, pools = _choose_cache(config, checkpoint, draft, device, free)
    made = _Machine(config, device, threads, free, progress, _host_layers(config, checkpoint, device))
    runner = made.runner(checkpoint, ctx_size, pools)
    notes = [*checkpoint.notes, *why, _sizes_note(config, checkpoint, runner.cache)]
    if config.cpu_moe or config.n_cpu_moe:
        notes.append(_host_note(checkpoint, made.host_layers))
    if config.draft_ngram:
        notes.append(f"drafts by look-up of up to {config.draft_ngram} tokens in the text itself")
    drafts = None
    if draft is not None:
        drafts_ctx = min(ctx_size, draft.config.context_length)
        draft_pools = [CachePool(pools[0].num_blocks) for _ in draft.config.cache_groups]
        draft_runner = made.runner(draft, drafts_ctx, draft_pools, drafts=True)
        drafts = DraftModel(draft_runner, made.draft_steps(draft_runner))
        notes.append(_draft_note(draft, draft_runner.cache, ctx_size))
    load_s = time.perf_counter() - began
    for note in notes:
        logger.info("%s", note)
    logger.info(
        "loaded in %.2f s: %s backend, %d threads, up to %d tokens of a prompt at once",
        *(load_s, runner.decoder.backend.name, threads, runner.decoder.chunk_size),
    )
    return LoadedModel(path, checkpoint, runner, device, threads, load_s, notes, drafts, draft)


def _log_checkpoint(what: str, checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    types = ", ".join(f"{count} {name}" for name, count in checkpoint.types.items())
    logger.info(
        "%s %s: %r, %s, %d layers, %.1f million weights in %s; tensors: %s",
        *(what, checkpoint.path, config.name, config.architecture, config.block_count),
        *(checkpoint.weights / 1e6, gib(checkpoint.nbytes), types),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()} ({', '.join(simd_features())})"


@dataclass(frozen=True)
class _Machine:
    """The device that models are loaded onto, and how. host_layers: those whose experts stay in host memory."""

    config: EngineConfig
    device: torch.device
    threads: int
    free: int
    progress: Callable[[str], None] | None
    host_layers: int = 0

    def runner(
        self, checkpoint: Checkpoint, ctx_size: int, pools: Sequence[CachePool], drafts: bool = False
    ) -> ModelRunner:
        """The weights on the device, with a cache; `drafts`: of the model that drafts for the other."""
        config, device = self.config, self.device
        backend = _make_backend(config, checkpoint, device, self.threads, self.free)
        cache = KVCache.allocate(checkpoint.config, ctx_size, device, config.cache_type, pools)
        chunk_size = min(config.chunk_size or DEFAULT_CHUNK[device.type], ctx_size)
        layers = 0 if drafts else self.host_layers
        with _weights(checkpoint, device, config.mmap, self.progress, layers) as tensors:
            host = _host_experts(backend, self.threads, layers)
            decoder = Decoder(checkpoint.config, tensors, backend, ctx_size, chunk_size, host)
        if self.host_layers:
            return ModelRunner(decoder, cache)  # a step waits for the host: nothing to capture
        return _make_runner(config, decoder, cache, drafts)

    def draft_steps(self, runner: ModelRunner) -> DraftSteps:
        """Runs the decode steps of a draft model."""
        if self.device.type != "cuda" or self.host_layers:
            return HostDraftSteps(runner)
        from quengine.runners.cuda_graphs import CudaGraphs
        from quengine.speculative.device_drafts import DeviceDraftSteps

        assert isinstance(runner.graphs, CudaGraphs)
        return DeviceDraftSteps(runner.graphs)


def _choose_cache(
    config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None, device: torch.device, free: int
) -> tuple[int, list[CachePool]]:
    """Positions of a sequence, and the pools of the cache's blocks."""
    shape, cache_type = checkpoint.config, config.cache_type
    chunk = config.chunk_size or DEFAULT_CHUNK[device.type]
    if config.parallel == 1:
        chunk = min(chunk, config.ctx_size or shape.context_length)
    rows = max(config.parallel, draft_rows(config, device.type))
    sizes = expert_bytes(checkpoint.tensors) if device.type == "cuda" else {}
    kept = _host_layers(config, checkpoint, device)
    on_host = sum(size for layer, size in sizes.items() if layer < kept)
    check_host_memory(on_host, kept, available_memory())
    weights = checkpoint.nbytes - on_host
    workspace = workspace_bytes(device.type, shape, weights, chunk, rows)
    if draft is not None:
        workspace += workspace_bytes(device.type, draft.config, draft.nbytes, chunk, rows, draft=True)
        weights += draft.nbytes
    needs = CacheNeeds(shape, chunk, None if draft is None else draft.config)
    room = free - weights - workspace
    workspace += 2 * sum(needs.block_bytes(cache_type))  # the padding blocks, and as much again
    further = {layer: size for layer, size in sizes.items() if layer >= kept}
    ctx_size = choose_context(
        needs, config.ctx_size, weights, free, str(device), cache_type, workspace, further
    )
    return ctx_size, choose_pools(needs, ctx_size, config.parallel, room, cache_type)


def _host_layers(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> int:
    """Layers whose experts stay in host memory; none where everything runs on the CPU."""
    layers = host_layers(config, checkpoint.config)
    return layers if device.type == "cuda" else 0


def _host_experts(backend: Backend[Any], threads: int, layers: int) -> HostExperts | None:
    if not layers:
        return None
    from quengine.kernels.cpu.backend import CpuBackend

    return HostExperts(backend, CpuBackend(threads), layers)


def _host_note(checkpoint: Checkpoint, layers: int) -> str:
    if not layers:
        return "the whole model runs on the CPU, its experts too: --cpu-moe and --n-cpu-moe change nothing"
    sizes = expert_bytes(checkpoint.tensors)
    held = sum(size for layer, size in sizes.items() if layer < layers)
    return (
        f"experts of {sum(layer < layers for layer in sizes)} of {len(sizes)} layers, {gib(held)}, stay in host memory "
        f"and are computed by the CPU"
    )


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


def choose_device(config: EngineConfig) -> tuple[torch.device, list[str]]:
    """The device to run on, and a line for the user where "auto" had to choose against a GPU.

    Raises:
        CannotRunError: a CUDA device was requested and cannot be used; the message says why.
        EngineError: the reference backend was requested on a CUDA device.
    """
    requested = config.device.startswith("cuda")
    if config.backend == "reference":
        if requested:
            raise EngineError(f"backend reference runs on the CPU, not on {config.device}; use --device cpu")
        return torch.device("cpu"), []
    if config.device == "cpu":
        return torch.device("cpu"), []
    problem = _cuda_problem(config.device)
    if problem is None:
        index = int(config.device.partition(":")[2] or 0) if requested else 0
        return torch.device("cuda", index), []
    if requested:
        raise CannotRunError(f"device {config.device} cannot be used: {problem}; use --device cpu")
    logger.info("device auto takes the CPU: %s", problem)
    # A machine without any GPU needs no explanation; one whose GPU is left idle does.
    return torch.device("cpu"), [f"device auto took the CPU: {problem}"] if torch.cuda.is_available() else []


def _cuda_problem(device: str) -> str | None:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device and driver here (see nvidia-smi)"
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
    if index >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices, numbered from 0"
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        return f"{name} has compute capability {major}.{minor}, and the kernels need 8.0"
    return None


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
    host, rest = split_tensors(checkpoint.tensors, host_layers)
    nbytes = sum(tensor.nbytes for tensor in rest.values())
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

        announce_compilation(torch.cuda.get_device_name(device))
        return CudaBackend(device, batch_invariant=config.deterministic)
    from quengine.kernels.cpu.backend import CpuBackend

    return CpuBackend(threads)


def _make_runner(config: EngineConfig, decoder: Decoder, cache: KVCache, drafts: bool) -> ModelRunner:
    device = decoder.backend.device
    if config.backend == "reference":
        return ModelRunner(decoder, cache)
    rows = max(config.parallel, draft_rows(config, device.type))
    if device.type == "cuda":
        return _cuda_runner(config, decoder, cache, rows, drafts)
    from quengine.kernels.cpu.ops import sampling
    from quengine.runners.cpu_steps import CpuSteps

    # A dozen rows of one prompt keep the processor as busy as those of many.
    return ModelRunner(
        decoder, cache, CpuSteps(decoder, cache, rows), choose=sampling.sample, packs_prompts=False
    )


def _cuda_runner(
    config: EngineConfig, decoder: Decoder, cache: KVCache, rows: int, drafts: bool
) -> ModelRunner:
    from quengine.runners.compile_kernels import compile_kernels
    from quengine.runners.cuda_graphs import PENDING, CudaGraphs
    from quengine.runners.device_decode import DeviceDecoder
    from quengine.runners.graph_keys import DECODE_ROWS

    pending = PENDING
    if drafts:
        # As many jobs as a step has rows to check drafts, or sequences; at first with the tokens they make up for.
        rows = MOST_ROWS * min(config.parallel, draft_rows(config, "cuda"))
        pending = draft_tokens(config, "cuda")
    graphs = CudaGraphs(
        decoder,
        cache,
        min(DECODE_ROWS[-1], rows),
        config.chunk_size or DEFAULT_CHUNK["cuda"],
        shares_sequences=config.speculates,
        pending=pending,
    )
    compile_kernels(graphs)
    return ModelRunner(decoder, cache, graphs, None if drafts else DeviceDecoder(graphs))
