"""What a preset's table means: its model, options by the names of their fields or flags, messages, a license.

    model = "smollm2-135m"                  # what --model takes; a path is relative to the file
    system = "You are a pirate."
    ctx_size = 4096
    temp = 0.7
    stop = ["###"]
    template_file = "chat.jinja"
    lora = ["style.gguf:0.5"]
    messages = [{ role = "user", content = "hi" }, { role = "assistant", content = "Ahoy." }]

A stored preset (`quengine.models.hub.presets`) has the template's text in place of a file, and absolute paths.
"""

from collections.abc import Mapping
from typing import Any

from quengine.config import EngineConfig
from quengine.errors import EngineError, shown
from quengine.models.hub.presets import synthetic_preset
from quengine.options import table_values
from quengine.request.chat_options import ChatOptions
from quengine.request.sampling_params import SamplingParams

GROUPS = (SamplingParams, EngineConfig, ChatOptions)
"""The groups whose fields a preset may have."""
_ROLES = ("system", "user", "assistant")


def preset_values(name: str) -> dict[type[Any], dict[str, Any]]:
    """The options of a preset by their group; none if no preset has this name. Raises EngineError if it is wrong."""
    table = synthetic_preset(name)
    return {} if table is None else table_options(table, f"preset {name}")


def table_options(table: Mapping[str, Any], where: str) -> dict[type[Any], dict[str, Any]]:
    """The options of a preset's table by their group, checked; `where` begins the errors.

    Raises:
        EngineError: an option is unknown, or its value is not one that it takes.
    """
    values = table_values({k: v for k, v in table.items() if k not in PLAIN_KEYS}, GROUPS, where)
    if "messages" in table:
        values.setdefault(ChatOptions, {})["messages"] = _messages(table["messages"], where)
    for key in ("model", "license"):
        if not isinstance(table.get(key, ""), str):
            raise EngineError(f"{where}: {key} must be text")
    for group, given in values.items():
        try:
            group(**given)
        except EngineError as error:
            raise EngineError(f"{where}: {error}") from None
    return values


PLAIN_KEYS = ("model", "messages", "license")
"""Keys that are no option of a group."""


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    for message in value if isinstance(value, list) else [value]:
        good = isinstance(message, dict) and message.get("role") in _ROLES
        if not good or not isinstance(message.get("content"), str) or len(message) > 2:
            rule = f"each must be {{ role = ..., content = text }}, the role {', '.join(_ROLES)}"
            raise EngineError(f"{where}: messages: {shown(message)}: {rule}")
    return tuple(value)
