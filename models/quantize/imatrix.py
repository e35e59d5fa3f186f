"""Importance matrices: for each tensor the mean square of the activations that meet its columns.

llama.cpp's llama-imatrix has two formats. Both are read, the first is written. The first is a GGUF file with tensors
NAME.in_sum2 [experts, columns] and NAME.counts [experts]. The older `.dat` has an i32 count of entries, then for each a
name, the number of calls, and values: sums divided by tokens and multiplied by calls. The number of chunks and the
dataset's name follow.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quengine.errors import EngineError, nearest_file
from quengine.models.gguf import GGUFFile, open_gguf
from quengine.models.gguf.whole_file import whole_file
from quengine.models.gguf.writer import Field, TensorInfo, file_bytes, header_bytes, write_padding

_SUMS, _COUNTS = ".in_sum2", ".counts"
_KEYS = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")
_FIRST, _ADDED = "imatrix.first_chunk", "imatrix.added_chunks"
"""Keys that only quengine writes: in files whose first chunk is not that of the text, and in files with sums of
others."""
_ALIGNMENT = 32
_MOST_CHUNKS = (1 << 32) - 1


@dataclass(frozen=True)
class Sums:
    """A tensor's sums of squared inputs, fp64 [experts or 1, columns], and the numbers of rows added, int64 [experts or
    1]: each expert has its own rows."""

    squares: NDArray[np.float64]
    counts: NDArray[np.int64]

    def __add__(self, other: "Sums") -> "Sums":
        """Raises ValueError where the shapes differ."""
        return Sums(self.squares + other.squares, self.counts + other.counts)

    def of_experts(self, experts: int) -> "Sums":
        """These sums by expert; a single count is repeated for all experts."""
        counts = np.broadcast_to(self.counts, (experts,))
        return Sums(self.squares.reshape(experts, -1), counts)


@dataclass(frozen=True)
class ImatrixSums:
    """The content of an imatrix file, to which more chunks can be added.

    chunk_size: tokens of a chunk; 0: the file has the older format, which lacks it; a chunk then counts as one row.
    first: chunks of the last text that were skipped before the first counted one.
    added: how many of `chunks` are not consecutive chunks of the last text from `first` on: those of added files.
    """

    sums: Mapping[str, Sums]
    datasets: tuple[str, ...]
    chunks: int
    chunk_size: int
    first: int = 0
    added: int = 0

    def in_chunks_of(self, size: int) -> Mapping[str, Sums]:
        """The sums; those of the older format count as chunks of this size."""
        if self.chunk_size:
            return self.sums
        return {name: Sums(each.squares * size, each.counts * size) for name, each in self.sums.items()}

    def chunks_of(self, size: int) -> int:
        """Number of chunks of this size that hold as many tokens as these, rounded up."""
        return -(-self.chunks * (self.chunk_size or size) // size)

    def goes_on_in(self, other: "ImatrixSums") -> bool:
        """Whether `other` continues these: its chunks are the next ones of the last text."""
        same = self.chunk_size == other.chunk_size != 0 and self.datasets[-1:] == other.datasets
        return same and not other.added and other.first == self.first + self.chunks - self.added


@dataclass(frozen=True)
class Imatrix:
    """`values` maps tensor names to fp32 [experts or 1, columns]; `datasets` and `chunks` say what it was made of."""

    path: Path
    values: Mapping[str, NDArray[np.float32]]
    datasets: tuple[str, ...] = ()
    chunks: int = 0

    def of(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        """The importance of a tensor of this shape, [experts or 1, columns], or None where the file has none.

        Raises EngineError where the file has another number of values for it; None for the token embedding then, as
        it is a look-up.
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


def read_sums(path: Path) -> ImatrixSums:
    """The sums of a file in either format. Raises EngineError as `read_imatrix`."""
    read_imatrix(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            return _dat_sums(path)
    with open_gguf(path) as gguf:
        sums = dict[str, Sums]()
        for name in _names(gguf):
            squares, counts = _stored_sums(gguf, name)
            sums[name] = Sums(squares.astype(np.float64), counts[:, 0].astype(np.int64))
        datasets = tuple(gguf.require_strings("imatrix.datasets"))
        chunks, size = (gguf.require_int(key) for key in _KEYS[1:])
        first, added = (gguf.require_int(key) if key in gguf.metadata else 0 for key in (_FIRST, _ADDED))
        if added > chunks:
            raise gguf.error(_ADDED, f"{added} of {chunks} chunks")
        return ImatrixSums(sums, datasets, chunks, size, first, added)


def added_sums(files: Sequence[ImatrixSums], chunk_size: int | None = None) -> ImatrixSums:
    """The sums of all files, with each text named once. chunk_size: None takes their largest.

    Files of consecutive chunks of a text give the same as one file of all these chunks.

    Raises EngineError for files of several models.
    """
    size = max(each.chunk_size for each in files) if chunk_size is None else chunk_size
    sums = dict[str, Sums]()
    for each in files:
        for name, found in each.in_chunks_of(size or 1).items():
            sums[name] = _added(name, sums[name], found) if name in sums else found
    datasets = each_text(name for each in files for name in each.datasets)
    if (chunks := sum(each.chunks_of(size or 1) for each in files)) > _MOST_CHUNKS:
        raise EngineError(f"{chunks} chunks: an imatrix file counts at most {_MOST_CHUNKS}")
    first, added = 0, chunks
    if all(before.goes_on_in(each) for before, each in pairwise(files)):
        first, added = files[0].first, files[0].added
    return ImatrixSums(sums, datasets, chunks, size, first, added)


def each_text(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, at its last place: the last text stays the last."""
    return tuple(dict.fromkeys(reversed(list(names))))[::-1]


def _added(name: str, first: Sums, second: Sums) -> Sums:
    """A tensor's sums in two files added; a file of the older format has one count for all experts."""
    experts = max(first.counts.size, second.counts.size)
    if first.squares.size != second.squares.size or not {first.counts.size, second.counts.size} <= {
        1,
        experts,
    }:
        sizes = " and ".join(f"{each.squares.size} of {each.counts.size}" for each in (first, second))
        raise EngineError(f"{name}: columns of experts to add differ, {sizes}: of different models")
    return first.of_experts(experts) + second.of_experts(experts)


def write_sums(path: Path, imatrix: ImatrixSums) -> None:
    """Writes the GGUF format; the file appears when it is complete. Raises as `whole_file` does."""
    fields = {
        "general.type": Field("string", "imatrix"),
        "imatrix.datasets": Field("array of string", imatrix.datasets),
        "imatrix.chunk_count": Field("uint32", imatrix.chunks),
        "imatrix.chunk_size": Field("uint32", imatrix.chunk_size),
    }
    for key, chunks in ((_FIRST, imatrix.first), (_ADDED, imatrix.added)):
        if chunks:
            fields[key] = Field("uint32", chunks)
    parts = list(_tensors(imatrix.sums))
    infos = [TensorInfo(name, values.shape, "F32") for name, values in parts]
    with whole_file(path, file_bytes(fields, infos, _ALIGNMENT)) as file:
        file.write(header_bytes(fields, infos, _ALIGNMENT))
        for info, (_, values) in zip(infos, parts, strict=True):
            file.write(values.tobytes())
            write_padding(file, info.nbytes, _ALIGNMENT)


def _tensors(sums: Mapping[str, Sums]) -> Iterable[tuple[str, NDArray[np.float32]]]:
    for name in sorted(sums):
        yield name + _SUMS, sums[name].squares.astype("<f4")
        yield name + _COUNTS, sums[name].counts.astype("<f4")[:, None]


def _read_gguf(path: Path) -> Imatrix:
    with open_gguf(path) as file:
        names = _names(file)
        datasets = tuple(file.require_strings("imatrix.datasets"))
        chunks = file.require_int("imatrix.chunk_count")
        return Imatrix(path, {name: _mean(file, name) for name in names}, datasets, chunks)


def _names(file: GGUFFile) -> list[str]:
    """The tensors that an imatrix file has values for. Raises EngineError where it is no imatrix."""
    missing = [key for key in _KEYS if key not in file.metadata]
    names = [name.removesuffix(_SUMS) for name in file.tensors if name.endswith(_SUMS)]
    if missing or not names:
        what = f"has no {missing[0]}" if missing else f"has no tensors {_SUMS}"
        raise EngineError(f"{file.path}: {what}: not an imatrix file")
    return names


def _mean(file: GGUFFile, name: str) -> NDArray[np.float32]:
    """Sums divided by counts, fp32; experts that no token reached have 1 in every column."""
    total, numbers = _stored_sums(file, name)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(numbers > 0, total / numbers, np.float32(1)).astype(np.float32)


def _stored_sums(file: GGUFFile, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Sums [experts or 1, columns] and whole counts [experts or 1, 1]."""
    sums, counts = file.tensors[name + _SUMS], file.tensors.get(name + _COUNTS)
    if counts is None or sums.type_name != "F32" or counts.type_name != "F32":
        raise file.tensor_error(name + _SUMS, f"must be F32, with its {_COUNTS} in F32 beside it")
    numbers = counts.data.view("<f4").reshape(-1, 1).round()
    if not np.isfinite(numbers).all() or (numbers < 0).any():
        raise file.tensor_error(name + _COUNTS, "has counts that are negative or not finite")
    total = sums.data.view("<f4")
    if total.size % numbers.size:
        raise file.tensor_error(name + _COUNTS, f"{numbers.size} counts for {total.size} sums")
    return total.reshape(numbers.size, -1), numbers


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
    found = _dat_sums(path)
    values = dict[str, NDArray[np.float32]]()
    for name, each in found.sums.items():
        values[name] = each.squares.astype(np.float32) / np.float32(each.counts[0])
    return Imatrix(path, values, found.datasets, found.chunks)


def _dat_sums(path: Path) -> ImatrixSums:
    """The sums in the older format, in which each tensor counts its own calls. The first files of this format end with
    the tensors."""
    dat, sums = _Dat(path), dict[str, Sums]()
    entries = dat.int()
    if entries < 1:
        raise EngineError(f"{path}: {entries} entries: not an imatrix file")
    for _ in range(entries):
        name, calls, count = dat.text(), max(1, dat.int()), dat.int()
        squares = np.frombuffer(dat.take(4 * count), "<f4").astype(np.float64).reshape(1, -1)
        sums[name] = Sums(squares, np.array([calls]))
    ended = dat.at == len(dat.data)
    chunks = max(int(each.counts[0]) for each in sums.values()) if ended else max(1, dat.int())
    datasets = (dat.text(),) if dat.at < len(dat.data) else ()
    return ImatrixSums(sums, datasets, chunks, 0)
