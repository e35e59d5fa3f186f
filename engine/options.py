"""Options as dataclass fields: each field's annotation holds its range and its command-line flag.

    @dataclass(frozen=True)
    class Example:
        ctx_size: Annotated[int | None, Range(1), Flag("-c --ctx-size", "Context in tokens.")] = None

`quengine.cli.flags` makes the flags of a command from such fields, `check_ranges` checks their values, and
`table_values` reads them from a TOML table.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from quengine.errors import EngineError, nearest, shown

MODEL_HELP = "Alias, preset, hf:user/repo:QUANT, GGUF file or checkpoint folder."
OUTPUT = "What is printed"
"""The help panel of flags about a command's output."""


@dataclass(frozen=True)
class Range:
    """The allowed values of a number: from `low` to `high`, both inclusive, or above the exclusive limit `above`.

    `text` replaces the description of the range in error messages, if the limits alone would not explain it.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    text: str = ""

    def holds(self, value: float) -> bool:
        too_low = (self.low is not None and value < self.low) or (
            self.above is not None and value <= self.above
        )
        return not too_low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.above is not None:
            rule = f"above {_plain(self.above)}"
            return rule if self.high is None else f"{rule} and at most {_plain(self.high)}"
        if self.high is None:
            return "any" if self.low is None else f"at least {_plain(self.low)}"
        return (
            f"at most {_plain(self.high)}"
            if self.low is None
            else f"from {_plain(self.low)} to {_plain(self.high)}"
        )


@dataclass(frozen=True)
class Flag:
    """The command-line flag of a field; a field that is a tuple or a mapping may be given repeatedly.

    Attributes:
        names: all spellings, separated by spaces: "-c --ctx-size"; of a bool also "--mmap/--no-mmap".
        help: one sentence.
        panel: the flag's panel in the help; None: "Options".
        metavar: the placeholder of its value in the help; None: its type.
        none: the number that stands for None, which is the default.
        read: converts the texts of a repeatable flag to the field's value; None: a tuple of them.
        show_default: whether the help shows the default.
        completes: shell completion of its value: "model", "device", or the values separated by spaces; None: the values
            of a Literal, otherwise files.
    """

    names: str
    help: str
    panel: str | None = None
    metavar: str | None = None
    none: int | None = None
    read: Callable[[list[str]], Any] | None = None
    show_default: bool = True
    completes: str | None = None


class Only:
    """Annotation of a group of options of which only the named fields have flags."""

    def __init__(self, *names: str) -> None:
        self.names = frozenset(names)


def ranges(group: type[Any]) -> dict[str, Range]:
    """The range of each field of a dataclass that has one, by name."""
    return {
        field.name: allowed
        for field in fields(group)
        for allowed in _notes(field)
        if isinstance(allowed, Range)
    }


def check_ranges(options: Any, label: str) -> None:
    """Checks each number of a dataclass against its range; `label` formats its {name} and {value} for the error.

    Raises:
        EngineError: a number is outside its range.
    """
    for name, allowed in ranges(type(options)).items():
        value = getattr(options, name)
        is_number = isinstance(value, Real)
        if value is not None and not (is_number and allowed.holds(value)):
            raise EngineError(f"{label.format(name=name, value=value)}: must be {allowed}")


def flagged(group: type[Any]) -> list[Field[Any]]:
    """The fields of a dataclass that have flags, without those of nested groups."""
    return [each for each in fields(group) if any(isinstance(n, Flag) for n in _notes(each))]


def flag_of(field: Field[Any]) -> Flag:
    """The flag of a field that has one."""
    return next(note for note in _notes(field) if isinstance(note, Flag))


def spellings(field: Field[Any]) -> list[str]:
    """A flagged field's names in a TOML file or in `/set`: its first long flag first, the field's own name last."""
    flags = sorted(flag_of(field).names.replace("/", " ").split(), key=lambda name: not name.startswith("--"))
    names = [name.lstrip("-").replace("-", "_") for name in flags if not name.startswith("--no-")]
    return [*names, field.name]


def value_type(field: Field[Any]) -> Any:
    """The type of a field's value: of an optional one without None, of a tuple or mapping the collection type."""
    kind = get_args(field.type)[0] if _notes(field) else field.type
    if get_origin(kind) in (tuple, Mapping):
        return get_origin(kind)
    return (
        next((each for each in get_args(kind) if each is not type(None)), kind) if _optional(kind) else kind
    )


def table_fields(
    table: Mapping[str, Any], groups: Iterable[type[Any]], where: str
) -> dict[str, tuple[type[Any], Field[Any], Any]]:
    """The entries of a TOML table by field name: for each key, in any spelling, its group, field and value.

    Raises:
        EngineError: a key is no option of the groups, or two keys are the same option; `where` begins the message.
    """
    known = {
        name: (group, field) for group in groups for field in flagged(group) for name in spellings(field)
    }
    found: dict[str, tuple[type[Any], Field[Any], Any]] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            raise EngineError(f"{where}: no option {shown(key)}{nearest(name, known)}")
        group, field = known[name]
        if field.name in found:
            raise EngineError(f"{where}: {key}: the option {field.name} is there twice")
        found[field.name] = (group, field, value)
    return found


def table_values(
    table: Mapping[str, Any], groups: Iterable[type[Any]], where: str
) -> dict[type[Any], dict[str, Any]]:
    """The values of fields by group, from a TOML table whose keys may be any spelling of an option (`spellings`).

    A list stands for a repeated flag, and a table for the text of an option that takes JSON. `where` begins the error
    messages.

    Raises:
        EngineError: a key is no option of the groups, or its value is not of the field's type. Ranges are checked when
            the group is made.
    """
    found: dict[type[Any], dict[str, Any]] = {}
    for name, (group, field, value) in table_fields(table, groups, where).items():
        try:
            found.setdefault(group, {})[name] = _table_value(field, value)
        except (TypeError, ValueError, EngineError) as error:
            raise EngineError(f"{where}: {name} = {shown(value)}: {error}") from None
    return found


def _table_value(field: Field[Any], value: Any) -> Any:
    """Converts a TOML value to the field's type. Raises TypeError, with the rule, if its type does not fit."""
    kind, flag = value_type(field), flag_of(field)
    if kind in (tuple, Mapping):
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise TypeError("must be text, or a list of texts")
        return flag.read(texts) if flag.read is not None else tuple(texts)
    if isinstance(value, dict) and kind is str:
        return json.dumps(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise TypeError(f"must be {' or '.join(get_args(kind))}")
        return value
    rule, types = _TABLE_TYPES.get(kind, ("text", (str,)))
    if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"must be {rule}")
    if flag.none is not None and value == flag.none:
        return None
    return kind(value) if kind in (float, Path) else value


_TABLE_TYPES: Mapping[Any, tuple[str, tuple[type[Any], ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
}


def _notes(field: Field[Any]) -> tuple[Any, ...]:
    """The annotations of a field's type."""
    return tuple(getattr(field.type, "__metadata__", ()))


def _optional(kind: Any) -> bool:
    return get_origin(kind) is UnionType


def _plain(number: float) -> str:
    return (
        str(number) if isinstance(number, int) else f"{number:.0f}" if number.is_integer() else f"{number:g}"
    )
