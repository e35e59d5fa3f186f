"""Commands whose flags are the fields of dataclasses (`quengine.options`), and the options that no dataclass has.

Where `model` is a preset's name, its options take the place of the defaults of flags that are not given.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from quengine.errors import EngineError
from quengine.options import MODEL_HELP, Flag, Only, Range
from quengine.platform.input_files import read_text
from quengine.request.chat_options import PANEL as CONVERSATIONS
from quengine.request.sampling_params import PANEL

if TYPE_CHECKING:
    from quengine.structured.constraint_spec import ConstraintSpec

Model = Annotated[str, Flag("-m --model", MODEL_HELP, show_default=False, completes="model")]
Effort = Annotated[
    str | None,
    Flag("--reasoning-effort", "How long the model reasons, as its template has it.", CONVERSATIONS, "LEVEL"),
]


@dataclass(frozen=True)
class ConstraintFlags:
    """What the answer has to be; each flag takes a file's name or the text itself."""

    json_schema: Annotated[
        str | None,
        Flag(
            "-j --json-schema --json-schema-file -jf",
            "Answer in JSON that is valid under this schema; {} takes any JSON.",
            PANEL,
            "FILE|JSON",
        ),
    ] = None
    grammar: Annotated[
        str | None,
        Flag(
            "--grammar --grammar-file", "Answer in this grammar's language, GBNF or Lark.", PANEL, "FILE|TEXT"
        ),
    ] = None

    def spec(self) -> "ConstraintSpec | None":
        """The constraint for `SamplingParams`. Raises EngineError where both are given, or a file cannot be read."""
        from quengine.structured.constraint_spec import ConstraintSpec, is_grammar

        if self.json_schema is not None and self.grammar is not None:
            raise EngineError("--json-schema and --grammar cannot both hold: give one of them")
        if self.json_schema is not None:
            inline = self.json_schema.lstrip().startswith(("{", "[", '"'))
            return ConstraintSpec.json_schema(
                self.json_schema
                if inline
                else read_text(Path(self.json_schema), "--json-schema: cannot read")
            )
        if self.grammar is not None:
            inline = is_grammar(self.grammar)
            return ConstraintSpec.grammar(
                self.grammar if inline else read_text(Path(self.grammar), "--grammar: cannot read")
            )
        return None


def split_names(texts: list[str]) -> tuple[str, ...]:
    """Names with commas between them; a comma in the path of a model that is there is part of the path."""
    return tuple(
        name for text in texts for name in ([text] if Path(text).exists() else text.split(",")) if name
    )


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer: each parameter that is a dataclass becomes the flags of its fields.

    Fields without a `Flag` have none and keep their default; fields that are dataclasses become their fields' flags.
    """
    taken = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def run(ctx: typer.Context, **values: Any) -> None:
        given = _Given(values, frozenset(name for name in values if _is_typed(ctx, name)))
        if isinstance(model := values.get("model"), str):
            from quengine.request.preset import preset_values

            given = replace(given, preset=preset_values(model))
        command(**{each.name: _value(each.name, each.annotation, given) for each in taken})

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    flags = [flag for each in taken for flag in _parameters(each.name, each.annotation, each.default)]
    flags.insert(0, context)
    vars(run)["__signature__"] = inspect.Signature(flags)
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return run


@dataclass(frozen=True)
class _Given:
    """The values of a command's parameters; which of them were `typed`, and the options of a preset by their group."""

    values: Mapping[str, Any]
    typed: frozenset[str]
    preset: Mapping[type[Any], Mapping[str, Any]] = field(default_factory=dict)

    def of_preset(self, group: type[Any], name: str) -> dict[str, Any]:
        """The preset's values of a group's fields whose flags were not typed, nor one that excludes them."""
        typed = {each.removeprefix(f"{name}__") for each in self.typed}
        typed |= {other for each in typed for other in _EXCLUDED.get(each, ())}
        return {each: value for each, value in self.preset.get(group, {}).items() if each not in typed}


_EXCLUDED = {"template_file": ("template",)}
"""Fields of a group that cannot both hold."""


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _parameters(name: str, annotation: Any, default: Any) -> Iterator[inspect.Parameter]:
    """What typer has to see of a command's parameter, or of a field: its flag, or the flags of a dataclass."""
    kind, notes = _unpacked(annotation)
    if _is_group(kind):
        for field in _flagged(kind, notes):
            yield from _parameters(f"{name}.{field.name}", field.type, field.default)
        return
    for flag in (note for note in notes if isinstance(note, Flag)):
        option = typer.Option(
            *flag.names.split(),
            help=flag.help,
            rich_help_panel=flag.panel,
            metavar=flag.metavar,
            show_default=flag.show_default,
            autocompletion=_completer(kind, flag),
        )
        annotation = Annotated[_typed(kind, flag), option]
        default = flag.none if flag.none is not None else None if _repeats(kind) else default
    yield inspect.Parameter(
        _name(name), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def complete_models(incomplete: str) -> list[str]:
    """The names of models that begin so: presets, aliases, what is in the Hugging Face cache."""
    from quengine.cli.commands.list import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def _complete_devices(incomplete: str) -> list[str]:
    gpus = Path("/proc/driver/nvidia/gpus")  # torch, which counts them too, takes a second to import
    count = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    names = ["auto", "cpu", "cuda", *(f"cuda:{index}" for index in range(count))]
    return [name for name in names if name.startswith(incomplete)]


_COMPLETERS = {"model": complete_models, "device": _complete_devices}


def _completer(kind: Any, flag: Flag) -> Callable[[str], list[str]] | None:
    values = (flag.completes or "").split() or _choices(kind)
    named = _COMPLETERS.get(flag.completes or "")
    if named is not None or not values:
        return named
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def _value(name: str, annotation: Any, given: _Given) -> Any:
    """What a parameter, or a field, becomes by what is `given`; MISSING: its default."""
    kind, notes = _unpacked(annotation)
    if _is_group(kind):
        values = {
            each.name: _value(f"{name}.{each.name}", each.type, given) for each in _flagged(kind, notes)
        }
        values |= given.of_preset(kind, _name(name))
        return kind(**{each: value for each, value in values.items() if value is not MISSING})
    value = given.values[_name(name)]
    flag = next((note for note in notes if isinstance(note, Flag)), None)
    if flag is None:
        return value
    if _repeats(kind):
        return MISSING if not value else flag.read(value) if flag.read else tuple(value)
    if (choices := _choices(kind)) and value not in (*choices, None):
        raise EngineError(f"{flag.names.split()[0]} {value!r}: must be {' or '.join(choices)}")
    return _in_range(flag, value, notes)


def _in_range(flag: Flag, value: Any, notes: Iterable[Any]) -> Any:
    """The value of a flag, None for the number that stands for it. Raises EngineError for a number out of range."""
    if value is None or value == flag.none:
        return None
    for allowed in notes:
        if isinstance(allowed, Range) and not allowed.holds(value):
            rest = "" if flag.none is None else f", or {flag.none}"
            raise EngineError(f"{flag.names.split()[0]} {value}: must be {allowed}{rest}")
    return value


def _name(path: str) -> str:
    """A parameter's name; a field's follows its group's."""
    return path.replace(".", "__")


def _unpacked(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type and what annotates it."""
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    kind, *notes = get_args(annotation)
    return kind, tuple(notes)


def _flagged(kind: Any, notes: Iterable[Any]) -> Iterator[Field[Any]]:
    """The fields of a dataclass that have flags, or are dataclasses; `Only` some of them."""
    only = next((note.names for note in notes if isinstance(note, Only)), None)
    for each in fields(kind):
        of_field, flags = _unpacked(each.type)
        has_flag = _is_group(of_field) or any(isinstance(flag, Flag) for flag in flags)
        if has_flag and (only is None or each.name in only):
            yield each


def _is_group(kind: Any) -> bool:
    return is_dataclass(kind)


def _repeats(kind: Any) -> bool:
    return get_origin(kind) in (tuple, Mapping)


def _choices(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, or of one or None; of other types none."""
    kinds = (kind,) if get_origin(kind) is Literal else get_args(kind)
    return next((get_args(each) for each in kinds if get_origin(each) is Literal), ())


def _typed(kind: Any, flag: Flag) -> Any:
    """The type as typer reads it from the command line."""
    if _repeats(kind):
        return list[get_args(kind)[0] if flag.read is None else str] | None  # type: ignore[misc]
    if flag.none is not None:
        return int
    if _choices(kind):
        return str if get_origin(kind) is Literal else str | None
    return str | None if kind == str | Path | None else kind
