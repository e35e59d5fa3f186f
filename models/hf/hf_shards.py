"""The safetensors files of a checkpoint folder, mapped: where each tensor is, its header, views on its bytes."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.block_formats import FORMATS
from quengine.models.hf.json_file import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_NAME_BYTES = 255  # of a file's, on every system
LFS = b"version https://git-lfs"  # the first line of what Git checks out in place of a large file
_ORIGINAL = ".parametrizations.weight.original"  # of a matrix whose adapters lie beside it (task_adapters.py)
FLOAT_TYPES = ("F32", "F16", "BF16")  # named in safetensors as in GGUF


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's header: its name in the checkpoint, its type as in the block format table, and torch-order shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * FORMATS[self.dtype].row_bytes(self.shape[-1])


class HFShards:
    """All safetensors files that the folder's index names, or its only one.

    Raises:
        EngineError: a shard is missing or malformed, or holds not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        weight_map = self._weight_map()
        files = sorted(set(weight_map.values())) if weight_map else [SINGLE]
        self._open = {file: self._mapped(file) for file in files}
        self.files = weight_map or dict.fromkeys(self._open[SINGLE].keys(), SINGLE)  # tensor -> file name
        self._inner: dict[str, str] = {}
        held = {file: frozenset(handle.keys()) for file, handle in self._open.items()}
        for name, file in self.files.items():
            if name not in held[file]:
                raise EngineError(f"{folder / file}: tensor {name!r} is missing, {INDEX} says it is there")
        for name in [name for name in self.files if name.endswith(_ORIGINAL)]:
            plain = f"{name.removesuffix(_ORIGINAL)}.weight"
            self.files[plain] = self.files.pop(name)
            self._inner[plain] = name

    def include(self, prefix: str, file: str) -> None:
        """Adds the tensors of a file in a folder below, their names after `prefix` and a point. Raises EngineError."""
        self._open[file] = self._mapped(file)
        for name in self._open[file].keys():  # noqa: SIM118 (not a mapping)
            self.files[f"{prefix}.{name}"] = file
            self._inner[f"{prefix}.{name}"] = name

    def stored(self, name: str, shape: tuple[int, ...], types: tuple[str, ...] = FLOAT_TYPES) -> StoredTensor:
        """The header of tensor `name`. Raises EngineError if it does not exist, or is not of `shape` and one of
        `types`."""
        if name not in self.files:
            raise self.error(f"tensor {name!r} is missing: this model needs it, {len(self.files)} are there")
        header = self._slice(name)
        dtype, actual = header.get_dtype(), tuple(header.get_shape())
        if actual != shape:
            raise self.error(f"tensor {name!r} has shape {list(actual)}, config.json needs {list(shape)}")
        if dtype not in types:
            raise self.error(f"tensor {name!r} is of type {dtype}; supported are {', '.join(types)}")
        return StoredTensor(name, dtype, shape)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of tensor `name`; None: it does not exist."""
        if name not in self.files:
            return None
        return tuple(self._slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A view on the mapped file; it stays valid after `close`, as long as it is held."""
        tensor: Tensor = self._open[self.files[name]].get_tensor(self._inner.get(name, name))
        return tensor

    def _slice(self, name: str) -> Any:
        return self._open[self.files[name]].get_slice(self._inner.get(name, name))

    def close(self) -> None:
        self._open.clear()

    def error(self, problem: str) -> EngineError:
        return EngineError(f"{self.folder}: {problem}")

    def _weight_map(self) -> dict[str, str]:
        """Tensor -> file by the index, all of whose files exist; empty if the folder holds only one file."""
        index = self.folder / INDEX
        if not index.is_file():
            if (self.folder / SINGLE).is_file():
                return {}
            raise self.error(self._instead())
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise EngineError(f"{index}: has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or len(file.encode()) > MAX_NAME_BYTES:
                raise EngineError(
                    f"{index}: {name!r} is said to be in {str(file)[:80]!r}, not a file of this folder"
                )
        shards = sorted(set(weight_map.values()))
        missing = [file for file in shards if not (self.folder / file).is_file()]
        if missing:
            raise self.error(f"{len(missing)} of {len(shards)} shards are missing: {listed(missing)}")
        return weight_map

    def _instead(self) -> str:
        """For errors: what a folder has instead of the files that are read, and what to do."""
        what = "fetch it again, or take a GGUF file"
        if next(self.folder.glob("pytorch_model*.bin"), None):
            what = "save its pytorch_model*.bin as safetensors (save_pretrained of transformers)"
        elif next(self.folder.glob("*.safetensors"), None):
            what = "without the index its safetensors files may be incomplete; fetch it again"
        return f"holds neither {SINGLE} nor {INDEX}: {what}"

    def _mapped(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            pointer = _is_lfs_pointer(self.folder / file)
            problem = "a pointer of Git LFS, not the file; fetch it with: git lfs pull" if pointer else error
            raise EngineError(f"{self.folder / file}: {problem}") from None


def listed(names: list[str]) -> str:
    """The first few of `names`, for an error of one line."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_lfs_pointer(path: Path) -> bool:
    """Whether there is a regular file at `path` that begins like a pointer of Git LFS."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(LFS)) == LFS
