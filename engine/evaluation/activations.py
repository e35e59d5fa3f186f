"""Sums of squares of the activations that matrices multiply, taken at a backend's operations while a model computes.

The decoder's own code runs, with a backend around its backend that looks at the inputs of matrix products. Which
tensor a loaded matrix was made of is found by the decoder's constructor, run once more on a backend that keeps names
in place of weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quengine.diagnostics.parity.parity_operations import rows_of
from quengine.errors import EngineError
from quengine.kernels.backend import Hidden
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import ONE_RANK
from quengine.models.decoder import Decoder
from quengine.models.experts import MixtureOfExperts

if TYPE_CHECKING:
    from quengine.llm import LLM

_OURS = "quengine.models."
"""Modules whose objects make up a decoder."""


class Names:
    """In place of a loaded weight: names of its tensors, those of all experts in order if it has experts."""

    def __init__(self, names: Sequence[str], cols: int, rows: int = 0) -> None:
        self.names, self.cols, self.rows = list(names), cols, rows
        self.nbytes = 0


class _NamingBackend:
    """Loads names in place of weights, and vectors without data."""

    name = "names"
    device = torch.device("meta")
    dtype = torch.float32
    communicator = ONE_RANK

    def weight(self, parts: Sequence[QuantTensor]) -> Names:
        return Names([part.name for part in parts], parts[0].cols, sum(part.rows for part in parts))

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> Names:
        return self.weight([gate, up])

    def gate_up_experts(
        self, gate: Sequence[QuantTensor] | None, up: Sequence[QuantTensor], bias: Tensor | None = None
    ) -> "list[Names]":
        del bias
        return [self.weight(list(kind)) for kind in (gate, up) if kind is not None]

    def down_experts(self, down: Sequence[QuantTensor], bias: Tensor | None = None) -> "list[Names]":
        del bias
        return [self.weight(down)]

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.empty(sum(part.rows * part.cols for part in parts), device="meta")

    def row_table(self, table: QuantTensor) -> Names:
        return self.weight([table])

    def first_rows(self, weight: Names, rows: int) -> Names:
        del rows
        return weight

    def _accept(self, spec: object) -> None:
        """Sizes are checked where the model is loaded."""

    check_latent = check_gated_delta = check_mamba2 = _accept


class Collector:
    """Sums for each matrix by its tensor's name: `squares` fp64 [experts or 1, columns], `counts` int64 [experts or 1],
    on the model's device.

    Raises:
        EngineError: the model is shared by several devices, which see parts of the activations.
    """

    def __init__(self, llm: "LLM") -> None:
        decoder = llm.loaded.decoder
        self.backend = decoder.backend
        if decoder.config.ranks > 1 or decoder.config.stage is not None:
            raise EngineError(
                "the model is shared by several devices, each with a part of the activations: give one device"
            )
        self.squares, self.counts = dict[str, Tensor](), dict[str, Tensor]()
        tensors = llm.loaded.checkpoint.tensors
        naming: Any = _NamingBackend()
        names = Decoder(decoder.config, tensors, naming, llm.ctx_size, decoder.chunk_size)
        self._names = dict[int, list[Names]]()
        self._holders = list[tuple[Any, str]]()
        self._routers = dict[int, str]()
        self._pair(decoder, names, set())
        for layer, block in zip(decoder.config.held_layers, decoder.blk, strict=True):
            if isinstance(block.ffn, MixtureOfExperts):
                self._routers[id(block.ffn.router)] = f"blk.{layer}.ffn_gate_inp"

    def _pair(self, own: Any, named: Any, seen: set[int]) -> None:
        """Walks the decoder and its twin with names, attribute by attribute."""
        if isinstance(own, list | tuple):
            for each, name in zip(own, named, strict=False):
                self._pair(each, name, seen)
        if isinstance(named, Names) or (isinstance(named, list) and named and isinstance(named[0], Names)):
            self._names[id(own)] = named if isinstance(named, list) else [named]
        elif type(own).__module__.startswith(_OURS) and hasattr(own, "__dict__") and id(own) not in seen:
            seen.add(id(own))
            for key, value in vars(own).items():
                if key in ("backend", "expert_backend"):
                    self._holders.append((own, key))
                else:
                    self._pair(value, getattr(named, key, None), seen)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While it lasts, what the decoder computes is added to the sums."""
        own = [getattr(holder, key) for holder, key in self._holders]
        try:
            for (holder, key), backend in zip(self._holders, own, strict=True):
                setattr(holder, key, _ObservedBackend(backend, self))
            yield
        finally:
            for (holder, key), backend in zip(self._holders, own, strict=True):
                setattr(holder, key, backend)

    def dense(self, weight: Any, rows: Tensor) -> None:
        """Rows [T, columns] that meet a matrix, or several on the same input."""
        for named in self._names.get(id(weight), []):
            for name in filter(_of_layer, dict.fromkeys(named.names)):
                self._add(name, rows[:, : named.cols])

    def router(self, router: Router, rows: Tensor) -> None:
        """Rows that meet a router's matrix, and its gate of the shared expert."""
        if (name := self._routers.get(id(router))) is not None:
            self._add(f"{name}.weight", rows)
            if router.shared_gate is not None:
                self._add(f"{name}_shexp.weight", rows)

    def experts(self, weight: Any, rows: Tensor, routing: Routing) -> None:
        """Rows [T, k, columns] that meet the experts of a routing, or [T, columns] that meet all of a token's."""
        chosen = routing.experts.long()
        for named in self._names.get(id(weight), []):
            count = len(named.names)
            squares = torch.zeros(count, named.cols, dtype=torch.float64, device=rows.device)
            for place in range(chosen.shape[1]):
                of_place = rows if rows.dim() == 2 else rows[:, place]
                squares.index_add_(0, chosen[:, place], of_place[:, : named.cols].double().square())
            counts = torch.bincount(chosen.flatten(), minlength=count)
            self._add_experts(named.names, squares, counts)

    def _add_experts(self, names: Sequence[str], squares: Tensor, counts: Tensor) -> None:
        """Experts of one tensor, or of several: one each in old files, the shared expert's beside the others'."""
        for name in dict.fromkeys(names):
            places = [place for place, each in enumerate(names) if each == name]
            self._put(name, squares[places], counts[places])

    def _add(self, name: str, rows: Tensor) -> None:
        squares = rows.double().square_().sum(0, keepdim=True)
        self._put(name, squares, torch.tensor([len(rows)], device=rows.device))

    def _put(self, name: str, squares: Tensor, counts: Tensor) -> None:
        if name in self.squares:
            self.squares[name] += squares
            self.counts[name] += counts
        else:
            self.squares[name], self.counts[name] = squares, counts


def _of_layer(name: str) -> bool:
    """Whether a tensor is a layer's: others are left out, as llama-imatrix does."""
    return name.startswith("blk.")


class _ObservedBackend:
    """A backend whose matrix products are observed; everything else of it is the backend's own."""

    def __init__(self, backend: Any, collector: Collector) -> None:
        self._backend, self._collector = backend, collector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _normed(self, x: Hidden, norm: Any) -> Tensor:
        return rows_of(x) if norm is None else self._collector.backend.normed(x, norm)

    def linear(self, batch: Any, x: Hidden, weight: Any) -> Any:
        self._collector.dense(weight, x)
        return self._backend.linear(batch, x, weight)

    def norm_linear(self, batch: Any, x: Hidden, norm: Any, weight: Any, *more: Any) -> Any:
        self._collector.dense(weight, self._normed(x, norm))
        return self._backend.norm_linear(batch, x, norm, weight, *more)

    def norm_glu(self, batch: Any, x: Hidden, norm: Any, weight: Any, *more: Any) -> Any:
        self._collector.dense(weight, self._normed(x, norm))
        return self._backend.norm_glu(batch, x, norm, weight, *more)

    def norm_pointwise(self, batch: Any, x: Hidden, norm: Any, weight: Any, *more: Any) -> Any:
        self._collector.dense(weight, self._normed(x, norm))
        return self._backend.norm_pointwise(batch, x, norm, weight, *more)

    def input_glu(self, batch: Any, x: Hidden, gate: Any, *more: Any) -> Any:
        self._collector.dense(gate, rows_of(x))
        return self._backend.input_glu(batch, x, gate, *more)

    def linear_add(self, batch: Any, x: Hidden, weight: Any, *more: Any, **named: Any) -> Any:
        self._collector.dense(weight, rows_of(x))
        return self._backend.linear_add(batch, x, weight, *more, **named)

    def route(self, batch: Any, x: Hidden, norm: Any, router: Router, *more: Any) -> Routing:
        self._collector.router(router, self._normed(x, norm))
        found: Routing = self._backend.route(batch, x, norm, router, *more)
        return found

    def experts_glu(
        self, batch: Any, x: Hidden, norm: Any, routing: Routing, gate_up: Any, *more: Any
    ) -> Any:
        self._collector.experts(gate_up, self._normed(x, norm), routing)
        return self._backend.experts_glu(batch, x, norm, routing, gate_up, *more)

    def experts_add(
        self, batch: Any, gated: Hidden, routing: Routing, down: Any, *more: Any, **named: Any
    ) -> Any:
        self._collector.experts(down, rows_of(gated), routing)
        return self._backend.experts_add(batch, gated, routing, down, *more, **named)
