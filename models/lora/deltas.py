"""What adapters add to the tensors of a file, in whatever form the file holds them."""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quengine.models.config import ModelConfig
from quengine.models.lora.adapter import Adapter, LowRank
from quengine.models.tensor_table import holder_of, tensor_specs

_EXPERT = re.compile(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight")
_PIECE = 1 << 24
"""Weights of a piece."""


class Deltas:
    """The sum of what adapters, each with a factor, add to a model of this configuration."""

    def __init__(self, config: ModelConfig, adapters: Sequence[tuple[Adapter, float]]) -> None:
        self._adapters, self._specs = adapters, tensor_specs(config)
        self._parts: dict[str, list[str]] = {}
        for name in self._specs:
            if (holder := holder_of(name)) not in self._specs:
                self._parts.setdefault(holder, []).append(name)

    def changes(self, name: str) -> bool:
        """Whether the tensor `name` of a file is changed."""
        return any(part in adapter.changes for part in self._declared(name) for adapter, _ in self._adapters)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """What is added to the tensor `name` of a file: fp32 [rows, columns] of some rows at a time, in order."""
        parts = self._declared(name)
        if parts != [name] and name.endswith("attn_kv_b.weight"):  # attn_k_b is the other way round
            keys, values = (list(self._matrices(part)) for part in parts)
            for key, value in zip(keys, values, strict=True):
                yield torch.cat([self._sum(key, slice(None)).T, self._sum(value, slice(None))])
            return
        matrices = [list(self._matrices(part)) for part in parts]
        if (expert := _EXPERT.fullmatch(name)) is not None and name not in self._specs:
            matrices = [[matrices[0][int(expert[2])]]]
        for together in zip(*matrices, strict=True) if name.endswith("_exps.weight") else matrices:
            for matrix in together:
                rows, columns = matrix[0]
                step = max(1, _PIECE // columns)
                for start in range(0, rows, step):
                    yield self._sum(matrix, slice(start, min(rows, start + step)))

    def _declared(self, name: str) -> list[str]:
        """The tensors of the layers' declaration that the tensor `name` of a file holds, in order."""
        if name not in self._specs and (expert := _EXPERT.fullmatch(name)) is not None:
            return [f"{expert[1]}_exps.weight"]
        return self._parts.get(name, [name])

    def _matrices(self, name: str) -> Iterator["_Matrix"]:
        """Of a declared tensor each of its matrices: its shape, and the changes of all adapters."""
        *outer, rows, columns = self._specs[name].shape
        found = [
            change._replace(scale=factor * change.scale)
            for adapter, factor in self._adapters
            if (change := adapter.changes.get(name)) is not None
        ]
        for number in range(outer[0]) if outer else ():
            yield (rows, columns), [each._replace(a=each.a[number], b=each.b[number]) for each in found]
        if not outer:
            yield (rows, columns), found

    @staticmethod
    def _sum(matrix: "_Matrix", rows: slice) -> Tensor:
        (every, columns), changes = matrix
        total = torch.zeros(len(range(every)[rows]), columns)
        for change in changes:
            total += change._replace(b=change.b[rows]).delta()
        return total


_Matrix = tuple[tuple[int, int], list[LowRank]]
