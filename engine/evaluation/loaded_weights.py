"""Which tensors of a file the loaded matrices of a decoder were made of, and where the decoder has them.

Backends keep weights in forms of their own, without names. So the decoder's constructor is run once more, on a backend
that keeps the tensors' parts in place of weights, and both decoders are walked side by side.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import ONE_RANK
from quengine.models.decoder import Decoder

_OURS = "quengine.models."
"""Modules whose objects make up a decoder."""


@dataclass
class Parts:
    """The tensors, or parts of tensors, that a loaded weight was made of.

    Attributes:
        kinds: one list of matrices on the same input; for experts a list for each kind of matrix (gate, up or down).
        load: makes the weight of such kinds on a backend.
        biased: whether experts have biases, which are not among the parts.
        places: (object, attribute) wherever the decoder holds the weight.
    """

    kinds: list[list[QuantTensor]]
    load: Callable[[Any, list[list[QuantTensor]]], Any]
    experts: bool = False
    biased: bool = False
    places: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def cols(self) -> int:
        return self.kinds[0][0].cols

    @property
    def rows(self) -> int:
        return sum(part.rows for kind in self.kinds for part in kind)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for kind in self.kinds for part in kind)

    @property
    def names(self) -> list[str]:
        """The tensors' names, each once."""
        return list(dict.fromkeys(part.name for kind in self.kinds for part in kind))


class _PartsBackend:
    """Keeps parts in place of weights, and vectors without data."""

    name = "parts"
    device = torch.device("meta")
    dtype = torch.float32
    communicator = ONE_RANK

    def weight(self, parts: Sequence[QuantTensor]) -> Parts:
        return Parts([list(parts)], lambda backend, kinds: backend.weight(kinds[0]))

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> Parts:
        return Parts([[gate, up]], lambda backend, kinds: backend.gate_up_weight(*kinds[0]))

    def gate_up_experts(
        self, gate: Sequence[QuantTensor] | None, up: Sequence[QuantTensor], bias: Tensor | None = None
    ) -> Parts:
        kinds = [list(kind) for kind in (gate, up) if kind is not None]

        def load(backend: Any, kinds: list[list[QuantTensor]]) -> Any:
            return backend.gate_up_experts(kinds[0] if len(kinds) > 1 else None, kinds[-1])

        return Parts(kinds, load, experts=True, biased=bias is not None)

    def down_experts(self, down: Sequence[QuantTensor], bias: Tensor | None = None) -> Parts:
        def load(backend: Any, kinds: list[list[QuantTensor]]) -> Any:
            return backend.down_experts(kinds[0])

        return Parts([list(down)], load, experts=True, biased=bias is not None)

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.empty(sum(part.rows * part.cols for part in parts), device="meta")

    def row_table(self, table: QuantTensor) -> Parts:
        return Parts([[table]], lambda backend, kinds: backend.row_table(kinds[0][0]))

    def first_rows(self, weight: Parts, rows: int) -> Parts:
        del rows
        return weight

    def _accept(self, spec: object) -> None:
        """Sizes are checked where the model is loaded."""

    check_latent = check_gated_delta = check_mamba2 = _accept


class LoadedWeights:
    """The weights of a decoder that was made of these tensors.

    Attributes:
        of: id of a loaded weight -> its parts; valid as long as the decoder has the weight.
        holders: (object, attribute) wherever the decoder holds a backend.
    """

    def __init__(self, decoder: Decoder, tensors: Mapping[str, QuantTensor], ctx_size: int) -> None:
        backend: Any = _PartsBackend()
        twin = Decoder(decoder.config, tensors, backend, ctx_size, decoder.chunk_size)
        self.of = dict[int, Parts]()
        self.holders = list[tuple[Any, str]]()
        self._seen = set[int]()
        self._walk(decoder, twin)

    def __iter__(self) -> Iterator[Parts]:
        return iter(self.of.values())

    def _walk(self, own: Any, twin: Any) -> None:
        """Pairs the attributes of an object of the decoder with those of its twin, then those objects' attributes."""
        if id(own) in self._seen:
            return
        self._seen.add(id(own))
        for key, value in vars(own).items():
            other = getattr(twin, key, None)
            if key in ("backend", "expert_backend"):
                self.holders.append((own, key))
            elif isinstance(other, Parts):
                self.of.setdefault(id(value), other).places.append((own, key))
            elif isinstance(value, list | tuple) and isinstance(other, list | tuple):
                for each, part in zip(value, other, strict=False):
                    if isinstance(part, Parts):
                        self.of.setdefault(id(each), part)  # in a list: it has no place of its own
                    elif _is_ours(each):
                        self._walk(each, part)
            elif _is_ours(value):
                self._walk(value, other)


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(_OURS) and hasattr(value, "__dict__")
