"""What adapters add to the tensors of a file, which may hold several declared matrices in one tensor."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.lora.change import LowRank
from quengine.models.config import ModelConfig
from quengine.models.lora.adapter import Adapter
from quengine.models.tensor_table import holder_of, tensor_specs

OUTPUT = "output.weight"
_EXPERT = re.compile(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight")


class Segment(NamedTuple):
    """The rows of a file's tensor that come from one declared matrix: their number, and all changes of that matrix."""

    rows: int
    changes: list[LowRank]


class Delta:
    """The change of a tensor whose rows are those of `segments`, in order. device: where it is computed."""

    def __init__(self, segments: Sequence[Segment], columns: int, device: torch.device) -> None:
        self._columns, self._device = columns, device
        self._segments = [
            Segment(rows, [LowRank(a.to(device), b.to(device), scale) for a, b, scale in changes])
            for rows, changes in segments
        ]

    def rows(self, first: int, count: int) -> Tensor:
        """The change of `count` rows from `first` on: fp32 [count, columns]."""
        total = torch.zeros(count, self._columns, device=self._device)
        start = 0
        for size, changes in self._segments:
            low, high = max(first, start), min(first + count, start + size)
            for change in changes if low < high else ():
                part = change._replace(b=change.b[low - start : high - start])
                total[low - first : high - first] += part.delta()
            start += size
        return total


class Deltas:
    """The sum of what adapters, each with a factor, add to a model of this configuration."""

    def __init__(self, config: ModelConfig, adapters: Sequence[tuple[Adapter, float]]) -> None:
        self._adapters, self._specs = adapters, tensor_specs(config)
        for adapter, _ in adapters:
            if OUTPUT in adapter.changes and OUTPUT not in self._specs:
                raise EngineError(
                    f"{adapter.path}: {OUTPUT}: the model's output matrix is its embedding, which it does not change; "
                    "apply the adapter beside the weights (--lora)"
                )
        self._parts: dict[str, list[str]] = {}
        for name in self._specs:
            if (holder := holder_of(name)) not in self._specs:
                self._parts.setdefault(holder, []).append(name)

    def changes(self, name: str) -> bool:
        """Whether the tensor `name` of a file is changed."""
        return any(part in adapter.changes for part in self._declared(name) for adapter, _ in self._adapters)

    def of(self, name: str, device: torch.device) -> Delta:
        """The change of the tensor `name` of a file, which must be a changed one."""
        columns = self._specs[self._declared(name)[-1]].shape[-1]
        return Delta(list(self._segments(name)), columns, device)

    def _segments(self, name: str) -> Iterator[Segment]:
        parts = self._declared(name)
        matrices = [list(self._matrices(part)) for part in parts]
        if parts != [name] and name.endswith("attn_kv_b.weight"):  # attn_k_b is the other way round
            plain = self._specs[parts[0]].shape[-1]
            for key, value in zip(*matrices, strict=True):
                yield Segment(plain, [LowRank(b.T, a.T, scale) for a, b, scale in key.changes])
                yield value
        elif (expert := _EXPERT.fullmatch(name)) is not None and name not in self._specs:
            yield matrices[0][int(expert[2])]
        elif name.endswith("_exps.weight"):
            for together in zip(*matrices, strict=True):
                yield from together
        else:
            for part in matrices:
                yield from part

    def _declared(self, name: str) -> list[str]:
        """The declared tensors that the tensor `name` of a file holds, in order."""
        if name not in self._specs and (expert := _EXPERT.fullmatch(name)) is not None:
            return [f"{expert[1]}_exps.weight"]
        return self._parts.get(name, [name])

    def _matrices(self, name: str) -> Iterator[Segment]:
        """Each of the matrices of a declared tensor."""
        *outer, rows, _ = self._specs[name].shape
        found = [
            change._replace(scale=factor * change.scale)
            for adapter, factor in self._adapters
            if (change := adapter.changes.get(name)) is not None
        ]
        for number in range(outer[0]) if outer else ():
            yield Segment(rows, [each._replace(a=each.a[number], b=each.b[number]) for each in found])
        if not outer:
            yield Segment(rows, found)
