"""A Hugging Face folder converted into a GGUF file, or several: `quengine.convert` and `engine convert`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch

from quengine.errors import EngineError
from quengine.kernels.block_formats import FORMATS
from quengine.models.convert.fields import check_converted, file_fields
from quengine.models.convert.tensors import TYPES, FileTensor, file_tensors, has_drafts
from quengine.models.gguf.whole_file import whole_file
from quengine.models.gguf.writer import Field, TensorInfo, file_bytes, header_bytes, padded, write_padding
from quengine.models.hf.hf_checkpoint import HFCheckpoint
from quengine.models.quantize.mixes import file_order
from quengine.models.quantize.quantizer import Quantizer

_ALIGNMENT = 32

Progress = Callable[[TensorInfo, int, int], None]
"""Called before each tensor with its place, from 0, and the number of tensors."""


@dataclass(frozen=True)
class Conversion:
    """The files that were written, in order, the architecture, the tensors of all, and bytes of all."""

    paths: tuple[Path, ...]
    architecture: str
    tensors: tuple[TensorInfo, ...]
    nbytes: int


def convert(
    folder: str | Path,
    target: str | Path,
    type: str = "f16",
    *,
    split_max_size: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Converts the Hugging Face folder to the GGUF file `target`, tensors and metadata as llama.cpp's converter.

    Args:
        target: where the file goes, complete or not at all; of a split NAME.gguf is NAME-00001-of-00003.gguf.
        type: of matrices: "f32", "f16", "bf16" or "q8_0". Vectors, norms and routers are F32.
        split_max_size: bytes of tensors of a file, at most, but of one tensor at least; None: one file.
        threads: of the CPU; None: one for each processor.

    Raises:
        EngineError: a folder, architecture, tokenizer or type that cannot be converted; weights that are not finite.
        CannotRunError: too little free disk.
    """
    kind = TYPES.get(type.lower())
    if kind is None:
        raise EngineError(
            f"no type {type}: {', '.join(TYPES)}; for others quantize the file: engine quantize"
        )
    path = Path(folder)
    checkpoint = HFCheckpoint(path)
    try:
        check_converted(checkpoint.config)
        tensors = sorted(file_tensors(checkpoint, kind), key=lambda tensor: file_order(tensor.info.name))
        config = replace(checkpoint.config, draft_layers=int(has_drafts(checkpoint)))
        fields = file_fields(path, config, tensors, kind)
        files = _files(Path(target), fields, tensors, split_max_size)
        with Quantizer(torch.device("cpu"), threads) as quantizer:
            nbytes = _write(checkpoint, files, quantizer, progress)
    finally:
        checkpoint.close()
    infos = tuple(tensor.info for tensor in tensors)
    return Conversion(tuple(file.path for file in files), checkpoint.config.architecture, infos, nbytes)


@dataclass(frozen=True)
class _File:
    path: Path
    fields: Mapping[str, Field]
    tensors: Sequence[FileTensor]

    @property
    def infos(self) -> list[TensorInfo]:
        return [tensor.info for tensor in self.tensors]


def _files(
    target: Path, fields: Mapping[str, Field], tensors: list[FileTensor], most: int | None
) -> list[_File]:
    """One file, or those of a split: each with as many tensors as fit, metadata in the first."""
    if most is None:
        return [_File(target, fields, tensors)]
    parts: list[list[FileTensor]] = [[]]
    for tensor in tensors:
        held = sum(padded(each.info.nbytes, _ALIGNMENT) for each in parts[-1])
        if parts[-1] and held + tensor.info.nbytes > most:
            parts.append([])
        parts[-1].append(tensor)
    if len(parts) == 1:
        return [_File(target, fields, tensors)]
    prefix = target.name.removesuffix(".gguf")
    return [
        _File(
            target.with_name(f"{prefix}-{number + 1:05d}-of-{len(parts):05d}.gguf"),
            {**(fields if number == 0 else {}), **_split_fields(number, len(parts), len(tensors))},
            part,
        )
        for number, part in enumerate(parts)
    ]


def _split_fields(number: int, count: int, tensors: int) -> dict[str, Field]:
    return {
        "split.no": Field("uint16", number),
        "split.count": Field("uint16", count),
        "split.tensors.count": Field("int32", tensors),
    }


def _write(
    checkpoint: HFCheckpoint, files: Sequence[_File], quantizer: Quantizer, progress: Progress | None
) -> int:
    """Writes all of them, which take their places together; returns their bytes."""
    total, place, count = 0, 0, sum(len(file.tensors) for file in files)
    sizes = [file_bytes(file.fields, file.infos, _ALIGNMENT) for file in files]
    with ExitStack() as stack:
        for file, nbytes in zip(files, sizes, strict=True):
            out = stack.enter_context(whole_file(file.path, sum(sizes) - total))
            out.write(header_bytes(file.fields, file.infos, _ALIGNMENT))
            for tensor in file.tensors:
                if progress is not None:
                    progress(tensor.info, place, count)
                _write_tensor(out, checkpoint, tensor, quantizer)
                place += 1
            total += nbytes
    return total


def _write_tensor(file: BinaryIO, checkpoint: HFCheckpoint, tensor: FileTensor, quantizer: Quantizer) -> None:
    fmt = FORMATS[tensor.info.type_name]
    for piece in tensor.pieces():
        if piece.format.name == fmt.name:
            file.write(piece.data.numpy().data)
            continue
        for blocks in quantizer.blocks(piece.format, piece.data, fmt, None):
            if blocks is None:
                raise EngineError(f"{checkpoint.path}: tensor {piece.name} has weights that are not finite")
            file.write(blocks.numpy().data)
    write_padding(file, tensor.info.nbytes, _ALIGNMENT)
