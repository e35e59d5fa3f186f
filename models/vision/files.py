"""Tensors of a vision encoder by their GGUF names, from a GGUF projector file (mmproj) or a Hugging Face folder."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.models.gguf.file import GGUFFile
from quengine.models.hf.hf_shards import HFShards, listed
from quengine.models.vision.matrix import Matrix, Q8Matrix
from quengine.models.vision.settings import VisionSettings

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_SAMPLE = 4096
"""Number of bytes of each tensor that the digest of a file includes."""

Change = Callable[[Tensor, VisionSettings], Tensor]
"""A function from a Hugging Face folder's tensor to GGUF's."""


class TensorSource(Protocol):
    """Where an encoder's tensors are read from."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of tensor `name` in torch order; None: it does not exist."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Tensor `name`, which must exist, in its own float type or in fp32; blocks are dequantized to fp32."""
        ...

    def stored(self, name: str) -> Matrix:
        """Tensor `name`, which must exist, as [rows, columns] in its own type: floats or Q8_0 blocks; else fp32."""
        ...

    def unused(self, taken: Iterable[str]) -> list[str]:
        """The names of the encoder's tensors that are not in `taken`."""
        ...

    def identity(self) -> bytes:
        """A digest of the names, shapes and first bytes of all tensors."""
        ...

    def error(self, problem: str) -> EngineError: ...

    def close(self) -> None:
        """Releases the files; tensors taken before stay valid."""
        ...


class GGUFSource:
    """Tensors of a GGUF file. Names that begin with `v.` or `mm.` are an encoder's; `mm.a.` and `a.` are for audio."""

    def __init__(self, file: GGUFFile, ignored: Iterable[str] = ()) -> None:
        self._file = file
        self._ignored = frozenset(ignored)

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._file.tensors.get(name)
        return None if stored is None else stored.shape

    def tensor(self, name: str) -> Tensor:
        stored = self._file.tensors[name]
        return dequantize(FORMATS[stored.type_name], self._data(name)).reshape(stored.shape)

    def stored(self, name: str) -> Matrix:
        stored, data = self._file.tensors[name], self._data(name)
        if stored.type_name == "Q8_0":
            return Q8Matrix.of_blocks(data.view(-1, data.shape[-1]))
        kind = _FLOATS.get(stored.type_name)
        return self.tensor(name) if kind is None else data.view(kind).reshape(stored.shape)

    def _data(self, name: str) -> Tensor:
        """Tensor `name`, uint8 [..., bytes of a row], in the mapped file."""
        stored = self._file.tensors[name]
        if stored.type_name not in FORMATS:
            raise self._file.tensor_error(name, f"type {stored.type_name} is not supported")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # a mapping, read-only on purpose
            return torch.from_numpy(stored.data)

    def unused(self, taken: Iterable[str]) -> list[str]:
        ours = [n for n in self._file.tensors if n.startswith(("v.", "mm.")) and not n.startswith("mm.a.")]
        return sorted({*ours} - {*taken} - self._ignored)

    def identity(self) -> bytes:
        digest = hashlib.sha256()
        for name, stored in sorted(self._file.tensors.items()):
            digest.update(f"{name} {stored.shape} {stored.type_name}".encode())
            digest.update(stored.data.reshape(-1)[:_SAMPLE].tobytes())
        return digest.digest()

    def error(self, problem: str) -> EngineError:
        return EngineError(f"{self._file.path}: {problem}")

    def close(self) -> None:
        self._file.close()


class FolderSource:
    """Tensors of a Hugging Face folder.

    names: GGUF name, with {} for a layer's number -> names in a folder; the first that exists, with or without `model.`
    in front, is taken. changes: by GGUF name with {}. parts: prefixes of the encoder's names.
    """

    def __init__(
        self,
        folder: Path,
        settings: VisionSettings,
        names: Mapping[str, tuple[str, ...]],
        changes: Mapping[str, Change],
        parts: tuple[str, ...],
        ignored: tuple[str, ...],
    ) -> None:
        self._shards = HFShards(folder)
        self._settings = settings
        self._parts = tuple(f"{model}{part}" for part in parts for model in ("", "model."))
        self._ignored = ignored
        self._names: dict[str, str] = {}
        self._changes: dict[str, Change] = {}
        for ours, theirs in names.items():
            for layer in range(settings.layers) if "{}" in ours else (0,):
                found = self._find([each.format(layer) for each in theirs])
                if found is not None:
                    self._names[ours.format(layer)] = found
                    if ours in changes:
                        self._changes[ours.format(layer)] = changes[ours]

    def _find(self, names: list[str]) -> str | None:
        every = (f"{model}{name}" for name in names for model in ("", "model."))
        return next((name for name in every if name in self._shards.files), None)

    @property
    def names(self) -> tuple[str, ...]:
        """GGUF's names of the tensors in the folder."""
        return tuple(self._names)

    def embedding_row(self, token: int) -> Tensor:
        """The row of a token in the text model's embedding. Raises EngineError: there is none."""
        name = next((each for each in self._shards.files if each.endswith("embed_tokens.weight")), None)
        embedding = None if name is None else self._shards.tensor(name)
        if embedding is None or not 0 <= token < len(embedding):
            raise self.error(f"has no row of the text model's embedding for token {token}")
        return embedding[token]

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name in self._changes:
            return tuple(self.tensor(name).shape)
        return self._shards.shape(self._names[name]) if name in self._names else None

    def tensor(self, name: str) -> Tensor:
        theirs = self._names[name]
        found = self._shards.tensor(theirs)
        if found.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise self.error(f"tensor {theirs!r} is of type {found.dtype}; supported are F32, F16, BF16")
        return self._changes[name](found, self._settings) if name in self._changes else found

    def stored(self, name: str) -> Matrix:
        return self.tensor(name)

    def unused(self, taken: Iterable[str]) -> list[str]:
        known = {self._names[name] for name in taken if name in self._names}
        ours = [name for name in self._shards.files if name.startswith(self._parts)]
        ignored = ("position_ids", *self._ignored)
        return sorted(n for n in ours if n not in known and not any(part in n for part in ignored))

    def identity(self) -> bytes:
        digest = hashlib.sha256()
        for name, theirs in sorted(self._names.items()):
            values = self._shards.tensor(theirs)
            digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
            start = values.reshape(-1)[: _SAMPLE // values.element_size()].contiguous()
            digest.update(start.view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def error(self, problem: str) -> EngineError:
        return self._shards.error(problem)

    def close(self) -> None:
        self._shards.close()


class Weights:
    """Checked tensors of an encoder on a device.

    matrix: the dtype of products; all else is fp32 or wider. keeps: matrices stay as stored, except that floats become
    `matrix` on a CUDA device.
    """

    def __init__(
        self, source: TensorSource, device: torch.device, matrix: torch.dtype, keeps: bool = False
    ) -> None:
        self._source = source
        self._device = device
        self.matrix = matrix
        self.vector = torch.float64 if matrix == torch.float64 else torch.float32
        self._keeps = keeps
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return self._source.shape(name) is not None

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Tensor `name`, reshaped to `shape`. Raises EngineError: absent, or shapes differ in more than sizes of 1."""
        self._take(name, shape)
        return self._source.tensor(name).reshape(shape).to(self._device, dtype or self.vector)

    def stored(self, name: str, rows: int, cols: int) -> Matrix:
        """Matrix `name`, [rows, cols]: as stored if `keeps`, else in the type of products. Raises as `tensor` does."""
        if not self._keeps:
            return self.tensor(name, rows, cols, dtype=self.matrix)
        self._take(name, (rows, cols))
        found = self._source.stored(name)
        if isinstance(found, Q8Matrix):
            return found.to(self._device)
        kind = self.matrix if self._device.type == "cuda" else found.dtype
        return found.reshape(rows, cols).to(self._device, kind)

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._source.shape(name)
        if found is None:
            raise self._source.error(f"tensor {name!r} is missing: this projector needs it")
        if [n for n in found if n != 1] != [n for n in shape if n != 1]:
            raise self._source.error(f"tensor {name!r} has shape {list(found)}, must be {list(shape)}")
        self._taken.add(name)

    def count(self, name: str) -> int:
        """The number of values of tensor `name`, 0 where it is absent."""
        found = self._source.shape(name)
        return 0 if found is None else prod(found)

    def check_all_taken(self) -> None:
        """Raises EngineError where the file has tensors of the encoder that nothing has taken."""
        if left := self._source.unused(self._taken):
            raise self._source.error(
                f"{len(left)} tensors that this projector does not apply: {listed(left)}"
            )
