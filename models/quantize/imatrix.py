"""Importance matrices: for each tensor the mean square of the activations that meet its columns.

Two formats of llama.cpp's llama-imatrix: a GGUF file with tensors NAME.in_sum2 [experts, columns] and NAME.counts
[experts], and the older `.dat`: u32 entries, each a name, the number of calls and values that are sums already divided
by tokens and multiplied by calls; then the number of chunks and the dataset's name.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quengine.errors import EngineError, nearest_file
from quengine.models.gguf import GGUFFile, open_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"
_KEYS = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")


@dataclass(frozen=True)
class Imatrix:
    """`values` maps tensor names to fp32 [experts or 1, columns]; `datasets` and `chunks` say what it was made of."""

    path: Path
    values: Mapping[str, NDArray[np.float32]]
    datasets: tuple[str, ...] = ()
    chunks: int = 0

    def of(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        """The importance of a tensor of this shape, [experts or 1, columns], or None where the file has none.

        Raises EngineError where the file's is of another shape; an embedding's is left out then, as it is a look-up.
        """
        values = self.values.get(name)
        if values is None:
            return None
        experts = shape[-3] if len(shape) > 2 else 1
        if values.size == experts * shape[-1]:
            return values.reshape(experts, shape[-1])
        if name.endswith("token_embd.weight"):
            return None
        raise EngineError(
            f"{self.path}: {name} has {values.size} values, the tensor {experts * shape[-1]}: "
            "an imatrix of another model"
        )


def read_imatrix(path: Path) -> Imatrix:
    """Reads either format. Raises EngineError for what is not one, or has values that are not finite."""
    if not path.is_file():
        raise EngineError(f"{path}: no imatrix file here{nearest_file(path)}")
    with path.open("rb") as file:
        magic = file.read(4)
    found = _read_gguf(path) if magic == b"GGUF" else _read_dat(path)
    for name, values in found.values.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise EngineError(
                f"{path}: {name} has values that are negative or not finite: the imatrix is unusable"
            )
    return found


def _read_gguf(path: Path) -> Imatrix:
    with open_gguf(path) as file:
        missing = [key for key in _KEYS if key not in file.metadata]
        names = [name.removesuffix(_SUMS) for name in file.tensors if name.endswith(_SUMS)]
        if missing or not names:
            what = f"has no {missing[0]}" if missing else f"has no tensors {_SUMS}"
            raise EngineError(f"{path}: {what}: not an imatrix file")
        datasets = tuple(file.require_strings("imatrix.datasets"))
        chunks = file.require_int("imatrix.chunk_count")
        return Imatrix(path, {name: _mean(file, name) for name in names}, datasets, chunks)


def _mean(file: GGUFFile, name: str) -> NDArray[np.float32]:
    """Sums divided by counts; experts that no token reached count 1 in every column."""
    sums, counts = file.tensors[name + _SUMS], file.tensors.get(name + _COUNTS)
    if counts is None or sums.type_name != "F32" or counts.type_name != "F32":
        raise file.tensor_error(name + _SUMS, f"must be F32, with its {_COUNTS} in F32 beside it")
    numbers = counts.data.view("<f4").reshape(-1, 1).round()
    total = sums.data.view("<f4")
    if total.size % numbers.size:
        raise file.tensor_error(name + _COUNTS, f"{numbers.size} counts for {total.size} sums")
    total = total.reshape(numbers.size, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(numbers > 0, total / numbers, np.float32(1)).astype(np.float32)


class _Dat:
    """A bounded reader of the older format."""

    def __init__(self, path: Path) -> None:
        self.path, self.data, self.at = path, path.read_bytes(), 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.data) - self.at:
            raise EngineError(f"{self.path}: not an imatrix file, or cut short at byte {self.at}")
        self.at += count
        return self.data[self.at - count : self.at]

    def int(self) -> int:
        return int(struct.unpack("<i", self.take(4))[0])

    def text(self) -> str:
        return self.take(self.int()).decode("utf-8", "replace").split("\0")[0]


def _read_dat(path: Path) -> Imatrix:
    dat, values = _Dat(path), dict[str, NDArray[np.float32]]()
    entries = dat.int()
    if entries < 1:
        raise EngineError(f"{path}: {entries} entries: not an imatrix file")
    for _ in range(entries):
        name, calls, count = dat.text(), dat.int(), dat.int()
        sums = np.frombuffer(dat.take(4 * count), "<f4").reshape(1, -1)
        values[name] = (sums / np.float32(max(calls, 1))).astype(np.float32)
    if dat.at == len(dat.data):
        return Imatrix(path, values)
    chunks = dat.int()
    datasets = (dat.text(),) if dat.at < len(dat.data) else ()
    return Imatrix(path, values, datasets, chunks)
