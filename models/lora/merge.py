"""LoRA adapters merged into a GGUF file, tensor by tensor: `quengine.merge` and `engine merge`."""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

import torch

from quengine.errors import EngineError
from quengine.kernels.quantize.quantize import WRITTEN
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.gguf.writer import Field
from quengine.models.lora.adapter import Adapter, parse_lora
from quengine.models.lora.deltas import Deltas
from quengine.models.lora.open_adapter import open_adapter
from quengine.models.quantize.imatrix import read_imatrix
from quengine.models.quantize.mixes import Overrides, file_order, mix_of
from quengine.models.quantize.quantize_file import (
    Plan,
    Progress,
    Quantization,
    check_importances,
    is_same,
    plan_mix,
    planned,
    write_plan,
)
from quengine.models.quantize.quantizer import Quantizer


def merge(
    source: str | Path,
    adapters: Sequence[str | Path | tuple[str | Path, float]],
    target: str | Path,
    type: str | None = None,
    *,
    imatrix: str | Path | None = None,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Quantization:
    """Adds the adapters' changes to the weights of the GGUF file `source`, and writes it as the file `target`.

    Each changed tensor is dequantized, scale * alpha / r * B A of every adapter is added in fp32, and the sum is
    quantized to the tensor's type, which rounds again. Other tensors keep their bytes unless `type` gives them another
    type. It takes memory for the adapters and some pieces of tensors.

    Args:
        source: the file; any file of a split one.
        adapters: GGUF files or folders of PEFT: "FILE", "FILE:SCALE" or (file, scale).
        target: path of the result, which appears only when complete.
        type: a mix of types for all matrices, such as "Q4_K_M" or "F16", as `quengine.quantize` has it; None: as they
            are stored.
        imatrix: importances of columns, for the matrices that are quantized.
        device: "cpu", "cuda" or "cuda:N", which adds and quantizes; sums may differ in their last bits between them.
        threads: CPU threads; None: one for each processor.

    Raises:
        EngineError: a file, adapter or scale that cannot be used (`open_adapter`); a changed tensor of a type that is
            not written; sums that are not finite, or larger than a type holds.
        CannotRunError: too little free disk.
    """
    path = Path(source)
    if path.is_dir():
        raise EngineError(
            f"{path}: a folder: first make a file of it, as engine convert {path} -o model.gguf"
        )
    if not adapters:
        raise EngineError("no adapter to merge: --lora FILE")
    given = [parse_lora(str(each)) if not isinstance(each, tuple) else each for each in adapters]
    for each, scale in given:
        if not isfinite(scale):
            raise EngineError(f"{each}: a scale of {scale} is no number")
    checkpoint = GGUFCheckpoint(path)
    try:
        opened = [(open_adapter(Path(each), checkpoint.config), scale) for each, scale in given]
        deltas = Deltas(checkpoint.config, opened)
        plan, mix = _plan(checkpoint, type, imatrix, deltas)
        _check_target(Path(target), plan, opened)
        _check_types(plan, deltas)
        check_importances(plan, mix)
        result = planned(plan, mix, Path(target))
        with Quantizer(torch.device(device), threads) as quantizer:
            write_plan(plan, result, Path(target), quantizer, progress)
    finally:
        checkpoint.close()
    return result


def _plan(
    checkpoint: GGUFCheckpoint, kind: str | None, imatrix: str | Path | None, deltas: Deltas
) -> tuple[Plan, str]:
    """The plan of the file, and the name of the mix; "as stored" if the types stay."""
    file, importance = checkpoint.file, None if imatrix is None else read_imatrix(Path(imatrix))
    if kind is not None:
        mix = mix_of(kind)
        return replace(plan_mix(file, mix, Overrides(), importance), deltas=deltas), mix.name
    order = sorted(file.tensors.values(), key=lambda tensor: file_order(tensor.name))
    fields = {
        key: Field(entry.type_name, entry.value)
        for key, entry in file.entries.items()
        if not key.startswith("split.")
    }
    types = {tensor.name: tensor.type_name for tensor in order}
    alignment = file.get_int("general.alignment") or 32
    return Plan(file, order, types, importance, fields, alignment, deltas), "as stored"


def _check_target(target: Path, plan: Plan, opened: Sequence[tuple[Adapter, float]]) -> None:
    if any(is_same(target, path) for path in plan.source.shards):
        raise EngineError(f"{target}: that is the model itself; give the result another name")
    if any(is_same(target, adapter.path) for adapter, _ in opened if adapter.path.is_file()):
        raise EngineError(f"{target}: that is an adapter; give the result another name")


def _check_types(plan: Plan, deltas: Deltas) -> None:
    for tensor in plan.order:
        kind = plan.types[tensor.name]
        if not deltas.changes(tensor.name):
            continue
        if tensor.type_name == "NVFP4":
            raise plan.source.tensor_error(tensor.name, "NVFP4 is not merged: its scale is another tensor's")
        if kind not in WRITTEN:
            problem = f"{kind} is not written, and an adapter changes it: choose other types with --type"
            raise plan.source.tensor_error(tensor.name, problem)
