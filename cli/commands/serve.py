"""`engine serve`: the APIs of OpenAI, Anthropic, llama-server and Ollama over HTTP, and a chat page."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quengine.cli.flags import takes_options
from quengine.cli.progress import ProgressLine
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.options import MODEL_HELP, Flag
from quengine.platform import collector
from quengine.serve.settings import ServerSettings

if TYPE_CHECKING:
    from quengine.serve.models.model_spec import ModelSpec
    from quengine.serve.models.residency import MakeRoom
    from quengine.serve.processes.shared_engine import Engine


@takes_options
def serve(
    *,
    model: Annotated[
        str | None, Flag("-m --model", MODEL_HELP, show_default=False, completes="model")
    ] = None,
    settings: ServerSettings,
    config: EngineConfig,
) -> None:
    """Serve models over HTTP: OpenAI's API, Anthropic's, llama-server's, Ollama's, and a chat page.

    One model (-m), or those of --models-dir and --models-preset, each loaded when a request names it.
    """
    if settings.ray.used:
        _serve_on_ray(model, settings, config)
        return
    from quengine.models.hub.hub import resolve_model
    from quengine.serve.models.preset_file import find_specs
    from quengine.serve.replicas.launch import check_replicas
    from quengine.serve.server import Server
    from quengine.serve.tools.tool_routes import ToolRoom

    for needed in (model, config.draft_model):  # a wrong name is reported before anything listens
        if needed is not None:
            resolve_model(str(needed))
    if model is not None:
        settings = replace(settings, model_names=settings.model_names or (served_name(model),))
    elif not settings.models.several:
        raise EngineError("no model is named: give -m MODEL, or --models-dir or --models-preset for several")
    check_replicas(settings, config)
    rooms = [ToolRoom(settings.tools, print_status)]
    given = [] if model is None else [served_spec(model, settings, config)]
    if settings.models.several:
        server = Server(
            settings, load_served, print_status, lambda: [*given, *find_specs(settings, config)], rooms
        )
    else:
        server = Server(settings, lambda _, *calls: load_served(given[0], *calls), print_status, None, rooms)
    server.run_until_stopped()


def _serve_on_ray(model: str | None, settings: ServerSettings, config: EngineConfig) -> None:
    from quengine.serve.models.model_spec import ModelSpec
    from quengine.serve.models.preset_file import engine_config
    from quengine.serve.ray.cluster import serve_on_ray

    if model is None:
        raise EngineError("no model is named: --ray deploys one, give -m MODEL")
    settings = replace(settings, model_names=settings.model_names or (served_name(model),))
    serve_on_ray(ModelSpec(settings, engine_config(settings, config), model), print_status)


def served_spec(model: str, settings: ServerSettings, config: EngineConfig) -> "ModelSpec":
    from quengine.models.hub.hub import resolve_model
    from quengine.serve.models.model_spec import ModelSpec, weight_bytes
    from quengine.serve.models.preset_file import engine_config

    path = resolve_model(model)
    return ModelSpec(
        settings, engine_config(settings, config), model, path, weight_bytes(path), at_start=True
    )


def load_served(spec: "ModelSpec", make_room: "MakeRoom", check: Callable[[], None]) -> "Engine":
    from quengine.serve.processes.server_engine import ProcessEngine
    from quengine.serve.replicas.launch import start_replicas

    line = ProgressLine()

    def progress(text: str) -> None:
        check()
        line(text)

    try:
        if spec.settings.engines > 1:
            return start_replicas(spec, progress, make_room)
        return ProcessEngine(spec.model, spec.config.values(), progress, make_room)
    finally:
        line.clear()
        collector.working()


def print_status(line: str) -> None:
    if ProgressLine.on_screen:
        ProgressLine().clear()
    print(f"engine: {line}", file=sys.stderr, flush=True)


def served_name(model: str) -> str:
    """What requests call a model without --alias: an alias or hub name itself, of a path the file's name."""
    if model.startswith("hf:") or not (Path(model).suffix or "/" in model):
        return model
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name or path.resolve().name
