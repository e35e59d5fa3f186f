"""A Hugging Face folder converted into a GGUF file, or several: `quengine.convert` and `engine convert`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch

from quengine.errors import EngineError
from quengine.kernels.block_formats import FORMATS
from quengine.models.convert.convert_adapter import AdapterFile, alpha_of, halves
from quengine.models.convert.convert_eagle import DraftFile
from quengine.models.convert.convert_projector import ProjectorFile
from quengine.models.convert.fields import (
    adapter_fields,
    check_converted,
    eagle_fields,
    file_fields,
    projector_fields,
    task_fields,
)
from quengine.models.convert.tensors import TYPES, FileTensor, file_tensors, has_drafts
from quengine.models.eagle import is_eagle_config
from quengine.models.gguf.whole_file import whole_file
from quengine.models.gguf.writer import Field, TensorInfo, file_bytes, header_bytes, padded, write_padding
from quengine.models.hf.hf_checkpoint import HFCheckpoint
from quengine.models.hf.hf_headers import read_config
from quengine.models.lora.peft import CONFIG, is_peft
from quengine.models.quantize.mixes import file_order
from quengine.models.quantize.quantizer import Quantizer, UnfitWeightsError

_ALIGNMENT = 32

Progress = Callable[[TensorInfo, int, int], None]
"""Called before each tensor with its place, from 0, and the number of tensors."""


@dataclass(frozen=True)
class Conversion:
    """The result: the written files in order, the architecture, all tensors, and the bytes of all files."""

    paths: tuple[Path, ...]
    architecture: str
    tensors: tuple[TensorInfo, ...]
    nbytes: int


def convert(
    folder: str | Path,
    target: str | Path,
    type: str | None = None,
    *,
    base: str | Path | None = None,
    target_folder: str | Path | None = None,
    mmproj: bool = False,
    split_max_size: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Converts a Hugging Face folder to a GGUF file with the tensors and metadata of llama.cpp's converter.

    Adapters of an encoder's tasks (Jina Embeddings v3) are files beside it, lora-TASK-NAME.gguf. A folder of PEFT with
    a LoRA adapter becomes an adapter's file, as llama.cpp's convert_lora_to_gguf.py writes it.

    Args:
        folder: config.json, the tokenizer and the weights in safetensors.
        target: where the file goes, complete or not at all; with a split, NAME.gguf becomes NAME-00001-of-00003.gguf.
        type: the type of matrices, "f32", "f16", "bf16" or "q8_0"; None: "f16", for an adapter "f32". Vectors, norms
            and routers are F32.
        base: for an adapter, the folder of its model, of which only config.json is read; None: the one it names.
        target_folder: for an EAGLE-3 draft model, the folder of the model that it drafts for.
        mmproj: convert the projector of a model with vision, not its text model.
        split_max_size: most bytes of tensors in a file, which has at least one tensor; None: one file.
        threads: CPU threads; None: one for each processor.
        progress: called for each tensor with it, its index and the number of all.

    Raises:
        EngineError: a folder, architecture, tokenizer or type that cannot be converted; weights that are not finite.
        CannotRunError: too little free disk.
    """
    path = Path(folder)
    if not path.is_dir():
        problem = "a file; a folder with config.json is converted" if path.exists() else "no such folder"
        raise EngineError(f"{path}: {problem}")
    name = type or ("f32" if is_peft(path) else "f16")
    if (kind := TYPES.get(name.lower())) is None:
        raise EngineError(
            f"no type {name}: {', '.join(TYPES)}; for others quantize the file: engine quantize"
        )
    _check_flags(path, mmproj, target_folder, base, split_max_size)
    if mmproj:
        return _convert_projector(path, Path(target), kind, threads, progress)
    if target_folder is not None:
        return _convert_eagle(path, Path(target_folder), Path(target), kind, threads, progress)
    if is_peft(path):
        adapter = AdapterFile(path, None if base is None else Path(base), kind)
        fields = adapter_fields(path, adapter.config, adapter.tensors, adapter.alpha)
        files = _files(Path(target), fields, adapter.tensors, split_max_size)
        return _converted(path, adapter.config.architecture, files, threads, progress)
    if base is not None:
        raise EngineError(f"--base {base}: {path} is a model's folder: there is no {CONFIG}")
    if is_eagle_config(read_config(path)):
        raise EngineError(f"{path}: an EAGLE-3 draft model needs its target's folder: --target FOLDER")
    checkpoint = HFCheckpoint(path)
    try:
        check_converted(checkpoint.config)
        tensors = sorted(file_tensors(checkpoint, kind), key=lambda tensor: file_order(tensor.info.name))
        config = replace(checkpoint.config, draft_layers=int(has_drafts(checkpoint)))
        fields = file_fields(path, config, tensors, kind)
        files = _files(Path(target), fields, tensors, split_max_size)
        files += _task_files(Path(target), checkpoint)
        return _converted(path, config.architecture, files, threads, progress)
    finally:
        checkpoint.close()


def _check_flags(
    folder: Path,
    mmproj: bool,
    target_folder: str | Path | None,
    base: str | Path | None,
    split_max_size: int | None,
) -> None:
    """Raises EngineError for arguments that do not go together."""
    given = {"--mmproj": mmproj, "--target": target_folder is not None, "--base": base is not None}
    flags = [flag for flag, is_given in given.items() if is_given]
    if len(flags) > 1:
        raise EngineError(f"{' and '.join(flags)}: give one of them, each is for files of another kind")
    if split_max_size is not None and (flags or is_peft(folder)):
        raise EngineError("--split-max-size: projectors, draft models and adapters are one file")


@dataclass(frozen=True)
class _File:
    path: Path
    fields: Mapping[str, Field]
    tensors: Sequence[FileTensor]

    @property
    def infos(self) -> list[TensorInfo]:
        return [tensor.info for tensor in self.tensors]


def _convert_projector(
    folder: Path, target: Path, kind: str, threads: int | None, progress: Progress | None
) -> Conversion:
    projector = ProjectorFile(folder, kind)
    try:
        fields = projector_fields(folder, projector, kind)
        return _converted(folder, "clip", [_File(target, fields, projector.tensors)], threads, progress)
    finally:
        projector.close()


def _convert_eagle(
    folder: Path, whole: Path, target: Path, kind: str, threads: int | None, progress: Progress | None
) -> Conversion:
    draft = DraftFile(folder, whole, kind)
    try:
        files = [_File(target, eagle_fields(folder, draft, kind), draft.tensors)]
        return _converted(folder, draft.config.architecture, files, threads, progress)
    finally:
        draft.close()


def _converted(
    folder: Path,
    architecture: str,
    files: Sequence["_File"],
    threads: int | None,
    progress: Progress | None,
) -> Conversion:
    with Quantizer(torch.device("cpu"), threads) as quantizer:
        nbytes = _write(folder, files, quantizer, progress)
    infos = tuple(info for file in files for info in file.infos)
    return Conversion(tuple(file.path for file in files), architecture, infos, nbytes)


def _files(
    target: Path, fields: Mapping[str, Field], tensors: list[FileTensor], most: int | None
) -> list[_File]:
    """One file, or the files of a split: each with as many tensors as fit, the metadata in the first."""
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


def _task_files(target: Path, checkpoint: HFCheckpoint) -> list[_File]:
    """The adapters of an encoder's tasks, a file each, beside the model's."""
    encoder, changes = checkpoint.config.encoder, checkpoint.adapters()
    found = []
    for task in () if encoder is None else encoder.tasks:
        of_task = changes[task.name]
        alpha = alpha_of(of_task.values())
        fields = task_fields(checkpoint.config, task, alpha)
        path = target.with_name(f"lora-{task.name}-{target.name}")
        found.append(_File(path, fields, halves(of_task, alpha, "F32")))
    return found


def _split_fields(number: int, count: int, tensors: int) -> dict[str, Field]:
    return {
        "split.no": Field("uint16", number),
        "split.count": Field("uint16", count),
        "split.tensors.count": Field("int32", tensors),
    }


def _write(folder: Path, files: Sequence[_File], quantizer: Quantizer, progress: Progress | None) -> int:
    """Writes all files, which appear at their places together. Returns their bytes."""
    for file in files:
        if file.path.suffix != ".gguf" and file.path.exists() and file.path.parent.samefile(folder):
            raise EngineError(f"{file.path}: a file of the folder itself; give the result another name")
    total, place, count = 0, 0, sum(len(file.tensors) for file in files)
    sizes = [file_bytes(file.fields, file.infos, _ALIGNMENT) for file in files]
    with ExitStack() as stack:
        for file, nbytes in zip(files, sizes, strict=True):
            out = stack.enter_context(whole_file(file.path, sum(sizes) - total))
            out.write(header_bytes(file.fields, file.infos, _ALIGNMENT))
            for tensor in file.tensors:
                if progress is not None:
                    progress(tensor.info, place, count)
                _write_tensor(out, folder, tensor, quantizer)
                place += 1
            total += nbytes
    return total


def _write_tensor(file: BinaryIO, folder: Path, tensor: FileTensor, quantizer: Quantizer) -> None:
    if tensor.computed is not None and tensor.info.type_name == "I64":
        file.write(tensor.computed.numpy().data)
        write_padding(file, tensor.info.nbytes, _ALIGNMENT)
        return
    fmt = FORMATS[tensor.info.type_name]
    for piece in tensor.pieces():
        if piece.format.name == fmt.name:
            file.write(piece.data.numpy().data)
            continue
        try:
            for blocks in quantizer.blocks(piece.format, piece.data, fmt, None):
                file.write(blocks.numpy().data)
        except UnfitWeightsError as error:
            raise EngineError(f"{folder}: tensor {piece.name} {error}") from None
    write_padding(file, tensor.info.nbytes, _ALIGNMENT)
