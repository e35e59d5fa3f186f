"""Fetching a model for a command: with progress on standard error, and offered where a command lacks its model."""

import logging
import sys
from pathlib import Path

import typer

from quengine.models.hub.hub import ModelNotHereError, resolve_model
from quengine.models.hub.hub_name import ModelNameError
from quengine.models.hub.presets import base_model


def fetch(name: str, offline: bool = False) -> Path:
    """The first file of a model that is pulled unless it is here. Raises what `pull_model` does."""
    from huggingface_hub.utils import logging as hub_logging

    from quengine.models.hub.hub_pull import pull_model

    # What huggingface_hub logs, a retry for instance, looks like the engine's own lines.
    hub_logging.get_logger().handlers = logging.getLogger("quengine").handlers
    return pull_model(name, offline, say=lambda line: typer.echo(line, err=True))


def offer_pull(name: str) -> None:
    """Ask on a terminal whether to pull a model that is not on this machine.

    A name that stands for nothing is left to who opens the model, and says what it is for.

    Raises:
        ModelNotHereError: nobody can be asked, or the answer is no; the message has the command to fetch it.
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
        fetch(base_model(name))
