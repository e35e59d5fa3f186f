"""Presets: models under the user's own names, with options; each is a TOML file in the user's configuration folder.

This module finds, reads and writes them as tables; the options' dataclasses (`quengine.options`) define the keys.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quengine.errors import EngineError
from quengine.models.hub.hub_name import ModelNameError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_CONTROL = {code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F) if code not in (0x09, 0x0A)}


def presets_folder() -> Path:
    """XDG_CONFIG_HOME/quengine/presets, ~/.config/quengine/presets by default.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return (Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "quengine/presets").expanduser()


def preset_path(name: str) -> Path:
    """Where a preset of that name is, or would be. Raises ModelNameError for what cannot be the name of one."""
    if not _NAME.fullmatch(name) or len(name) > 100 or name.lower().endswith((".gguf", ".toml")):
        raise ModelNameError(
            f"{name[:100]}: no name for a preset: letters, digits, '.', '_' and '-', at most 100, no file's ending"
        )
    try:
        return presets_folder() / f"{name}.toml"
    except RuntimeError as error:
        raise ModelNameError(f"{name}: {error}") from None


def synthetic_preset(name: str) -> dict[str, Any] | None:
    """The table of a preset; None if there is none, or if a file or folder has that name and so takes precedence.

    Raises:
        ModelNameError: it cannot be read.
    """
    here = Path(name)
    try:
        known = preset_path(name).is_file() and not here.is_file() and not (here / "config.json").is_file()
    except (ModelNameError, OSError):
        return None
    return read_stored(name) if known else None


def read_stored(name: str) -> dict[str, Any]:
    """The table of the preset of that name. Raises ModelNameError where it cannot be read."""
    path = preset_path(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNameError(f"preset {name}: cannot read {path}: {error}") from None
    if not isinstance(table.get("model"), str):
        raise ModelNameError(f"preset {name}: {path} names no model")
    return table


def base_model(name: str) -> str:
    """The model of the preset `name`; `name` itself if there is no such preset."""
    table = synthetic_preset(name)
    return name if table is None else str(table["model"])


def preset_names() -> list[str]:
    """The names of all presets, sorted; none where their folder cannot be read."""
    try:
        return sorted(path.stem for path in presets_folder().glob("*.toml") if _NAME.fullmatch(path.stem))
    except (OSError, RuntimeError):
        return []


def write_preset(name: str, table: Mapping[str, Any]) -> None:
    """Write a preset, beside and renamed. Raises EngineError."""
    from quengine.models.gguf.whole_file import beside

    path = preset_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as file:
            file.write(toml_text(table).encode())
    except OSError as error:
        raise EngineError(f"cannot write the preset {path}: {error.strerror or error}") from None


def toml_text(table: Mapping[str, Any]) -> str:
    """A TOML document of numbers, texts, lists and tables of these (https://toml.io/en/v1.0.0)."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items())


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())}}}"
    return repr(value)


def _text(text: str) -> str:
    """A string in TOML; one of several lines stands between three quotation marks, so that it can be read and
    edited."""
    escaped = text.replace("\\", "\\\\").translate(_CONTROL)
    if "\n" in text:
        return '"""\n' + escaped.replace('""', '"\\"') + '"""'
    return '"' + escaped.replace('"', '\\"') + '"'
