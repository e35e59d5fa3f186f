"""Sums of squares of the activations that each matrix multiplies, collected while a model computes.

The decoder runs on a backend wrapped around its own, which reads the inputs of matrix products.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quengine.diagnostics.parity.parity_operations import replaced, rows_of
from quengine.errors import EngineError
from quengine.evaluation.loaded_weights import LoadedWeights
from quengine.kernels.altup_operations import AltUpOperations
from quengine.kernels.backend import Hidden
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.decoder import Decoder
from quengine.models.experts import MixtureOfExperts
from quengine.models.quantize.imatrix import Sums


class Collector:
    """Sums for each matrix by its tensor's name: `squares` fp64 [experts or 1, columns], `counts` int64 [experts or 1],
    on the decoder's device. The decoder was made of `tensors`.

    Raises:
        EngineError: other devices hold parts of the decoder's layers, and so see parts of the activations.
    """

    def __init__(self, decoder: Decoder, tensors: Mapping[str, QuantTensor], ctx_size: int) -> None:
        self.backend = decoder.backend
        if decoder.config.ranks > 1 and decoder.config.stage is None:
            raise EngineError(
                "each of several devices has a part of every layer, and sees a part of its activations: "
                "give them whole layers with --split layer"
            )
        self.squares, self.counts = dict[str, Tensor](), dict[str, Tensor]()
        self._weights = LoadedWeights(decoder, tensors, ctx_size)
        self._routers = {
            id(block.ffn.router): f"blk.{layer}.ffn_gate_inp"
            for layer, block in zip(decoder.config.held_layers, decoder.blk, strict=True)
            if isinstance(block.ffn, MixtureOfExperts)
        }

    def collecting(self) -> AbstractContextManager[None]:
        """A context in which the activations of all that the decoder computes are added to the sums."""
        holders = self._weights.holders
        return replaced(holders, [_ObservedBackend(getattr(holder, key), self) for holder, key in holders])

    def sums(self) -> dict[str, Sums]:
        """The sums so far. Raises EngineError for activations that are not finite."""
        found = {
            name: Sums(squares.cpu().numpy(), self.counts[name].cpu().numpy())
            for name, squares in self.squares.items()
        }
        for name, each in found.items():
            if not np.isfinite(each.squares).all():
                raise EngineError(
                    f"activations before {name} are not finite: the model is damaged, or overflows"
                )
        return found

    def dense(self, weight: Any, rows: Tensor) -> None:
        """Adds rows [T, columns] that a matrix multiplies, or several matrices on the same input."""
        if (parts := self._weights.of.get(id(weight))) is not None:
            for name in parts.names:
                if name.startswith("blk."):  # llama-imatrix leaves others out, too
                    self._add(name, rows[:, : parts.cols])

    def router(self, router: Router, rows: Tensor) -> None:
        """Adds rows that a router's matrix, and the gate of its shared expert, multiply."""
        if (name := self._routers.get(id(router))) is not None:
            self._add(f"{name}.weight", rows)
            if router.shared_gate is not None:
                self._add(f"{name}_shexp.weight", rows)

    def experts(self, weight: Any, rows: Tensor, routing: Routing) -> None:
        """Adds rows that experts multiply: [T, k, columns], one per chosen expert, or [T, columns], one per token."""
        parts = self._weights.of.get(id(weight))
        if parts is None:
            return
        chosen, count = routing.experts.long(), len(parts.kinds[0])
        squares = torch.zeros(count, parts.cols, dtype=torch.float64, device=rows.device)
        for place in range(chosen.shape[1]):
            of_place = rows if rows.dim() == 2 else rows[:, place]
            squares.index_add_(0, chosen[:, place], of_place[:, : parts.cols].double().square())
        counts = torch.bincount(chosen.flatten(), minlength=count)
        named = dict.fromkeys(tuple(part.name for part in kind) for kind in parts.kinds)
        for names in named:  # once where gate and up are one tensor
            self._add_experts(names, squares, counts)

    def _add_experts(self, names: Sequence[str], squares: Tensor, counts: Tensor) -> None:
        """Adds the sums of experts to their tensors: one tensor for all, or one each in old files; the shared expert's
        stands beside the others'."""
        for name in dict.fromkeys(names):
            places = [place for place, each in enumerate(names) if each == name]
            self._put(name, squares[places], counts[places])

    def _add(self, name: str, rows: Tensor) -> None:
        squares = rows.double().square_().sum(0, keepdim=True)
        self._put(name, squares, torch.full((1,), len(rows), device=rows.device))

    def _put(self, name: str, squares: Tensor, counts: Tensor) -> None:
        if name in self.squares:
            self.squares[name] += squares
            self.counts[name] += counts
        else:
            self.squares[name], self.counts[name] = squares, counts


class _ObservedBackend:
    """A backend whose matrix products are observed. Everything else is delegated to the wrapped backend."""

    def __init__(self, backend: Any, collector: Collector) -> None:
        self._backend, self._collector = backend, collector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _normed(self, x: Hidden, norm: Any) -> Tensor:
        return rows_of(x) if norm is None else self._collector.backend.normed(x, norm)

    @property
    def altup(self) -> AltUpOperations:
        """The backend's, whose matrix products are this object's."""
        kind: type[AltUpOperations] = type(self._backend.altup)
        return kind(self)

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
