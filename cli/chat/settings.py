"""`/set`: the sampling parameters by the names of their flags, with the flags' checks.

A name is any spelling of the flag without its dashes ("temp", "top_k" or "top-k", "n") or the parameter's own name.
"""

import shlex
from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import Any, get_args, get_origin

from quengine.cli.chat.arguments import suggestion, words
from quengine.errors import EngineError, shown
from quengine.options import Flag
from quengine.request.sampling_params import SamplingParams

_BOOLS = {
    "on": True,
    "true": True,
    "yes": True,
    "1": True,
    "off": False,
    "false": False,
    "no": False,
    "0": False,
}


def setting_names() -> list[str]:
    """The name of each parameter as `/set` lists it: its flag's first long one."""
    return [_spellings(field)[0] for field in _flagged()]


def settings_lines(params: SamplingParams, name: str | None = None) -> list[str]:
    """Each parameter's name, value and help, or those of one. Raises EngineError for an unknown name."""
    chosen = _flagged() if name is None else [_field(name)]
    wide = max(map(len, setting_names()))
    return [
        f"{_spellings(field)[0]:{wide}}  {_value_text(field, getattr(params, field.name)):8}  {_flag(field).help}"
        for field in chosen
    ]


def changed(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """`params` with one parameter as typed; "" empties a list.

    Raises:
        EngineError: the name is unknown, or the value is not one that the flag takes.
    """
    field = _field(name)
    value = _read(field, text)
    after = replace(params, **{field.name: value})
    return after.with_seed() if field.name == "seed" else after


def _flagged() -> list[Field[Any]]:
    return [
        field
        for field in fields(SamplingParams)
        if any(isinstance(note, Flag) for note in getattr(field.type, "__metadata__", ()))
    ]


def _flag(field: Field[Any]) -> Flag:
    return next(note for note in field.type.__metadata__ if isinstance(note, Flag))  # type: ignore[union-attr]


def _spellings(field: Field[Any]) -> list[str]:
    """Every name, the flag's first long one first."""
    flags = sorted(_flag(field).names.split(), key=lambda name: not name.startswith("--"))
    return [name.lstrip("-").replace("-", "_") for name in flags] + [field.name]


def _field(name: str) -> Field[Any]:
    known: dict[str, Field[Any]] = {
        spelling: field for field in reversed(_flagged()) for spelling in _spellings(field)
    }
    wanted = name.lstrip("-").replace("-", "_")
    if wanted not in known:
        raise EngineError(f"no setting {name}{suggestion(wanted, known)}; /set lists them")
    return known[wanted]


def _kind(field: Field[Any]) -> Any:
    """The type of a value; of an optional one the type beside None."""
    kind = get_args(field.type)[0]
    if get_origin(kind) in (tuple, Mapping):
        return get_origin(kind)
    return next((each for each in get_args(kind) if each is not type(None)), kind)


def _read(field: Field[Any], text: str) -> Any:
    kind, flag = _kind(field), _flag(field)
    if kind in (tuple, Mapping):
        given = [word for word in words("set", text) if word]
        return flag.read(given) if flag.read is not None else tuple(given)
    try:
        value = _BOOLS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        rule = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
        raise EngineError(f"/set {_spellings(field)[0]} {shown(text)}: must be {rule}") from None
    return None if flag.none is not None and value == flag.none else value


def _value_text(field: Field[Any], value: Any) -> str:
    """A value as it would be typed."""
    if value is None:
        return str(_flag(field).none)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{token}{bias:+g}" for token, bias in value.items()) or '""'
    return shlex.join(value).replace("\n", "\\n") or '""' if isinstance(value, tuple) else str(value)
