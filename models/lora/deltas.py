"""What adapters add to the tensors of a file, in whatever form the file holds them."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.models.config import ModelConfig
from quengine.models.lora.adapter import Adapter
from quengine.models.tensor_table import holder_of, tensor_specs

_EXPERT = re.compile(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight")


class Deltas:
    """The sum of what adapters, each with a factor, add to a model of this configuration."""

    def __init__(self, config: ModelConfig, adapters: Sequence[tuple[Adapter, float]]) -> None:
        self._config, self._adapters, self._specs = config, adapters, tensor_specs(config)
        self._parts: dict[str, list[str]] = {}
        for name in self._specs:
            if (holder := holder_of(name)) not in self._specs:
                self._parts.setdefault(holder, []).append(name)

    def changes(self, name: str) -> bool:
        """Whether the tensor `name` of a file is changed."""
        return any(part in adapter.changes for part in self._declared(name) for adapter, _ in self._adapters)

    def of(self, name: str) -> Tensor:
        """What is added to the tensor `name` of a file, fp32, in its shape."""
        if (expert := _EXPERT.fullmatch(name)) is not None and name not in self._specs:
            return self._sum(f"{expert[1]}_exps.weight", int(expert[2]))
        parts = [self._sum(part) for part in self._declared(name)]
        if name.endswith("attn_kv_b.weight") and name not in self._specs:  # attn_k_b is the other way round
            keys, values = parts
            return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def _declared(self, name: str) -> list[str]:
        """The tensors of the layers' declaration that the tensor `name` of a file holds, in order."""
        if name not in self._specs and (expert := _EXPERT.fullmatch(name)) is not None:
            return [f"{expert[1]}_exps.weight"]
        return self._parts.get(name, [name])

    def _sum(self, name: str, expert: int | None = None) -> Tensor:
        shape = self._specs[name].shape
        total = torch.zeros(shape if expert is None else shape[1:])
        for adapter, factor in self._adapters:
            if (change := adapter.changes.get(name)) is not None:
                if expert is not None:
                    change = change._replace(a=change.a[expert], b=change.b[expert])
                total += change._replace(scale=factor * change.scale).delta()
        return total
