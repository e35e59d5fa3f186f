"""The arguments of a kernel: a dataclass that its launcher fills in and that its code reads by field names.

In memory a field takes 8 bytes, in order: an int64 (`int`, addresses too), an fp32 or fp64 in the first bytes, or for a
field that is `Arguments` itself that one's fields. The compiled side is argument_types.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

Fp32 = Annotated[float, "f"]
Fp64 = Annotated[float, "d"]


class Field(NamedTuple):
    """Where a field lies, in bytes, and what it is: "q", "f" or "d" as in `struct`, or a class of `Arguments`."""

    offset: int
    kind: Any


@dataclass
class Arguments:
    """See the module docstring."""

    def to_bytes(self) -> bytes:
        """The memory that a kernel reads."""
        return b"".join(
            _packed(getattr(self, name), field.kind) for name, field in fields_of(type(self)).items()
        )


def _packed(value: Any, kind: Any) -> bytes:
    return (
        value.to_bytes() if isinstance(value, Arguments) else struct.pack(f"<{kind}", value).ljust(8, b"\0")
    )


@cache
def fields_of(arguments: type[Arguments]) -> dict[str, Field]:
    """The fields of a class of arguments by name."""
    fields, offset = {}, 0
    for name, hint in get_type_hints(arguments, include_extras=True).items():
        kind = getattr(hint, "__metadata__", ("q",))[0]
        nested = isinstance(hint, type) and issubclass(hint, Arguments)
        fields[name] = Field(offset, hint if nested else kind)
        offset += size_of(hint) if nested else 8
    return fields


@cache
def size_of(arguments: type[Arguments]) -> int:
    """Bytes of a class of arguments."""
    return sum(
        8 if isinstance(field.kind, str) else size_of(field.kind) for field in fields_of(arguments).values()
    )
