"""A GGUF file quantized into another, tensor by tensor: `quengine.quantize` and `engine quantize`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from quengine.errors import EngineError
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quantize.quantize import PLAIN, SEARCHED_WITH_IMPORTANCE
from quengine.models.gguf import GGUFFile, GGUFTensor, open_gguf
from quengine.models.gguf.gguf_tensors import quant_tensor
from quengine.models.gguf.whole_file import whole_file
from quengine.models.gguf.writer import Field, TensorInfo, file_bytes, header_bytes, write_padding
from quengine.models.lora.deltas import Delta, Deltas
from quengine.models.quantize.imatrix import Imatrix, read_imatrix
from quengine.models.quantize.mixes import (
    Mix,
    ModelTraits,
    Overrides,
    choose_types,
    file_order,
    fitting,
    mix_of,
    needs_importance,
    type_named,
)
from quengine.models.quantize.quantizer import Added, Quantizer, UnfitWeightsError

QUANTIZATION_VERSION = 2
"""Version of the block formats (ggml.h, GGML_QNT_VERSION)."""
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor of the result: its type and bytes before and after.

    wanted_type: the type by the mix and the overrides; differs from `type_name` if rows are not whole blocks of it.
    """

    name: str
    shape: tuple[int, ...]
    source_type: str
    type_name: str
    wanted_type: str
    source_bytes: int
    nbytes: int


@dataclass(frozen=True)
class Quantization:
    """The result: `tensors` in the file's order, and the sizes of both files in bytes.

    without_imatrix: searched tensors for which the imatrix has no values.
    needing_imatrix: tensors whose types cannot be written without such values; only a plan has any.
    merged: tensors that adapters change.
    """

    path: Path | None
    mix: str
    tensors: tuple[QuantizedTensor, ...]
    source_bytes: int
    nbytes: int
    without_imatrix: tuple[str, ...] = ()
    needing_imatrix: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        weights = sum(int(np.prod(tensor.shape)) for tensor in self.tensors)
        return 8 * sum(tensor.nbytes for tensor in self.tensors) / weights


Progress = Callable[[QuantizedTensor, int, int], None]
"""Called before each tensor with its place, from 0, and the number of tensors."""


@dataclass(frozen=True)
class Plan:
    """What to write.

    deltas: what adapters add to tensors, whose bytes are then made of the sums.
    wanted: for tensors whose rows are not whole blocks of the type chosen for them, that type.
    """

    source: GGUFFile
    order: list[GGUFTensor]
    types: Mapping[str, str]
    imatrix: Imatrix | None
    fields: Mapping[str, Field]
    alignment: int
    deltas: Deltas | None = None
    wanted: Mapping[str, str] = field(default_factory=dict)

    @property
    def infos(self) -> list[TensorInfo]:
        return [TensorInfo(tensor.name, tensor.shape, self.types[tensor.name]) for tensor in self.order]


def quantize(
    source: str | Path,
    target: str | Path | None,
    type: str,
    *,
    imatrix: str | Path | None = None,
    tensor_types: Sequence[str] = (),
    output_type: str | None = None,
    token_embd_type: str | None = None,
    pure: bool = False,
    allow_requantize: bool = False,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Quantization:
    """Quantizes a GGUF file.

    The result does not depend on the device or the number of threads. Metadata are copied, with the keys of
    quantization set. It takes some MB of memory per thread, on a GPU some GB; the tensors stay in the file.

    Args:
        source: the file in F32, F16 or BF16; any file of a split one.
        target: path of the result, which appears only when complete; None: only plan, with sizes.
        type: a mix (`mixes.MIXES`), such as "Q4_K_M".
        imatrix: importances of columns, a file of llama-imatrix in either format.
        tensor_types: "PATTERN=TYPE", for tensors in whose name the regular expression is found; the first one decides.
        output_type: tensor type of output.weight.
        token_embd_type: tensor type of the token embedding.
        pure: the mix's type for every matrix.
        allow_requantize: accept tensors that are already quantized; errors of both quantizations add up.
        device: "cpu", "cuda" or "cuda:N".
        threads: CPU threads; None: one for each processor.
        progress: called for each tensor with it, its index and the number of all.

    Raises:
        EngineError: a file, type or pattern that cannot be used; weights that are not finite.
        CannotRunError: too little free disk.
    """
    mix = mix_of(type)
    overrides = Overrides(
        output_type and type_named(output_type),
        token_embd_type and type_named(token_embd_type),
        [_override(each) for each in tensor_types],
        pure,
    )
    importance = None if imatrix is None else read_imatrix(Path(imatrix))
    if Path(source).is_dir():
        raise EngineError(
            f"{source}: is a folder; make a file of it first: engine convert {source} -o model-f16.gguf"
        )
    with open_gguf(source) as file:
        plan = plan_mix(file, mix, overrides, importance)
        _check(plan, mix, allow_requantize, target)
        result = planned(plan, mix.name, None if target is None else Path(target))
        if target is not None:
            with Quantizer(torch.device(device), threads) as quantizer:
                write_plan(plan, result, Path(target), quantizer, progress)
    return result


def _override(text: str) -> tuple[re.Pattern[str], str]:
    pattern, equals, kind = text.rpartition("=")
    if not equals or not pattern:
        raise EngineError(f"--tensor-type {text}: must be PATTERN=TYPE, as ffn_down=q6_k")
    try:
        return re.compile(pattern.lower()), type_named(kind)
    except re.error as error:
        raise EngineError(f"--tensor-type {text}: {pattern!r} is not a regular expression: {error}") from None


def plan_mix(file: GGUFFile, mix: Mix, overrides: Overrides, imatrix: Imatrix | None) -> Plan:
    """The plan for the file's tensors in a mix's types. Raises EngineError: a pattern of `overrides` is in no name."""
    order = sorted(file.tensors.values(), key=lambda tensor: file_order(tensor.name))
    chosen = choose_types(order, mix, _traits(file), overrides, imatrix is not None)
    types = {tensor.name: fitting(tensor, chosen[tensor.name]) for tensor in order}
    wanted = {name: kind for name, kind in chosen.items() if kind != types[name]}
    alignment = file.get_int("general.alignment") or 32
    return Plan(file, order, types, imatrix, _fields(file, mix, imatrix), alignment, wanted=wanted)


def _traits(file: GGUFFile) -> ModelTraits:
    name = file.require_str("general.architecture")
    return ModelTraits(
        name,
        file.get_int(f"{name}.block_count") or 0,
        file.get_int(f"{name}.expert_count") or 0,
        _first(file, f"{name}.attention.head_count"),
        _first(file, f"{name}.attention.head_count_kv") or _first(file, f"{name}.attention.head_count"),
    )


def _first(file: GGUFFile, key: str) -> int:
    """The integer at a key, or the first layer's if it is an array."""
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray) and value.size:
        return int(value[0])
    return value if isinstance(value, int) else 0


def _fields(file: GGUFFile, mix: Mix, imatrix: Imatrix | None) -> dict[str, Field]:
    """The file's metadata, and after them the keys that llama-quantize sets."""
    own: dict[str, Field] = {
        "general.quantization_version": Field("uint32", QUANTIZATION_VERSION),
        "general.file_type": Field("uint32", mix.number),
    }
    if imatrix is not None:
        own["quantize.imatrix.file"] = Field("string", imatrix.path.name)
        if imatrix.datasets:
            own["quantize.imatrix.dataset"] = Field("string", imatrix.datasets[0])
        own["quantize.imatrix.entries_count"] = Field("uint32", len(imatrix.values))
        if imatrix.chunks > 0:
            own["quantize.imatrix.chunks_count"] = Field("uint32", imatrix.chunks)
    kept = {key: Field(entry.type_name, entry.value) for key, entry in file.entries.items()}
    return {key: field for key, field in kept.items() if key not in own and key not in _SPLIT_KEYS} | own


def _check(plan: Plan, mix: Mix, allow_requantize: bool, target: str | Path | None) -> None:
    file = plan.source
    if target is not None and any(is_same(Path(target), path) for path in file.shards):
        raise EngineError(f"{target}: that is the file to be quantized; give the result another name")
    if target is not None:
        check_importances(plan, mix.name)
    for tensor in plan.order:
        changed = plan.types[tensor.name] != tensor.type_name
        if changed and not allow_requantize and tensor.type_name not in ("F32", "F16", "BF16"):
            kinds = f"{tensor.type_name}, to be {plan.types[tensor.name]}"
            raise file.tensor_error(
                tensor.name, f"is quantized already ({kinds}): start from F16, or add --allow-requantize"
            )


def check_importances(plan: Plan, mix: str) -> None:
    """Raises EngineError where a tensor's new type needs importances and there are none for it. mix: its name."""
    for name in _needing_importance(plan, mix):
        kind = plan.types[name]
        if plan.imatrix is None:
            raise EngineError(f"{mix} needs an imatrix, for {name} in {kind}: --imatrix FILE")
        raise EngineError(f"{plan.imatrix.path}: no values for {name}, which needs them in {kind}")


def is_same(target: Path, source: Path) -> bool:
    """Whether the file to be written is the one that is read."""
    return target.exists() and target.samefile(source)


def planned(plan: Plan, mix: str, target: Path | None) -> Quantization:
    """The result that describes a plan. mix: its name."""
    infos = plan.infos
    tensors = tuple(
        QuantizedTensor(
            info.name,
            info.shape,
            tensor.type_name,
            info.type_name,
            plan.wanted.get(info.name, info.type_name),
            tensor.nbytes,
            info.nbytes,
        )
        for tensor, info in zip(plan.order, infos, strict=True)
    )
    return Quantization(
        target,
        mix,
        tensors,
        plan.source.nbytes,
        file_bytes(plan.fields, infos, plan.alignment),
        tuple(each.name for each in tensors if _misses_importance(plan, each)),
        tuple(_needing_importance(plan, mix)),
        tuple(each.name for each in tensors if plan.deltas is not None and plan.deltas.changes(each.name)),
    )


def _needing_importance(plan: Plan, mix: str) -> list[str]:
    """The tensors without importances whose types need them."""
    return [
        tensor.name
        for tensor in plan.order
        if plan.types[tensor.name] != tensor.type_name
        and needs_importance(tensor.name, plan.types[tensor.name], mix)
        and (plan.imatrix is None or plan.imatrix.of(tensor.name, tensor.shape) is None)
    ]


def _misses_importance(plan: Plan, tensor: QuantizedTensor) -> bool:
    if plan.imatrix is None or tensor.type_name == tensor.source_type:
        return False
    searched = FORMATS[tensor.type_name].is_quantized and tensor.type_name not in PLAIN
    return searched and plan.imatrix.of(tensor.name, tensor.shape) is None


def write_plan(
    plan: Plan, result: Quantization, target: Path, quantizer: Quantizer, progress: Progress | None
) -> None:
    infos = plan.infos
    with whole_file(target, result.nbytes) as file:
        file.write(header_bytes(plan.fields, infos, plan.alignment))
        for place, (tensor, info) in enumerate(zip(plan.order, infos, strict=True)):
            if progress is not None:
                progress(result.tensors[place], place, len(infos))
            _write_tensor(file, plan, tensor, info, quantizer)
            write_padding(file, info.nbytes, plan.alignment)
            plan.source.release_pages()


def _write_tensor(
    file: BinaryIO, plan: Plan, tensor: GGUFTensor, info: TensorInfo, quantizer: Quantizer
) -> None:
    merged = plan.deltas is not None and plan.deltas.changes(tensor.name)
    if info.type_name == tensor.type_name and not merged:
        file.write(tensor.data.data)
        return
    importance = _importance(plan, tensor, info.type_name, merged)
    experts = 1 if importance is None else len(importance)
    rows, place = len(tensor.data) // experts, 0
    for part, added in _rows(plan, tensor, merged, rows, quantizer.device):
        values = None if importance is None else torch.from_numpy(importance[place // rows].copy())
        stored, fmt = FORMATS[tensor.type_name], FORMATS[info.type_name]
        try:
            for blocks in quantizer.blocks(stored, part, fmt, values, added):
                file.write(blocks.numpy().data)
        except UnfitWeightsError as error:
            problem = f"with what adapters add {error}" if merged else str(error)
            raise plan.source.tensor_error(tensor.name, problem) from None
        place += len(part)


def _importance(plan: Plan, tensor: GGUFTensor, kind: str, merged: bool) -> NDArray[np.float32] | None:
    """The importance of each column of a tensor, fp32 [experts or 1, columns]; None: llama.cpp's weights for the
    type (kernels/quantize/quantize.py).

    Without importances in a file, a tensor that is already quantized gets equal ones: the plain formula goes by a
    block's extremes and would miss the grid of the weights (2% more error for Q5_1 made of Q4_1).
    """
    found = None if plan.imatrix is None else plan.imatrix.of(tensor.name, tensor.shape)
    on_grid = FORMATS[tensor.type_name].is_quantized and not merged
    if found is None and on_grid and kind in SEARCHED_WITH_IMPORTANCE:
        return np.ones((1, tensor.shape[-1]), np.float32)
    return found


def _rows(
    plan: Plan, tensor: GGUFTensor, merged: bool, most: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, Added | None]]:
    """Pieces of at most `most` rows of the tensor, each with what is added to it if `merged`, else None."""
    delta = plan.deltas.of(tensor.name, device) if merged and plan.deltas is not None else None
    for number, part in enumerate(torch.split(quant_tensor(tensor).data, most)):
        yield part, None if delta is None else partial(_added, delta, number * most)


def _added(delta: Delta, begin: int, first: int, count: int) -> torch.Tensor:
    """What `delta` adds to `count` rows from row `first` on, of the part that begins at row `begin`."""
    return delta.rows(begin + first, count)
