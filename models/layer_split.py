"""Pipeline split: how the layers of a model are divided among ranks that have whole layers.

The first rank has the embedding, the last one the output's norm and matrix. The rows of the residual stream go from
rank to rank, so that every product is computed as on one device. Source: Huang et al. 2019, "GPipe: Efficient Training
of Giant Neural Networks using Pipeline Parallelism", section 2.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

from quengine.errors import EngineError
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.config import ModelConfig, Stage

_LAYER = re.compile(r"blk\.(\d+)\.")


def layer_bounds(sizes: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """`Stage.bounds` for layers of these sizes in bytes, divided in proportion to `shares` as closely as possible.

    Raises:
        EngineError: there are fewer layers than shares.
    """
    count, layers = len(shares), len(sizes)
    if layers < count:
        raise EngineError(
            f"--split layer: {count} devices cannot share {layers} layers; take {layers} at most"
        )
    before = [0, *accumulate(sizes)]
    bounds = [0]
    for rank, share in enumerate(accumulate(shares[:-1]), start=1):
        wanted = before[-1] * share / sum(shares)
        ends = range(bounds[-1] + 1, layers - (count - rank) + 1)  # each rank has a layer
        bounds.append(min(ends, key=lambda end: abs(before[end] - wanted)))
    return (*bounds, layers)


def layer_bytes(config: ModelConfig, tensors: Mapping[str, QuantTensor]) -> list[int]:
    """Bytes of each layer of a model; the first includes the embedding, the last the output matrix.

    Raises:
        EngineError: layers need more than the previous layer's rows.
    """
    needs = {
        "keys and values of earlier layers": bool(config.shared_kv_layers),
        "per-layer embeddings": config.layer_input is not None,
    }
    if given := next((what for what, there in needs.items() if there), None):
        raise EngineError(
            f"--split layer: layers of {config.architecture} model {config.name!r} have {given}, with which whole "
            f"layers are not shared out; use {'one device' if config.altup else '--split tensor'}"
        )
    sizes = [0] * config.block_count
    for name in tensors:
        layer = _LAYER.match(name)
        if layer is None and name.startswith("token_embd."):
            sizes[0] += tensors[name].nbytes
            sizes[-1] += tensors[name].nbytes if "output.weight" not in tensors else 0
        elif layer is None:
            sizes[-1] += tensors[name].nbytes
        elif int(layer[1]) < config.block_count:
            sizes[int(layer[1])] += tensors[name].nbytes
    return sizes


class StageTensors(Mapping[str, QuantTensor]):
    """The tensors of a pipeline stage.

    The last stage also has the embedding if that is the output matrix. Every stage has the first norm of the next
    stage's first layer.
    """

    def __init__(self, tensors: Mapping[str, QuantTensor], stage: Stage) -> None:
        self._tensors = tensors
        tied = "output.weight" not in tensors
        self._names = [name for name in tensors if _is_held(name, stage, tied)]
        self._held = frozenset(self._names)

    def __getitem__(self, name: str) -> QuantTensor:
        if name not in self._held:
            raise KeyError(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def sizes(self) -> Iterator[tuple[str, int, int]]:
        """Name, bytes and number of weights of each tensor."""
        for name in self._names:
            tensor = self._tensors[name]
            yield name, tensor.nbytes, prod(tensor.shape)


def _is_held(name: str, stage: Stage, tied: bool) -> bool:
    layer = _LAYER.match(name)
    if layer is not None:
        behind = int(layer[1]) == stage.layers.stop and not stage.is_last
        return int(layer[1]) in stage.layers or (behind and name.endswith(".attn_norm.weight"))
    if name.startswith("token_embd."):
        return stage.is_first or (stage.is_last and tied)
    return stage.is_last or not name.startswith("output")
