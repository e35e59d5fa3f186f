"""From a model's name to something that runs: device, backend, context, decoder, cache."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quengine.config import EngineConfig
from quengine.errors import CannotRunError
from quengine.kernels.backend import Backend
from quengine.kv_cache import KVCache
from quengine.machine import available_memory, physical_cores
from quengine.memory import choose_context, gib
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.hub import resolve_model

REFERENCE_BYTES_A_WEIGHT = 8


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `notes` are lines for the user: what was chosen and why."""

    path: Path
    checkpoint: Checkpoint
    decoder: Decoder
    cache: KVCache
    device: str
    threads: int
    load_s: float
    notes: list[str]


def load_model(model: str | Path, config: EngineConfig) -> LoadedModel:
    """Resolve, open, check and load a model.

    Raises:
        EngineError: no such model, or its file is wrong.
        CannotRunError: no such device here, or too little memory.
    """
    began = time.perf_counter()
    path = resolve_model(str(model))
    checkpoint = open_checkpoint(path)
    notes = list(checkpoint.notes)
    device = _choose_device(config, notes)
    threads = config.threads or physical_cores()
    torch.set_num_threads(threads)
    free = available_memory()
    backend = _make_backend(config, checkpoint, threads, free)
    shape = checkpoint.config
    ctx_size = choose_context(shape, config.ctx_size, checkpoint.nbytes, free, device)
    cache = KVCache.allocate(shape, ctx_size, backend.device)
    cut = (
        ""
        if config.ctx_size or ctx_size == shape.context_length
        else f", cut from {shape.context_length} to fit"
    )
    notes.append(
        f"context {ctx_size} tokens{cut}, cache {gib(cache.nbytes)}, weights {gib(checkpoint.nbytes)}"
    )
    decoder = Decoder(shape, checkpoint.tensors, backend, ctx_size, min(config.chunk_size, ctx_size))
    load_s = time.perf_counter() - began
    return LoadedModel(path, checkpoint, decoder, cache, device, threads, load_s, notes)


def _choose_device(config: EngineConfig, notes: list[str]) -> str:
    if config.device.startswith("cuda"):
        raise CannotRunError(
            f"device {config.device} was asked for, but no CUDA backend is in this version; use --device cpu"
        )
    return "cpu"


def _make_backend(config: EngineConfig, checkpoint: Checkpoint, threads: int, free: int) -> Backend[Any]:
    if config.backend == "reference":
        from quengine.kernels.reference import ReferenceBackend

        expanded = REFERENCE_BYTES_A_WEIGHT * checkpoint.weights
        return ReferenceBackend(keep=expanded < free // 2)
    from quengine.kernels.cpu_backend import CpuBackend

    return CpuBackend(threads)
