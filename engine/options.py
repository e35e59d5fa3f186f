"""Options are fields of dataclasses; the range and the command-line flag of each stand in its annotation.

    @dataclass(frozen=True)
    class Example:
        ctx_size: Annotated[int | None, Range(1), Flag("-c --ctx-size", "Context in tokens.")] = None

`quengine.cli.flags` makes a command's flags from such fields, `check_ranges` checks their values.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from quengine.errors import EngineError

MODEL_HELP = "Alias, hf:user/repo:QUANT, GGUF file or checkpoint folder."


@dataclass(frozen=True)
class Range:
    """The values that a number may have, `low` and `high` among them; `above` is an exclusive lower limit.

    `text` is what an error message says of them, where the limits alone would not say enough.
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
    """How a field is given on the command line; one that is a tuple or a mapping may be given repeatedly.

    Attributes:
        names: all spellings, with spaces between: "-c --ctx-size"; of a bool also "--mmap/--no-mmap".
        help: one sentence.
        panel: the heading it stands under in the help; None: "Options".
        metavar: what stands for its value in the help; None: its type.
        none: the number that stands for None, which is the default.
        read: makes the field's value from the texts of a repeatable flag; None: a tuple of them.
        show_default: whether the help ends with the default.
    """

    names: str
    help: str
    panel: str | None = None
    metavar: str | None = None
    none: int | None = None
    read: Callable[[list[str]], Any] | None = None
    show_default: bool = True


class Only:
    """In the annotation of a group of options: these fields of it alone have flags."""

    def __init__(self, *names: str) -> None:
        self.names = frozenset(names)


def ranges(group: type[Any]) -> dict[str, Range]:
    """The range of each field of a dataclass that has one."""
    return {
        field.name: allowed
        for field in fields(group)
        for allowed in getattr(field.type, "__metadata__", ())
        if isinstance(allowed, Range)
    }


def check_ranges(options: Any, label: str) -> None:
    """Check each number of a dataclass against its range; `label` formats its {name} and {value} for the error.

    Raises:
        EngineError: one is outside its range.
    """
    for name, allowed in ranges(type(options)).items():
        value = getattr(options, name)
        if value is not None and not allowed.holds(value):
            raise EngineError(f"{label.format(name=name, value=value)}: must be {allowed}")


def _plain(number: float) -> str:
    return (
        str(number) if isinstance(number, int) else f"{number:.0f}" if number.is_integer() else f"{number:g}"
    )
