"""Ollama's Modelfiles (docs/modelfile.md and parser/parser.go there) as the tables of presets."""

import re
from collections.abc import Iterator
from typing import Any

from quengine.errors import EngineError
from quengine.models.hub.hub_name import own_name
from quengine.options import flagged, spellings, value_type
from quengine.request.go_template import UnknownFormError, jinja_of
from quengine.request.preset import GROUPS

_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+")
_VALUE = re.compile(r'"""(.*?)"""|"(.*?)"[ \t]*(?=\n|$)|([^\n]*)', re.DOTALL)
_OPTIONS = {
    "num_ctx": "ctx_size",
    "num_predict": "max_tokens",
    "num_thread": "threads",
    "use_mmap": "mmap",
}
"""Parameters that have another name here."""


def is_modelfile(text: str) -> bool:
    """Whether a text begins, behind comments, as a Modelfile does and no TOML file."""
    first = next((line.strip() for line in text.splitlines() if line.strip() and line.strip()[0] != "#"), "")
    return bool(re.match(r"[A-Za-z]+[ \t]+[^=\s]", first))


def modelfile_table(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """The table of a Modelfile's preset, and lines for the user about what is left out.

    Raises:
        EngineError: an instruction is unknown or not supported, or FROM is missing.
    """
    table: dict[str, Any] = {}
    notes: list[str] = []
    for number, name, value in _instructions(text, where):
        at = f"{where}, line {number}"
        if name == "FROM":
            table["model"] = own_name(value)
        elif name == "PARAMETER":
            _take_parameter(table, notes, value, at)
        elif name == "TEMPLATE":
            _take_template(table, notes, value)
        elif name == "SYSTEM":
            table["system"] = value
        elif name == "MESSAGE":
            role, _, content = value.partition(" ")
            table.setdefault("messages", []).append({"role": role, "content": content})
        elif name == "LICENSE":
            table["license"] = f"{table['license']}\n\n{value}" if "license" in table else value
        elif name == "ADAPTER":
            raise EngineError(f"{at}: ADAPTER is not supported yet: merge the adapter into the model's file")
        elif name in ("RENDERER", "PARSER", "REQUIRES", "DRAFT"):
            notes.append(f"{name} {value}: not used")
        else:
            raise EngineError(f"{at}: no instruction {name}")
    if "model" not in table:
        raise EngineError(f"{where}: no FROM, which names the model")
    return {"model": table.pop("model"), **table}, notes


def _instructions(text: str, where: str) -> Iterator[tuple[int, str, str]]:
    """The number of its line, the name and the value of each instruction."""
    at = 0
    while at < len(text):
        if (blank := re.compile(r"[ \t]*(#[^\n]*)?(\n|$)").match(text, at)) is not None and blank[0]:
            at = blank.end()
            continue
        number = text.count("\n", 0, at) + 1
        begun = _INSTRUCTION.match(text, at)
        if begun is None:
            line = text[at:].splitlines()[0]
            raise EngineError(f"{where}, line {number}: {line[:60]!r} is no instruction with a value")
        at, name = begun.end(), begun[1].upper()
        head = re.compile(r"\w+[ \t]+").match(text, at) if name in ("PARAMETER", "MESSAGE") else None
        given = _VALUE.match(text, at if head is None else head.end())
        assert given is not None
        value = next(part for part in given.groups() if part is not None)
        if given[3] is not None and value.startswith('"""'):
            raise EngineError(f'{where}, line {number}: {name} begins with """ and does not end')
        value = value if given[1] else value.strip()
        yield number, name, value if head is None else f"{head[0].strip()} {value}"
        at = given.end()


def _take_parameter(table: dict[str, Any], notes: list[str], text: str, at: str) -> None:
    """One PARAMETER; those without an option here, or an effect, are noted."""
    name, _, value = text.partition(" ")
    name = _OPTIONS.get(name.lower(), name.lower())
    known = {each: field for group in GROUPS for field in flagged(group) for each in spellings(field)}
    if name == "num_gpu" and value == "0":
        table["device"] = "cpu"
    elif name not in known:
        notes.append(f"PARAMETER {name} {value}: no such option here, left out")
    elif value_type(known[name]) is tuple:
        table.setdefault(name, []).append(value)
    else:
        kind = value_type(known[name])
        try:
            table[name] = value.lower() == "true" if kind is bool else kind(value)
        except (TypeError, ValueError):
            raise EngineError(f"{at}: PARAMETER {name} {value}: must be a number") from None
        if name == "max_tokens" and table[name] < 0:  # Ollama's -2, to fill the context, is -1 here
            table[name] = -1


def _take_template(table: dict[str, Any], notes: list[str], text: str) -> None:
    try:
        table["template"] = jinja_of(text)
    except UnknownFormError as unknown:
        notes.append(f"TEMPLATE has {unknown}, which is not translated: the model's own template is used")
