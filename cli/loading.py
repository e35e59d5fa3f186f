"""A model for a command: pulled where it is not on this machine, then loaded, with progress on a terminal."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quengine.cli import interrupts
from quengine.cli.progress import ProgressLine
from quengine.config import EngineConfig
from quengine.models.hub.hub import ModelNotHereError, resolve_model
from quengine.models.hub.hub_name import ModelNameError
from quengine.models.hub.presets import base_model
from quengine.platform import collector, cuda_start

if TYPE_CHECKING:
    from quengine.llm import LLM


def fetch(name: str, offline: bool = False, projector: bool = True) -> Path:
    """The first file of a model that is pulled unless it is here, with its projector. Raises what `pull_model` does."""
    from huggingface_hub.utils import logging as hub_logging

    from quengine.models.hub.hub_pull import pull_model

    # What huggingface_hub logs, a retry for instance, looks like the engine's own lines.
    hub_logging.get_logger().handlers = logging.getLogger("quengine").handlers
    return pull_model(name, offline, projector, say=lambda line: typer.echo(line, err=True))


def offer_pull(name: str, projector: bool = True) -> None:
    """Ask on a terminal whether to pull a model that is not on this machine, and its projector.

    A name that stands for nothing is left to who opens the model, and says what it is for.

    Raises:
        ModelNotHereError: there is no terminal to ask on, or the answer is no; the message has the command to fetch it.
        EngineError: the pull failed.
    """
    try:
        resolve_model(name)
    except ModelNameError:
        return
    except ModelNotHereError:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        if not typer.confirm(f"{base_model(name)} is not on this machine. Pull it?", default=True, err=True):
            raise
        fetch(base_model(name), projector=projector)


logger = logging.getLogger("quengine.start")
"""Its lines, with those of loading, are the milestones of `benchmarks/startup.py`."""


def load_llm(model: str, config: EngineConfig) -> "LLM":
    """The model of `generate`, `chat` and `run`; what is not here is offered to be pulled.

    Raises what `LLM` and `offer_pull` do.
    """
    for needed in (model, config.draft_model):
        if needed is not None:
            offer_pull(str(needed), not config.no_mmproj and config.mmproj is None and needed == model)
    progress = ProgressLine()
    progress(f"loading {model}")
    if config.backend != "reference":
        cuda_start.begin(config.device, model)
    logger.debug("arguments read")
    with interrupts.at_once():
        from quengine.llm import LLM  # with torch, half a second or more by itself

    logger.debug("torch imported")
    try:
        llm = LLM(model, **vars(replace(config, progress=progress)))
    finally:
        progress.clear()
    collector.working()
    return llm


def chosen_device(device: str) -> str:
    """The device's name for torch; a line for the user where "auto" has to choose against a GPU."""
    from quengine.platform.device import choose_device

    chosen, notes = choose_device(EngineConfig(device=device))
    for note in notes:
        typer.echo(f"engine: {note}", err=True)
    return str(chosen)
