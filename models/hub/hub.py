"""Model names: what a name given to `--model` stands for on this machine.

A name is a path, a preset, an alias of the catalogue (`catalogue.toml`), an `hf:` name, or a file that a Python package
ships. Nothing here uses the network: `hub_pull` does that.
"""

import difflib
import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from quengine.errors import EngineError, nearest_file
from quengine.models.hub.hub_cache import find_in_cache
from quengine.models.hub.hub_name import REPO_NAME, HubName, ModelNameError, own_name, parse_hub_name
from quengine.models.hub.presets import base_model, preset_names


@dataclass(frozen=True)
class CatalogueEntry:
    """One alias.

    gigabytes: about how large its files are, 10^9 bytes. package: a Python package that ships `package_file`, where
    there is one.
    """

    alias: str
    repo: str
    file: str
    about: str
    gigabytes: float
    verified: str
    package: str | None = None
    package_file: str | None = None


@cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Every alias, in the order of the data file."""
    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    return MappingProxyType(
        {alias: CatalogueEntry(alias=alias, **row) for alias, row in tomllib.loads(text).items()}
    )


def closest_aliases(name: str) -> list[str]:
    """The three aliases that look most like `name`, best first, or fewer; empty when none is near."""
    wanted = name.lower().replace("_", "-").replace(":", "-")
    near = difflib.get_close_matches(wanted, catalogue(), n=3, cutoff=0.6)
    within = [alias for alias in catalogue() if len(wanted) > 2 and wanted in alias]
    return list(dict.fromkeys([*near, *within]))[:3]


class ModelNotHereError(EngineError):
    """The name is right but the file is not on this machine yet; the message has the command to fetch it."""


def packaged_file(entry: CatalogueEntry) -> Path | None:
    """The model file inside an installed Python package, found without importing the package."""
    if entry.package is None or entry.package_file is None:
        return None
    spec = importlib.util.find_spec(entry.package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / entry.package_file
        if path.is_file():
            return path
    return None


_OTHER_FOLDERS = {
    "adapter_config.json": "a LoRA adapter, not a model: run its model with --lora FOLDER, or engine merge them",
    "params.json": "a folder in Mistral's own format, without config.json; take one in Hugging Face's, or a GGUF file",
    "model_index.json": "a folder of a diffusion model, which is not supported",
}
"""A file that a folder without config.json may have -> what such a folder is."""


def hub_name(name: str) -> HubName:
    """The repository and files that an alias, an `hf:` name or an address of the Hub means. Raises ModelNameError for
    other names."""
    name = own_name(name)
    if name.startswith("hf:"):
        return parse_hub_name(name)
    entry = catalogue().get(name.lower())
    if entry is None:
        raise _unknown(name)
    return HubName(entry.repo, entry.file)


def resolve_model(name: str) -> Path:
    """The file or checkpoint folder that `name` stands for.

    `name` is a path to a GGUF file or a Hugging Face checkpoint folder, a preset, an alias of the catalogue,
    `hf:user/repo:QUANT` / `hf:user/repo/file.gguf`, or an address of the Hub. Of a split GGUF the first shard is
    returned.

    Raises ModelNotHereError (with the `engine pull` command) for a known name that was not pulled yet, and
    ModelNameError for a name that stands for nothing.
    """
    try:
        return _resolved(base_model(name))
    except (
        OSError,
        RuntimeError,
    ) as error:  # too long a name, a folder that may not be read, ~ without a home
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelNameError(f"{name if len(name) <= 200 else name[:200] + '...'}: {why}") from None


def _resolved(name: str) -> Path:
    if not name.strip():
        raise ModelNameError("the model's name is empty; give an alias, a path or hf:user/repo:QUANT")
    name = own_name(name)
    path = Path(name).expanduser()
    if not name.startswith("hf:"):
        if path.is_file() or (path / "config.json").is_file():
            if path.suffix == ".toml":
                raise ModelNameError(
                    f"{name}: no model, but TOML; a preset is made of it with: engine create NAME -f {name}"
                )
            if path.suffix == ".safetensors":
                raise ModelNameError(
                    f"{name}: a part of a checkpoint; name its folder, which has config.json: {path.parent}"
                )
            return path
        if name.lower() not in catalogue():
            like_path = _is_like_path(name) and "://" not in name
            raise _no_path(name, path) if path.exists() or like_path else _unknown(name)
    entry = catalogue().get(name.lower())
    found = (packaged_file(entry) if entry else None) or find_in_cache(hub_name(name))
    if found is None:
        raise ModelNotHereError(f"{name}: not on this machine; fetch it with: engine pull {name}")
    return found


def _is_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.lower().endswith(".gguf")


def _no_path(name: str, path: Path) -> ModelNameError:
    if path.is_dir():
        for file, problem in _OTHER_FOLDERS.items():
            if (path / file).is_file():
                return ModelNameError(f"{name}: {problem}")
        inside = ", ".join(sorted(child.name for child in path.glob("*.gguf")))
        having = f"; it has {inside}: name that file" if inside else " and without .gguf files"
        return ModelNameError(f"{name}: a folder without config.json{having}")
    if path.exists():
        return ModelNameError(f"{name}: not a regular file")
    return ModelNameError(f"{name}: no such file{nearest_file(path)}")


def _unknown(name: str) -> ModelNameError:
    if "://" in name:
        return ModelNameError(
            f"{name}: only models of the Hugging Face Hub are fetched; download the file and give its path"
        )
    if REPO_NAME.fullmatch(name.partition(":")[0]):
        return ModelNameError(f"{name}: no such file; a model of the Hugging Face Hub is written hf:{name}")
    near = [*difflib.get_close_matches(name, preset_names(), n=1), *closest_aliases(name)]
    if near:
        return ModelNameError(f"{name}: no such model; did you mean {' or '.join(near)}?")
    return ModelNameError(
        f"{name}: no such model; `engine list --all` shows the names, or give a path or hf:user/repo:QUANT"
    )
