"""`engine serve`: the APIs of OpenAI, Anthropic, llama-server and Ollama over HTTP, and a chat page."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quengine.cli.flags import Model, takes_options
from quengine.cli.progress import ProgressLine
from quengine.config import EngineConfig
from quengine.platform import collector
from quengine.serve.settings import ServerSettings

if TYPE_CHECKING:
    from quengine.serve.processes.shared_engine import Engine


@takes_options
def serve(model: Model, settings: ServerSettings, config: EngineConfig) -> None:
    """Serve a model over HTTP: OpenAI's API, Anthropic's, llama-server's, Ollama's, and a chat page."""
    from quengine.models.hub.hub import resolve_model
    from quengine.serve.server import Server

    for needed in (model, config.draft_model):  # what is wrong with a name is said before anything listens
        if needed is not None:
            resolve_model(str(needed))
    settings = replace(settings, model_names=settings.model_names or (_name(model),))
    template = settings.chat.source()
    config = replace(config, parallel=settings.parallel, reuse_prefix=True, chat_template=template)
    Server(settings, lambda: _make_engine(model, config), _print_status).run_until_stopped()


def _make_engine(model: str, config: EngineConfig) -> "Engine":
    from quengine.serve.processes.server_engine import ProcessEngine

    progress = ProgressLine()
    try:
        return ProcessEngine(model, config.values(), progress)
    finally:
        progress.clear()
        collector.working()


def _print_status(line: str) -> None:
    print(f"engine: {line}", file=sys.stderr, flush=True)


def _name(model: str) -> str:
    """What requests call a model without --alias: an alias or hub name itself, of a path the file's name."""
    if model.startswith("hf:") or not (Path(model).suffix or "/" in model):
        return model
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name or path.resolve().name
