"""Where what is kept between conversations lies."""

import os
from pathlib import Path


def state_folder() -> Path:
    """XDG_STATE_HOME/quengine, ~/.local/state/quengine by default. Raises RuntimeError without a home folder."""
    return (Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "quengine").expanduser()
