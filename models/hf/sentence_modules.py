"""Modules of sentence-transformers beside a model: how rows are pooled, and matrices for the pooled vector.

Format: `modules.json` lists them in order by type and folder, each with a config.json of its own (the
sentence-transformers library, `Pooling` and `Dense`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from quengine.errors import EngineError
from quengine.models.config import EncoderSizes, Pooling
from quengine.models.hf.json_file import read_json, read_json_array

_POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_FLAG = "pooling_mode_"
_FLAGS: Mapping[str, Pooling] = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
_IDENTITY = ("torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Identity")


class Projection(NamedTuple):
    """A matrix for the pooled vector: the file that holds it as `linear.weight`, and its columns and rows."""

    file: str
    columns: int
    rows: int


def read_pooling(folder: Path) -> Pooling | None:
    """How the model pools a text's rows; None where the folder does not say.

    Raises EngineError for a file that is no JSON, and for a pooling that is not implemented.
    """
    names = [name for name, _ in _modules(folder, "Pooling")]
    path = folder / (names[0] if names else "1_Pooling") / "config.json"
    given = read_json(path) if path.is_file() else {}
    named = given.get("pooling_mode")
    if named is not None:
        if named not in _POOLINGS:
            raise EngineError(
                f"{path}: pooling_mode: {named!r} is not implemented, only mean, cls, lasttoken"
            )
        return _POOLINGS[named]
    flags = [
        key.removeprefix(_FLAG) for key, value in given.items() if key.startswith(_FLAG) and value is True
    ]
    if len(flags) > 1 or set(flags) - set(_FLAGS):
        raise EngineError(f"{path}: {' and '.join(map(_FLAG.__add__, flags))} is not implemented")
    return _FLAGS[flags[0]] if flags else None


def read_projections(folder: Path, width: int) -> tuple[Projection, ...]:
    """The matrices for the pooled vector of `width` elements, in order.

    Raises EngineError for a file that is no JSON, biases, activations and sizes that are not implemented.
    """
    found = []
    for name, path in _modules(folder, "Dense"):
        given = read_json(path)
        activation = given.get("activation_function", _IDENTITY[0])
        if activation not in _IDENTITY:
            raise EngineError(f"{path}: activation_function: {activation!r} is not implemented")
        if given.get("bias", True):
            raise EngineError(f"{path}: bias: a bias is not implemented")
        columns, rows = given.get("in_features"), given.get("out_features")
        if not (isinstance(columns, int) and isinstance(rows, int) and min(columns, rows) > 0):
            raise EngineError(
                f"{path}: in_features, out_features: {columns!r}, {rows!r} are not numbers from 1"
            )
        found.append(Projection(f"{name}/model.safetensors", columns, rows))
    if problem := EncoderSizes.problem_of(tuple((each.columns, each.rows) for each in found), width):
        raise EngineError(f"{folder / 'modules.json'}: {problem}")
    return tuple(found)


def _modules(folder: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """Folder and config.json of each module of a kind. Raises EngineError."""
    path = folder / "modules.json"
    for module in read_json_array(path) if path.is_file() else ():
        named = module.get("type") if isinstance(module, dict) else None
        if not isinstance(named, str) or named.rpartition(".")[2] != kind:
            continue
        place = module.get("path")
        if not isinstance(place, str) or Path(place).name != place or not (folder / place).is_dir():
            raise EngineError(f"{path}: {place!r} is no folder of a module here")
        yield place, folder / place / "config.json"
