"""Loading a model for a command, with a line of progress on a terminal."""

from dataclasses import replace
from typing import TYPE_CHECKING

from quengine.cli.progress import ProgressLine
from quengine.config import EngineConfig
from quengine.platform import collector

if TYPE_CHECKING:
    from quengine.llm import LLM


def load_llm(model: str, config: EngineConfig) -> "LLM":
    """The model of `generate` and `chat`. Raises what `LLM` does."""
    from quengine.llm import LLM

    progress = ProgressLine()
    llm = LLM(model, **vars(replace(config, progress=progress)))
    progress.clear()
    collector.working()
    return llm
