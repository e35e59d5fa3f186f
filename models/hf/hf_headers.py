"""The headers of a Hugging Face checkpoint folder: config.json, tensor names and shapes, chat template.

It reads no weights and no tokenizer.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from quengine.errors import EngineError
from quengine.models.hf.json_file import read_json, read_lenient_text

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

DEFAULT_TEMPLATE = "default"
"""What a model's chat template is called among several."""

Row: TypeAlias = tuple[str, str, tuple[int, ...], int]


def read_config(folder: Path) -> Mapping[str, Any]:
    """The parsed config.json of a checkpoint folder. Raises EngineError."""
    return read_json(folder / "config.json")


def read_tokenizer_config(folder: Path) -> Mapping[str, Any]:
    """The parsed tokenizer_config.json, empty where there is none. Raises EngineError.

    If it does not list the added tokens, as in older releases of transformers, the keys of special_tokens_map.json are
    added and take precedence.
    """
    path, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    config = read_json(path) if path.is_file() else {}
    if "added_tokens_decoder" in config or not older.is_file():
        return config
    return {**config, **read_json(older)}


def read_templates(folder: Path) -> dict[str, str]:
    """The checkpoint's chat templates by name. Raises EngineError.

    They come from tokenizer_config.json (one template, or a list of {"name", "template"}), or if it has none from
    chat_template.json, which is for models with vision. Files with the names of templates take precedence.
    """
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        value = read_json(path).get("chat_template") if not found and path.is_file() else None
        entries = [{"name": DEFAULT_TEMPLATE, "template": value}] if isinstance(value, str) else value
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and {"name", "template"} <= entry.keys():
                found[str(entry["name"])] = str(entry["template"])
    files = {DEFAULT_TEMPLATE: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    return found | {name: read_lenient_text(file) for name, file in files.items() if file.is_file()}


def safetensors_rows(folder: Path) -> tuple[tuple[Path, ...], list[Row]]:
    """The folder's safetensors files, and (name, type, shape, bytes) of each tensor. Raises EngineError.

    Blocks and scales that make up a tensor in MXFP4 (`hf_parts`) are that tensor.
    """
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
    return paths, _with_packed(rows)


def _with_packed(rows: list[Row]) -> list[Row]:
    names = {row[0] for row in rows}
    packed = {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
    packed &= {name.removesuffix("_scales") for name in names if name.endswith("_scales")}
    found = []
    for row in rows:
        name, _, shape, nbytes = row
        whole, _, half = name.rpartition("_")
        if whole in packed and half == "blocks":  # a byte of scale to 16 of codes, each of two weights
            found.append((whole, "MXFP4", (*shape[:-2], 2 * prod(shape[-2:])), nbytes // 16 * 17))
        elif whole not in packed or half != "scales":
            found.append(row)
    return found
