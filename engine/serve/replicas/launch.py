"""Server process: starts replicas, each with its devices, its share of the threads, and the first one's context."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.platform.machine import thread_count
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.processes.server_engine import Place, ProcessEngine
from quengine.serve.processes.shared_region import BlockRegion
from quengine.serve.replicas.replica_engine import ReplicaEngine
from quengine.serve.settings import ServerSettings

PART_BYTES = 64 << 20
"""Of a part of the memory between engines (shared_region.py): 512 tokens of a model of 7 billion weights."""


def check_replicas(settings: ServerSettings, config: EngineConfig) -> None:
    """Raises EngineError where the options do not go with several engines."""
    if settings.engines == 1:
        return
    given = (
        f"--replicas {settings.replicas}"
        if not settings.prefill_replicas
        else f"--prefill-replicas {settings.prefill_replicas}"
    )
    named = f"--devices {config.devices}" if config.devices is not None else f"--device {config.device}"
    if config.devices is not None or config.device.startswith("cuda:"):
        raise EngineError(
            f"{named}: {given} takes the first GPUs, {_ranks(config)} each; choose others with "
            f"CUDA_VISIBLE_DEVICES"
        )
    if settings.prefill_replicas and _ranks(config) > 1:
        raise EngineError(
            f"{given}: keys and values that --tensor-parallel {_ranks(config)} parts are not handed over; "
            f"leave one of them out"
        )
    if settings.prefill_replicas and config.draft_model is not None:
        raise EngineError(
            f"{given}: keys and values of --draft-model {config.draft_model} are not handed over; leave one of them out"
        )
    if settings.prefill_replicas and config.draft_mtp:
        raise EngineError(
            f"{given}: hidden rows, which --draft-mtp {config.draft_mtp} reads, are not handed over; leave one of them "
            "out"
        )


def start_replicas(
    spec: ModelSpec,
    progress: Callable[[str], None] = lambda _: None,
    make_room: Callable[[int, int, str], bool] = lambda *_: False,
) -> ReplicaEngine:
    """The engines of a model, each in a process of its own; made in the worker's thread. Raises as ProcessEngine."""
    settings, regions = spec.settings, list[int]()
    first: ProcessEngine | None = None

    def start(number: int) -> ProcessEngine:
        nonlocal first
        place = _place(spec, number, regions, first)
        try:
            made = ProcessEngine(
                spec.model,
                _config(spec, first).values(),
                lambda line: progress(f"replica {number}: {line}"),
                make_room,
                place,
            )
        except EngineError as error:
            on_gpu = first is not None and str(first.model.facts["device"]).startswith("cuda")
            which = f"replica {number} of {settings.engines}{f' (GPU {place.gpus})' if on_gpu else ''}"
            raise type(error)(f"{which}: {error}") from None
        first = first or made
        return made

    regions += [BlockRegion.make(PART_BYTES) for _ in range(settings.prefill_replicas)]
    engine = ReplicaEngine(start, settings.replicas, regions)
    facts = engine.model.facts
    engine.model.facts = {**facts, "memory": settings.engines * facts["memory"]}
    engine.model.notes = (*engine.model.notes, _note(spec, str(facts["device"])))
    return engine


def _note(spec: ModelSpec, device: str) -> str:
    count, more, ranks = spec.settings.replicas, spec.settings.prefill_replicas, _ranks(spec.config)
    each = "a GPU" if ranks == 1 else f"{ranks} GPUs"
    place = f"on {each} each" if device.startswith("cuda") else "that share the threads of the CPU"
    beside = f", and {more} for long prompts" if more else ""
    return f"{count} replica{'s' * (count > 1)}{beside}, {place}"


def _config(spec: ModelSpec, first: ProcessEngine | None) -> EngineConfig:
    """The options of an engine. first: the engine made first; all others have its kind of device and its context."""
    config = spec.config
    config = replace(config, threads=max(1, thread_count(config.threads) // spec.settings.engines))
    if spec.settings.prefill_replicas:  # hidden rows are not handed over
        config = replace(config, draft_mtp=0)
    if first is None:
        return config
    kind = str(first.model.facts["device"]).partition(":")[0]
    return replace(config, device=kind, ctx_size=first.model.ctx_size)


def _place(spec: ModelSpec, number: int, regions: Sequence[int], first: ProcessEngine | None) -> Place:
    sender = number - spec.settings.replicas
    return Place(
        None if first is None else first.text,
        visible_gpus(number, _ranks(spec.config)),
        tuple(regions) if sender < 0 else (regions[sender],),
        sends=sender >= 0,
    )


def _ranks(config: EngineConfig) -> int:
    """GPUs of a replica."""
    return config.tensor_parallel or 1


def visible_gpus(number: int, ranks: int) -> str:
    """CUDA_VISIBLE_DEVICES of a replica: its share of the GPUs that this process sees; empty if there are too few."""
    mine = range(number * ranks, (number + 1) * ranks)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, mine) if given is None else given.split(",")[mine.start : mine.stop]
    return ",".join(names)
