"""A file or folder with an EAGLE-3 draft model (models/eagle.py), opened beside the model that it drafts for."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.checkpoint import Checkpoint, PartOfCheckpoint
from quengine.models.config import ModelConfig
from quengine.models.draft_layer import DraftTensors
from quengine.models.eagle import ARCHITECTURE, check_fit, config_of_folder, config_of_gguf, is_eagle_config
from quengine.models.gguf import open_gguf
from quengine.models.gguf.gguf_tensors import quant_tensor
from quengine.models.hf.hf_headers import read_config
from quengine.models.hf.hf_shards import HFShards
from quengine.models.tensor_table import check_tensors, tensor_specs

_D2T, _T2D = "d2t", "t2d"
_MEANINGFUL = (".bias", "norm.weight")
"""Ends of names of tensors that change what is computed."""
_OF_TRAINING = ("verifier_",)
"""What names of the target's own tensors begin with, which speculators may save."""
_COMPUTED = "rope_freqs.weight"  # folders do not have it
_LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.layers.0.")


class EagleFile(Protocol):
    """An opened file or folder: its configuration, its tensors by GGUF name, and `drafted`, the target's token for each
    drafted one (int64 [drafted]; None: the same)."""

    config: ModelConfig
    drafted: Tensor | None

    @property
    def tensors(self) -> Mapping[str, QuantTensor]: ...

    def release_pages(self) -> None: ...

    def close(self) -> None: ...


def open_eagle(path: Path, target: Checkpoint) -> "EagleCheckpoint | None":
    """The EAGLE-3 draft model in a GGUF file or a folder; None: it is another model.

    Raises EngineError: the file is wrong, or does not fit the target.
    """
    if path.is_dir():
        if not (path / "config.json").is_file() or not is_eagle_config(keys := read_config(path)):
            return None
        return EagleCheckpoint(path, _Folder(path, keys, target), target)
    with open_gguf(path) as file:
        if file.metadata.get("general.architecture") != ARCHITECTURE:
            return None
    return EagleCheckpoint(path, _GGUF(path, target), target)


class _GGUF:
    def __init__(self, path: Path, target: Checkpoint) -> None:
        self._file = file = open_gguf(path)
        self.config = config_of_gguf(file)
        check_fit(path.name, self.config, target.config, target.path.name)
        check_tensors(file, self.config, {_D2T})
        self.tensors = {name: quant_tensor(file.tensors[name]) for name in tensor_specs(self.config)}
        self.drafted: Tensor | None = None
        stored = file.tensors.get(_D2T)
        if stored is not None:
            if stored.type_name != "I64" or len(stored.shape) != 1:
                problem = f"{stored.type_name} of shape {list(stored.shape)}, must be a vector of I64"
                raise file.tensor_error(_D2T, problem)
            self.drafted = torch.from_numpy(stored.data.copy()).flatten().view(torch.int64)

    def release_pages(self) -> None:
        self._file.release_pages()

    def close(self) -> None:
        self._file.close()


class _Folder:
    def __init__(self, path: Path, keys: Mapping[str, object], target: Checkpoint) -> None:
        self._shards = shards = HFShards(path)
        if (fc := shards.shape("fc.weight")) is None:
            raise shards.error("tensor 'fc.weight' is missing: an EAGLE-3 draft model has it")
        self.config = config_of_folder(keys, shards.files, fc, target.config.block_count)
        check_fit(path.name, self.config, target.config, target.path.name)
        begins = [begin for begin in _LAYER_PREFIXES if any(name.startswith(begin) for name in shards.files)]
        layer = begins[0] if begins else _LAYER_PREFIXES[0]
        self.tensors, unread = {}, {*shards.files} - {_D2T, _T2D}
        for name, spec in tensor_specs(self.config).items():
            if name != _COMPUTED:
                own = f"{layer}{spec.hf}" if name.startswith("blk.") else spec.hf
                stored = shards.stored(own, spec.shape)
                data = shards.tensor(own).reshape(-1, spec.shape[-1]).view(torch.uint8)
                self.tensors[name] = QuantTensor(name, FORMATS[stored.dtype], spec.shape, data)
                unread.discard(own)
        for name in sorted(unread):
            if name.endswith(_MEANINGFUL) and not name.startswith(_OF_TRAINING):
                raise shards.error(f"tensor {name!r}: a draft model with it is not implemented")
        self.drafted: Tensor | None = None
        if _D2T in shards.files:
            assert self.config.eagle is not None
            count = self.config.eagle.drafted
            header = shards.shape(_D2T)
            offsets = shards.tensor(_D2T)
            if header != (count,) or offsets.is_floating_point():
                raise shards.error(
                    f"tensor {_D2T!r} is {offsets.dtype} of shape {list(offsets.shape)}, must be {count} integers"
                )
            self.drafted = offsets.to(torch.int64) + torch.arange(count)

    def release_pages(self) -> None:
        """Does nothing, as for every folder."""

    def close(self) -> None:
        self._shards.close()


class EagleCheckpoint(PartOfCheckpoint):
    """The draft model's layer, itself a `Checkpoint` with the target's tokenizer; see the module docstring.

    `fusion`: the part of it that the target's steps compute. `drafted`: the target's token of each that it drafts,
    int64 [drafted]; None: the same.

    Raises EngineError where it drafts tokens that the target does not have.
    """

    def __init__(self, path: Path, file: EagleFile, target: Checkpoint) -> None:
        super().__init__(target)
        self.path, self.config = path, file.config
        self._file = file
        sizes = file.config.eagle
        assert sizes is not None
        self.drafted = file.drafted
        self._check_drafted(sizes.drafted, target.config.vocab_size)
        self.tensors = {name: tensor for name, tensor in file.tensors.items() if name != "fc.weight"}
        self.fusion = Fusion(file.tensors["fc.weight"], sizes.layers, file)

    def _check_drafted(self, count: int, vocab: int) -> None:
        begin = f"{self.path}: the tokens that it drafts (d2t)"
        if self.drafted is None:
            if count != vocab:
                raise EngineError(f"{begin} are missing: it has {count}, of the target's {vocab}")
            return
        low, high = int(self.drafted.min()), int(self.drafted.max())
        if not 0 <= low <= high < vocab:
            raise EngineError(f"{begin} are from {low} to {high}, the target's from 0 to {vocab - 1}")
        if (different := len(set(self.drafted.tolist()))) != count:
            raise EngineError(f"{begin} are {different} different ones of {count}: each must be there once")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return self.fusion.nbytes + sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def weights(self) -> int:
        return self.fusion.weights + sum(prod(tensor.shape) for tensor in self.tensors.values())

    @cached_property
    def types(self) -> Mapping[str, int]:
        names = (tensor.format.name for tensor in [*self.tensors.values(), self.fusion.whole])
        return dict(Counter(names).most_common())

    @property
    def notes(self) -> list[str]:
        return []

    def draft_tensors(self) -> DraftTensors:
        raise EngineError(f"{self.path.name} has no layer that drafts tokens (MTP)")

    def release_pages(self) -> None:
        self._file.release_pages()

    def close(self) -> None:
        self._file.close()


class Fusion(Mapping[str, QuantTensor]):
    """The matrix `fc` as one matrix for each of the target's layers, by name; their products are summed. Each is a copy
    that is made when it is read, as its columns do not lie together.

    Raises EngineError where a block of its type spans the columns of two layers.
    """

    def __init__(self, whole: QuantTensor, layers: tuple[int, ...], file: EagleFile) -> None:
        self.whole, self.layers, self._file = whole, layers, file
        self.nbytes, self.weights = whole.nbytes, prod(whole.shape)
        width = whole.cols // len(layers)
        try:
            self._row = whole.format.row_bytes(width)
        except ValueError:
            raise EngineError(
                f"fc.weight is {whole.format.name}, whose blocks do not end at multiples of {width} columns; convert "
                "the draft model with fc.weight in another type, as Q8_0"
            ) from None
        self._shape = whole.rows, width
        self._numbers = {f"fc.{number}.weight": number for number in range(len(layers))}

    @property
    def tensors(self) -> Mapping[str, QuantTensor]:
        """Itself, as of a `Checkpoint`."""
        return self

    def __getitem__(self, name: str) -> QuantTensor:
        first = self._numbers[name] * self._row
        data = self.whole.data[:, first : first + self._row].contiguous()
        return QuantTensor(name, self.whole.format, self._shape, data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers  # the inherited one would make the tensor

    def release_pages(self) -> None:
        self._file.release_pages()
