"""The arguments of a kernel: a dataclass that its launcher fills in and whose fields its code reads by name.

In memory each field takes 8 bytes, in order: an int64 (`int`, also for addresses), or an fp32 or fp64 in the first
bytes. A field that is `Arguments` itself is laid out inline. The compiled side is argument_types.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, get_type_hints

Fp32 = Annotated[float, "f"]
Fp64 = Annotated[float, "d"]


class ArgumentField(NamedTuple):
    """A field's offset in bytes, and its kind: "q", "f" or "d" as in `struct`, or a class of `Arguments`."""

    offset: int
    kind: Any


@dataclass(eq=False)
class Arguments:
    """Base of all kernels' arguments; see the module docstring."""

    def to_bytes(self) -> bytes:
        """The memory layout that a kernel reads."""
        kind: type = type(self)
        packer, values = _packer(kind)
        return packer.pack(*values(self))


@cache
def _packer(arguments: type) -> tuple[struct.Struct, attrgetter[tuple[Any, ...]]]:
    """The packer of all fields, two or more, nested ones inline, and the getter of their values."""
    leaves = list(_leaves(arguments, ""))
    formats = "".join("f4x" if kind == "f" else kind for _, kind in leaves)
    return struct.Struct(f"<{formats}"), attrgetter(*(name for name, _ in leaves))


def _leaves(arguments: type, prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in fields_of(arguments).items():
        if isinstance(field.kind, str):
            yield prefix + name, field.kind
        else:
            yield from _leaves(field.kind, f"{prefix}{name}.")


@cache
def fields_of(arguments: type) -> dict[str, ArgumentField]:
    """The fields of a class of arguments, by name."""
    fields, offset = {}, 0
    for name, hint in get_type_hints(arguments, include_extras=True).items():
        kind = getattr(hint, "__metadata__", ("q",))[0]
        nested = isinstance(hint, type) and issubclass(hint, Arguments)
        fields[name] = ArgumentField(offset, hint if nested else kind)
        offset += size_of(hint) if nested else 8
    return fields


@cache
def size_of(arguments: type) -> int:
    """The size of a class of arguments, in bytes."""
    size = 0
    for field in fields_of(arguments).values():
        size += 8 if isinstance(field.kind, str) else size_of(field.kind)
    return size
