"""Loading a model for a command, with a line of progress on a terminal."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from quengine.cli import interrupts
from quengine.cli.progress import ProgressLine
from quengine.cli.pulling import offer_pull
from quengine.config import EngineConfig
from quengine.platform import collector, cuda_start

if TYPE_CHECKING:
    from quengine.llm import LLM

logger = logging.getLogger("quengine.start")
"""Its lines, with those of loading, are the milestones of `benchmarks/startup.py`."""


def load_llm(model: str, config: EngineConfig) -> "LLM":
    """The model of `generate`, `chat` and `run`; what is not here is offered to be pulled.

    Raises what `LLM` and `offer_pull` do.
    """
    for needed in (model, config.draft_model):
        if needed is not None:
            offer_pull(str(needed))
    progress = ProgressLine()
    progress(f"loading {model}")
    if config.backend != "reference":
        cuda_start.begin(config.device)
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
