"""Server process: what each replica is started with: its devices, its share of the threads, the first one's context."""

import os
from collections.abc import Callable
from dataclasses import replace

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.platform.machine import thread_count
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.processes.server_engine import ProcessEngine
from quengine.serve.replicas.replica_engine import ReplicaEngine
from quengine.serve.settings import ServerSettings


def check_replicas(settings: ServerSettings, config: EngineConfig) -> None:
    """Raises EngineError where the options name devices that so many engines cannot each have."""
    if settings.replicas == 1:
        return
    named = f"--devices {config.devices}" if config.devices is not None else f"--device {config.device}"
    if config.devices is not None or config.device.startswith("cuda:"):
        raise EngineError(
            f"{named}: --replicas {settings.replicas} takes the first GPUs, {config.tensor_parallel} each; choose "
            f"others with CUDA_VISIBLE_DEVICES"
        )


def start_replicas(
    spec: ModelSpec,
    progress: Callable[[str], None] = lambda _: None,
    make_room: Callable[[int, int, str], bool] = lambda *_: False,
) -> ReplicaEngine:
    """The engines of a model, each in a process of its own; made in the worker's thread. Raises as ProcessEngine."""
    count = spec.settings.replicas
    first: ProcessEngine | None = None

    def start(number: int) -> ProcessEngine:
        nonlocal first
        try:
            made = _start(spec, number, first, lambda line: progress(f"replica {number}: {line}"), make_room)
        except EngineError as error:
            raise type(error)(f"replica {number} of --replicas {count}: {error}") from None
        first = first or made
        return made

    engine = ReplicaEngine(start, count)
    facts = engine.model.facts
    kind, ranks = str(facts["device"]).partition(":")[0], spec.config.tensor_parallel
    each = "a GPU" if ranks == 1 else f"{ranks} GPUs"
    place = f"on {each} each" if kind == "cuda" else "that share the threads of the CPU"
    engine.model.facts = {**facts, "memory": count * facts["memory"]}
    engine.model.notes = (*engine.model.notes, f"{count} replicas, {place}")
    return engine


def _start(
    spec: ModelSpec,
    number: int,
    first: ProcessEngine | None,
    progress: Callable[[str], None],
    make_room: Callable[[int, int, str], bool],
) -> ProcessEngine:
    """The engine of a number. first: the one that was made first, whose kind of device and context the others have."""
    config, count = spec.config, spec.settings.replicas
    config = replace(config, threads=max(1, thread_count(config.threads) // count))
    text = None
    if first is not None:
        kind = str(first.model.facts["device"]).partition(":")[0]
        config, text = replace(config, device=kind, ctx_size=first.model.ctx_size), first.text
    gpus = visible_gpus(number, config.tensor_parallel)
    return ProcessEngine(spec.model, config.values(), progress, make_room, text, gpus)


def visible_gpus(number: int, ranks: int) -> str:
    """CUDA_VISIBLE_DEVICES of a replica: its part of those that this process sees; empty where there are too few."""
    mine = range(number * ranks, (number + 1) * ranks)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, mine) if given is None else given.split(",")[mine.start : mine.stop]
    return ",".join(names)
