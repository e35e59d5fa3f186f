"""Server process: what each replica is started with: its devices, its share of the threads, the first one's context."""

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
    facts, devices = engine.model.facts, engine.devices
    engine.model.facts = {**facts, "device": ", ".join(devices), "memory": count * facts["memory"]}
    engine.model.notes = (*engine.model.notes, f"{count} replicas, on {' and '.join(dict.fromkeys(devices))}")
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
    if first is None:
        return ProcessEngine(spec.model, config.values(), progress, make_room)
    config = replace(config, ctx_size=first.model.ctx_size)
    if str(first.model.facts["device"]).startswith("cuda"):
        config = replace(config, **_devices(number, config.tensor_parallel))
    return ProcessEngine(spec.model, config.values(), progress, make_room, first.text)


def _devices(number: int, ranks: int) -> dict[str, str]:
    """The options that name the CUDA devices of a replica."""
    if ranks == 1:
        return {"device": f"cuda:{number}"}
    return {"device": "cuda", "devices": ",".join(str(number * ranks + rank) for rank in range(ranks))}
