"""The models of `--models-dir` and `--models-preset`, with the options of each.

    [defaults]                       # of every model, over those of the command line
    ctx_size = 8192
    parallel = 2

    [qwen]                           # what requests call it
    model = "qwen3-4b-q4k"           # an alias, an hf: name, or a path relative to this file
    alias = ["small", "default"]
    temp = 0.6
    load_on_startup = true

A table called like a model of the folder needs no `model`. Options are those of `engine serve`, without their dashes;
the paths of `lora` are relative to this file too.

A model in the folder that a client has created has its options in a TOML file beside its own. Its keys are those of a
preset (`quengine.request.preset`) that change conversations and sampling.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.hub.hub import resolve_model
from quengine.models.hub.hub_name import without_shard
from quengine.models.lora.adapter import near
from quengine.options import flagged, spellings, table_fields, table_values
from quengine.platform.input_files import read_text
from quengine.request.chat_options import ChatOptions
from quengine.request.go_template import UnknownFormError, jinja_of
from quengine.request.preset import preset_values, table_options
from quengine.request.sampling_params import SamplingParams
from quengine.serve.models.model_spec import ModelSpec, find_models, weight_bytes
from quengine.serve.settings import ServerSettings

_SUFFIX = ".options.toml"
_MOST_BYTES = 1 << 20
_OTHER_NAMES = {"num_ctx": "ctx_size", "num_predict": "max_tokens", "num_keep": "n_keep"}
"""Ollama's parameters that have another name here."""
_SAMPLING = frozenset(name for field in flagged(SamplingParams) for name in spellings(field))


def options_name(file: str) -> str:
    """The name of the options' file beside the first (or only) file of a model."""
    return f"{without_shard(file)}{_SUFFIX}"


def read_options(file: Path) -> dict[str, Any]:
    """The table beside a model's file, or an empty one. Raises EngineError where it cannot be read as TOML."""
    beside = file.with_name(options_name(file.name))
    if file.is_dir() or not beside.exists():
        return {}
    try:
        return tomllib.loads(read_text(beside, "--models-dir: cannot read", _MOST_BYTES))
    except tomllib.TOMLDecodeError as error:
        raise EngineError(f"{beside}: it is no TOML: {error}") from None


def made_options(
    system: str, template: str, parameters: Mapping[str, Any], messages: list[Any], ignored: list[str]
) -> dict[str, Any]:
    """The table of a client's options. `ignored` gets the names of unknown parameters.

    Raises:
        EngineError: a value is not one that its option takes, or the template is in a form that is not translated.
    """
    table: dict[str, Any] = {}
    for given, value in parameters.items():
        name = _OTHER_NAMES.get(given, given)
        if name not in _SAMPLING and name != "ctx_size":
            ignored.append(f"parameters.{given}")
            continue
        if name == "max_tokens" and isinstance(value, int) and value < 0:  # until the context is full
            value = -1
        table[name] = [value] if name == "stop" and isinstance(value, str) else value
    if system:
        table["system"] = system
    if messages:
        table["messages"] = messages
    if template:
        try:
            table["template"] = template if "{%" in template else jinja_of(template)
        except UnknownFormError as unknown:
            raise EngineError(f"template has {unknown}, which is not translated") from None
    table_options(table, "the new model")
    return table


DEFAULTS = "defaults"
_OWN = ("model", "load_on_startup")
"""Keys that are no option of a command."""
_GROUPS = (EngineConfig, ChatOptions, SamplingParams, ServerSettings)
_OF_MODELS = ("model_names", "model_tags", "parallel", "pooling", "sleep_s")
"""The server's options that each model may have its own of."""


def find_specs(settings: ServerSettings, config: EngineConfig) -> list[ModelSpec]:
    """The models of the folder and of the preset file in `settings`. Options that the file lacks come from `settings`.

    Raises:
        EngineError: the folder or the file cannot be read, or an option is wrong.
    """
    options = settings.models
    found = {} if options.folder is None else find_models(options.folder)
    tables = {} if options.preset is None else read_presets(options.preset)
    defaults = tables.pop(DEFAULTS, {})
    specs = []
    for name in dict.fromkeys((*found, *tables)):
        where = f"{options.preset or options.folder}: [{name}]"
        table = {**defaults, **tables.get(name, {})}
        if name not in found and not isinstance(table.get("model"), str):
            raise EngineError(f'{where}: it names no model: model = "smollm2-135m"')
        base = ModelSpec(replace(settings, model_names=(name,)), config)
        specs.append(_with_options(base, table, where, found.get(name), options.preset))
    if not specs and not options.changes:
        raise EngineError(f"no models in {options.folder or options.preset}")
    return specs


def read_presets(file: Path) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file. Raises EngineError if it cannot be read, is no TOML, or has anything but tables."""
    try:
        tables = tomllib.loads(read_text(file, "--models-preset: cannot read"))
    except tomllib.TOMLDecodeError as error:
        raise EngineError(f"--models-preset {file}: it is no TOML: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise EngineError(f"--models-preset {file}: {name}: must be in a table, as in [{DEFAULTS}]")
    return {name: _by_field(table, f"{file}: [{name}]") for name, table in tables.items()}


def _by_field(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table with each option under its field's name, so that a model's option replaces the default."""
    given = {key.replace("-", "_"): value for key, value in table.items()}
    own = {key: given.pop(key) for key in _OWN if key in given}
    return own | {name: value for name, (_, _, value) in table_fields(given, _GROUPS, where).items()}


def _with_options(
    base: ModelSpec, table: Mapping[str, Any], where: str, found: Path | None, file: Path | None
) -> ModelSpec:
    """The model with the options of its table. `found`: its path in the folder; None: the table says where it is."""
    given = {key: value for key, value in table.items() if key not in _OWN}
    values = table_values(given, _GROUPS, where)
    if file is not None and "lora" in (of_model := values.get(EngineConfig, {})):
        of_model["lora"] = tuple(near(text, file.parent) for text in of_model["lora"])
    made = {} if found is None else table_options(read_options(found), str(found))
    for below in (preset_values(str(table.get("model", ""))), made):
        for group, options in below.items():
            values[group] = {**options, **values.get(group, {})}
    of_server = values.get(ServerSettings, {})
    if other := of_server.keys() - set(_OF_MODELS):
        raise EngineError(f"{where}: {min(other)}: that is an option of the whole server")
    settings = base.settings
    names = (base.name, *of_server.pop("model_names", ()))
    try:
        settings = replace(
            settings,
            **of_server,
            model_names=tuple(dict.fromkeys(names)),
            chat=replace(settings.chat, **values.get(ChatOptions, {})),
            defaults=replace(settings.defaults, **values.get(SamplingParams, {})),
        )
        config = replace(base.config, **values.get(EngineConfig, {}))
        model = str(found) if "model" not in table else _near(table["model"], file)
        path = resolve_model(model)
    except EngineError as error:
        raise EngineError(f"{where}: {error}") from None
    return ModelSpec(
        settings,
        engine_config(settings, config),
        model,
        path,
        weight_bytes(path),
        at_start=bool(table.get("load_on_startup")),
    )


def engine_config(settings: ServerSettings, config: EngineConfig) -> EngineConfig:
    """The engine's options, with those that are the server's. Raises EngineError where a template cannot be read."""
    template = settings.chat.source()
    return replace(config, parallel=settings.parallel, reuse_prefix=True, chat_template=template)


def _near(model: str, file: Path | None) -> str:
    """The path of `model` relative to `file`, if something is there; else the name as it is."""
    near = None if file is None else file.parent / Path(model).expanduser()
    return str(near) if near is not None and near.exists() else model
