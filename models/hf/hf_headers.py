"""The headers of a Hugging Face checkpoint folder: config.json, tensor names and shapes, chat template.

It reads no weights and no tokenizer.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from quengine.errors import EngineError
from quengine.models.hf.json_file import read_json, read_text

_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}


def read_config(folder: Path) -> Mapping[str, Any]:
    """The parsed config.json of a checkpoint folder. Raises EngineError."""
    return read_json(folder / "config.json")


def read_template(folder: Path) -> str | None:
    """The checkpoint's chat template (its own file, else tokenizer_config.json), or None."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return read_text(own)
    if not (folder / "tokenizer_config.json").is_file():
        return None
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def safetensors_rows(folder: Path) -> tuple[tuple[Path, ...], list[tuple[str, str, tuple[int, ...], int]]]:
    """The folder's safetensors files, and (name, type, shape, bytes) of each tensor. Raises EngineError."""
    from safetensors import SafetensorError, safe_open

    paths = tuple(sorted(folder.glob("*.safetensors")))
    rows = []
    for path in paths:
        if not path.is_file():  # opening a named pipe would wait for a writer
            raise EngineError(f"{path}: not a regular file")
        try:
            with safe_open(path, framework="numpy") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a mapping)
                    part = handle.get_slice(name)
                    shape, kind = tuple(part.get_shape()), part.get_dtype()
                    rows.append((name, kind, shape, prod(shape) * _ITEM_BYTES.get(kind, 1)))
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{path}: {error}") from None
    return paths, rows
