"""Reads a request's JSON into the struct of its route. What is wrong is a 400 that names field, value and rule.

A field that is null counts as absent, as OpenAI's clients send it, and a whole number may be written 1.0. A field that
no struct has is passed over. The rules are those of the struct's types.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from quengine.platform import strict_json
from quengine.request.sampling_params import Range
from quengine.serve.schemas.errors import ApiError, bad_request
from quengine.serve.schemas.fields import Fields, without_last_collection

B = TypeVar("B", bound=Fields)
T = TypeVar("T")
J = TypeVar("J", dict[str, Any], list[Any])
Path = tuple[str | int, ...]

_ERROR = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_ABSENT = re.compile(r"Object missing required field `(.+)`")
_OF_TYPES = re.compile("Expected |Invalid |Number out of range|Integer value out of range")


def parsed(raw: bytes, kind: type[J]) -> J:
    """The JSON of a body, an object or an array. Raises ApiError."""
    try:
        value = strict_json.loads(raw.decode(json.detect_encoding(raw)))
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not JSON: it is not {error.encoding} at byte {error.start}") from None
    except strict_json.StrictJSONError as error:
        name = error.place[:80] if error.place else None
        raise bad_request(f"the body is not JSON: {error}", name, "invalid_value") from None
    if not isinstance(value, kind):
        wanted = "object" if kind is dict else "array"
        raise bad_request(f"the body must be a JSON {wanted}, not {_json_type(value)}")
    return value


def read_body(kind: type[B], raw: bytes, ignored: list[str] | None = None) -> B:
    """The body of a request; `ignored` gets the names of the fields that are passed over. Raises ApiError."""
    given = _given(kind, parsed(raw, dict), [] if ignored is None else ignored)
    return _converted(kind, given, ())


def read_part(kind: Callable[..., T], value: object, name: str) -> T:
    """A part of the body that has a type of its own; `name` is the field that holds it. Raises ApiError."""
    return _converted(kind, value, (name,))


def wrong_value(kind: type[Fields], key: str, value: object, rule: str | None = None) -> ApiError:
    """The error about a field's value that the struct's type accepts. rule: a rule in place of the type's."""
    return _wrong((key,), value, rule or _rule(_at(inspect.type_info(kind), (key,), None)))


def shown(value: Any, most: int = 60) -> str:
    """A JSON value as an error shows it, in at most so many characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 3] + "..."


def token_ids(values: Sequence[Any], name: str, vocab_size: int) -> list[int]:
    """`values` as token ids of a vocabulary. Raises ApiError."""
    if are_token_ids(values, vocab_size):
        return list(values)
    ids = [whole_number(value) for value in values]
    for position, token in enumerate(ids):
        if token is None or not 0 <= token < vocab_size:
            value = shown(values[position], 40)
            rule = f"must be a token id from 0 to {vocab_size - 1}"
            raise bad_request(f"{name}[{position}] = {value}: {rule}", name, "invalid_value")
    return [token for token in ids if token is not None]


def are_token_ids(values: Sequence[Any], vocab_size: int) -> bool:
    """Whether all `values` are token ids of a vocabulary, as JSON usually writes them."""
    return all(type(value) is int for value in values) and (
        not values or (min(values) >= 0 and max(values) < vocab_size)
    )


def whole_number(value: object) -> int | None:
    """A JSON number without a fraction, which may be written 1.0; None for anything else."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class _Plan(NamedTuple):
    """The fields of a struct that are looked at before it is made."""

    names: frozenset[str]
    whole: frozenset[str]
    only: Mapping[str, tuple[Any, ...]]
    without_effect: Mapping[str, tuple[Any, ...]]
    nested: Mapping[str, type[Fields]]


@cache
def _plan(kind: type[Fields]) -> _Plan:
    without_last_collection()
    whole, only, without_effect, nested = set(), {}, {}, {}
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        for each in _alternatives(field.type):
            if isinstance(each, inspect.IntType):
                whole.add(field.encode_name)
            elif isinstance(each, inspect.StructType) and issubclass(each.cls, Fields):
                nested[field.encode_name] = each.cls
        extra = (isinstance(field.type, inspect.Metadata) and field.type.extra) or {}
        if "only" in extra:
            only[field.encode_name] = extra["only"]
        if "without_effect" in extra:
            without_effect[field.encode_name] = extra["without_effect"]
    return _Plan(
        frozenset(field.encode_name for field in info.fields), frozenset(whole), only, without_effect, nested
    )


def _given(
    kind: type[Fields], values: Mapping[str, Any], ignored: list[str], path: str = ""
) -> dict[str, Any]:
    """The known fields that are not null. Raises ApiError for a field whose effect is not supported."""
    plan = _plan(kind)
    given = {key: value for key, value in values.items() if value is not None}
    ignored += [f"{path}{key}" for key in given if key not in plan.names]
    given = {key: value for key, value in given.items() if key in plan.names}
    for key, value in given.items():
        if key in plan.only:
            _check_only(f"{path}{key}", value, plan.only[key])
        elif key in plan.without_effect:
            ignored += [] if value in plan.without_effect[key] else [f"{path}{key}"]
        elif key in plan.whole and isinstance(value, float):
            whole = whole_number(value)
            given[key] = value if whole is None else whole
        elif key in plan.nested and isinstance(value, dict):
            given[key] = _given(plan.nested[key], value, ignored, f"{path}{key}.")
    return given


def _check_only(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    # 0 is equal to False in Python, and not in JSON.
    if not any(each == value and isinstance(each, bool) == isinstance(value, bool) for each in allowed):
        values = f"; only {' or '.join(json.dumps(each) for each in allowed)} is accepted" if allowed else ""
        raise bad_request(f"{name} is not supported{values}", name, "unsupported")


def _converted(kind: Callable[..., T], value: object, at: Path) -> T:
    try:
        converted: T = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explained(error, kind, value, at) from None
    return converted


def _explained(error: msgspec.ValidationError, kind: Any, value: Any, at: Path) -> ApiError:
    """msgspec's error as an ApiError of this server."""
    found = _ERROR.fullmatch(str(error))
    assert found is not None
    message, place = found[1], (found[2] or "").partition("[...]")[0]  # a value of an object with any keys
    steps = tuple(int(index) if index else key for key, index in _STEP.findall(place))
    if absent := _ABSENT.fullmatch(message):
        steps = (*steps, absent[1])
    name, info = _name((*at, *steps)), _at(inspect.type_info(kind), steps, value)
    if absent:
        return bad_request(f"{name} {_own_rule(info) or 'is missing'}", name, "invalid_value")
    if not _OF_TYPES.match(message):  # a struct's own
        return bad_request(f"{name}: {message}", name, "invalid_value")
    for step in steps:
        value = value[step]
    return _wrong((*at, *steps), value, _rule(info))


def _wrong(path: Path, value: object, rule: str) -> ApiError:
    name = _name(path)
    code = "unsupported" if path[-1] == "type" else "invalid_value"
    return bad_request(f"{name} = {shown(value)}: {rule}", name, code)


def _name(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _alternatives(info: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union; of any other type, that type."""
    if isinstance(info, inspect.Metadata):
        yield from _alternatives(info.type)
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            yield from _alternatives(each)
    else:
        yield info


def _at(info: inspect.Type, steps: Path, value: Any) -> inspect.Type:
    """The type of a member of `value`, which is of type `info`."""
    for step in steps:
        info = inspect.UnionType(tuple(_members(info, step, value)))
        there = (
            step in value if isinstance(value, dict) else isinstance(value, list) and isinstance(step, int)
        )
        value = value[step] if there else None
    return info


def _members(info: inspect.Type, step: str | int, value: Any) -> Iterator[inspect.Type]:
    """The types of a member; if the value's tag selects one of several structs, only those in that struct."""
    structs = [each for each in _alternatives(info) if isinstance(each, inspect.StructType)]
    if isinstance(value, dict):
        tagged = [each for each in structs if each.tag_field and value.get(each.tag_field) == each.tag]
        structs = tagged or structs
    if tags := [each.tag for each in structs if each.tag_field == step]:
        yield inspect.LiteralType(tuple(tags))
    for struct in structs:
        yield from (field.type for field in struct.fields if field.encode_name == step)
    for each in _alternatives(info):
        if isinstance(each, inspect.ListType) and isinstance(step, int):
            yield each.item_type


def _own_rule(info: inspect.Type) -> str | None:
    """The rule that a type states in words."""
    if isinstance(info, inspect.Metadata):
        return (info.extra or {}).get("rule") or _own_rule(info.type)
    if isinstance(info, inspect.UnionType):
        return next(filter(None, map(_own_rule, info.types)), None)
    return None


def _rule(info: inspect.Type) -> str:
    return _own_rule(info) or f"must be {_either(map(_words, _alternatives(info)))}"


def _either(alternatives: Iterable[str]) -> str:
    *first, last = dict.fromkeys(filter(None, alternatives)) or ("another value",)
    return f"{', '.join(first)} or {last}" if first else last


def _words(info: inspect.Type) -> str:
    match info:
        case inspect.NoneType():
            return ""
        case inspect.IntType() | inspect.FloatType():
            number = "a whole number" if isinstance(info, inspect.IntType) else "a number"
            allowed = Range(info.ge, info.le, info.gt)
            return number if allowed == Range() else f"{number} {allowed}"
        case inspect.StrType():
            return "a string of at least one character" if info.min_length else "a string"
        case inspect.BoolType():
            return "true or false"
        case inspect.ListType():
            if info.max_length is not None:
                return f"an array of at most {info.max_length} items"
            what = "string" if isinstance(info.item_type, inspect.StrType) else "item"
            return f"an array of at least one {what}" if info.min_length else f"an array of {what}s"
        case inspect.LiteralType():
            return _either(map(str, info.values))
    return "an object"


def _json_type(value: object) -> str:
    """What JSON calls the type of a value."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")
