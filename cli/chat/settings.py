"""`/set`: the sampling parameters by the names of their flags, with the flags' checks.

A name is any spelling of the flag without its dashes ("temp", "top_k" or "top-k", "n") or the parameter's own name.
"""

import shlex
from collections.abc import Mapping
from dataclasses import Field, replace
from typing import Any

from quengine.cli.chat.arguments import words
from quengine.errors import EngineError, nearest, shown
from quengine.options import flag_of, flagged, spellings, value_type
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
    return [spellings(field)[0] for field in flagged(SamplingParams)]


def settings_lines(params: SamplingParams, name: str | None = None) -> list[str]:
    """Each parameter's name, value and help, or those of one. Raises EngineError for an unknown name."""
    chosen = flagged(SamplingParams) if name is None else [_field(name)]
    wide = max(map(len, setting_names()))
    return [
        f"{spellings(field)[0]:{wide}}  {_value_text(field, getattr(params, field.name)):8}  {flag_of(field).help}"
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


def _field(name: str) -> Field[Any]:
    known: dict[str, Field[Any]] = {
        each: field for field in reversed(flagged(SamplingParams)) for each in spellings(field)
    }
    wanted = name.lstrip("-").replace("-", "_")
    if wanted not in known:
        raise EngineError(f"no setting {name}{nearest(wanted, known)}; /set lists them")
    return known[wanted]


def _read(field: Field[Any], text: str) -> Any:
    kind, flag = value_type(field), flag_of(field)
    if kind in (tuple, Mapping):
        given = [word for word in words("set", text) if word]
        return flag.read(given) if flag.read is not None else tuple(given)
    try:
        value = _BOOLS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        rule = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
        raise EngineError(f"/set {spellings(field)[0]} {shown(text)}: must be {rule}") from None
    return None if flag.none is not None and value == flag.none else value


def _value_text(field: Field[Any], value: Any) -> str:
    """A value as it would be typed."""
    if value is None:
        return str(flag_of(field).none)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{token}{bias:+g}" for token, bias in value.items()) or '""'
    return shlex.join(value).replace("\n", "\\n") or '""' if isinstance(value, tuple) else str(value)
