"""Options of a model in --models-dir that a client has created: a TOML file beside the model's own.

Its keys are those of a preset (`quengine.request.preset`) that change conversations and sampling.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quengine.errors import EngineError
from quengine.models.hub.hub_name import without_shard
from quengine.options import flagged, spellings
from quengine.platform.input_files import read_text
from quengine.request.go_template import UnknownFormError, jinja_of
from quengine.request.preset import table_options
from quengine.request.sampling_params import SamplingParams

_SUFFIX = ".options.toml"
_MOST_BYTES = 1 << 20
_OTHER_NAMES = {"num_ctx": "ctx_size", "num_predict": "max_tokens", "num_keep": "n_keep"}
"""Ollama's parameters that have another name here."""
_SAMPLING = frozenset(name for field in flagged(SamplingParams) for name in spellings(field))


def options_name(file: str) -> str:
    """The name of the options' file beside the first (or only) file of a model."""
    return f"{without_shard(file)}{_SUFFIX}"


def read_options(file: Path) -> dict[str, Any]:
    """The table beside a model's file, or an empty one. Raises EngineError where it cannot be read as TOML."""
    beside = file.with_name(options_name(file.name))
    if file.is_dir() or not beside.exists():
        return {}
    try:
        return tomllib.loads(read_text(beside, "--models-dir: cannot read", _MOST_BYTES))
    except tomllib.TOMLDecodeError as error:
        raise EngineError(f"{beside}: it is no TOML: {error}") from None


def made_options(
    system: str, template: str, parameters: Mapping[str, Any], messages: list[Any], ignored: list[str]
) -> dict[str, Any]:
    """The table of what a client gives; `ignored` gets the names of parameters that there are not.

    Raises:
        EngineError: a value is not one that its option takes, or the template is in a form that is not translated.
    """
    table: dict[str, Any] = {}
    for given, value in parameters.items():
        name = _OTHER_NAMES.get(given, given)
        if name not in _SAMPLING and name != "ctx_size":
            ignored.append(f"parameters.{given}")
            continue
        if name == "max_tokens" and isinstance(value, int) and value < 0:  # until the context is full
            value = -1
        table[name] = [value] if name == "stop" and isinstance(value, str) else value
    if system:
        table["system"] = system
    if messages:
        table["messages"] = messages
    if template:
        try:
            table["template"] = template if "{%" in template else jinja_of(template)
        except UnknownFormError as unknown:
            raise EngineError(f"template has {unknown}, which is not translated") from None
    table_options(table, "the new model")
    return table
