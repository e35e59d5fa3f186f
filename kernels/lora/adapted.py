"""Backends with adapters: the operations that multiply by a matrix also add the adapters' changes of the product.

A step without adapters (`ForwardBatch.adapters` is None) runs the plain operations on the plain weights. A step with
adapters runs the plain operations where a weight can carry its change (`Adapted.with_change`). Elsewhere, an operation
that fuses a product with what comes before or after it is computed in pieces: the norm, the product, the changes, and
then the activation or the sum with the residual.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from quengine.kernels.backend import Branch, Hidden
from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Gating
from quengine.kernels.layer_norm import Norm
from quengine.kernels.lora.change import LowRank
from quengine.kernels.lora.low_rank import Adapters, Changes, stacked
from quengine.kernels.pointwise import Pointwise
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import Communicator
from quengine.kernels.rms_norm import RMSNorm

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of the backend, with the adapters' changes of its products and of the rows that are read from it."""

    base: Any
    changes: Changes | None
    of_rows: Changes | None = None

    @property
    def rows(self) -> int:
        return int(self.base.rows)

    @property
    def cols(self) -> int:
        return int(self.base.cols)

    @property
    def nbytes(self) -> int:
        return int(self.base.nbytes)


class Adapted:
    """The operations of kernels.backend.Backend on weights with adapters. Subclasses list it before a backend.

    adapters: the changes of the weights that it loads. `untaken` holds the names of changed matrices that `weight` and
    `gate_up_weight` have not loaded. The backend's other operations do not take an `AdaptedWeight`.
    """

    communicator: Communicator

    def __init__(self, adapters: Adapters, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters, self.adapter_count = adapters, adapters.count
        self.untaken = set(adapters.changes)

    def end_loading(self) -> set[str]:
        """Ends the loading of adapted weights: later ones have no adapters, whatever their tensors' names. Returns the
        names of matrices that the adapters change and that no loaded weight has."""
        self.adapters = replace(self.adapters, changes={})
        return self.untaken

    @abstractmethod
    def placed(self, changes: Changes) -> Changes:
        """The changes as the backend's kernels take them."""

    def with_change(self, weight: Any, changes: Changes, scales: Tensor) -> Any | None:  # noqa: ARG002
        """The backend's weight with its change, where the plain operations add the change to the product; None where
        they do not, and the operation is computed in pieces."""
        return None

    @abstractmethod
    def changed_rows(
        self, batch: ForwardBatch, x: Tensor, changes: Changes, scales: Tensor, factor: float
    ) -> Tensor:
        """x [T, K] plus the changes of rows `batch.token_ids` (`add_row_changes`); x may be written over."""

    @abstractmethod
    def placed_rows(self, x: Tensor, given: EmbeddedRows | None) -> Tensor:
        """x with the rows that are given as embeddings written over it."""

    @abstractmethod
    def normed_rows(self, batch: ForwardBatch, x: Hidden, norm: Norm | None) -> Hidden:
        """`norm` of x, or x itself without one, as rows [T, K] that products and changes read."""

    @abstractmethod
    def changed_product(
        self,
        batch: ForwardBatch,
        x: Hidden,
        weight: Any,
        bias: Tensor | None,
        changes: Changes,
        scales: Tensor,
    ) -> Hidden:
        """x times the weight, plus the bias and the changes (kernels/lora/low_rank.py), as plain rows [T, N]."""

    def changed_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        weight: Any,
        activation: Gating,
        changes: Changes,
        scales: Tensor,
    ) -> Hidden:
        """activation(gate) * up of the changed product with gate and up."""
        return self.glu_of(batch, self.changed_product(batch, x, weight, None, changes, scales), activation)

    @abstractmethod
    def changed_sum(
        self,
        batch: ForwardBatch,
        x: Hidden,
        weight: Any,
        residual: Hidden,
        next_norm: Norm | None,
        bias: Tensor | None,
        changes: Changes,
        scales: Tensor,
    ) -> Hidden:
        """`linear_add` of the changed product."""

    @abstractmethod
    def glu_of(self, batch: ForwardBatch, y: Hidden, activation: Gating) -> Hidden:
        """activation(gate) * up of a product [T, 2F], gate first."""

    @abstractmethod
    def pointwise_of(self, batch: ForwardBatch, y: Hidden, activation: Pointwise) -> Hidden:
        """The activation of a product [T, F]."""

    @abstractmethod
    def added(
        self,
        batch: ForwardBatch,
        y: Hidden,
        residual: Hidden,
        next_norm: Norm | None,
        post_norm: RMSNorm | None,
        row_scale: Hidden | None,
        branch: Branch | None,
    ) -> Hidden:
        """What `linear_add` computes from its product y [T, N], which includes the bias."""

    @abstractmethod
    def capped(self, batch: ForwardBatch, y: Hidden, cap: float) -> Hidden:
        """cap * tanh(y / cap)."""

    @property
    def _plain(self) -> Any:
        """The backend without adapters."""
        return super()

    def weight(self, parts: Sequence[QuantTensor]) -> Any:
        base = self._plain.weight(parts)
        if parts[0].name != EMBEDDING:
            return self._with_changes(base, parts)
        (table,) = parts
        output = self._changes_of([replace(table, name=OUTPUT)]) if self.adapters.tied else None
        of_rows = self._changes_of(parts)
        return base if output is None and of_rows is None else AdaptedWeight(base, output, of_rows)

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> Any:
        return self._with_changes(self._plain.gate_up_weight(gate, up), [gate, up])

    def _with_changes(self, base: Any, parts: Sequence[QuantTensor]) -> Any:
        changes = self._changes_of(parts)
        return base if changes is None else AdaptedWeight(base, changes)

    def _changes_of(self, parts: Sequence[QuantTensor]) -> Changes | None:
        """The changes of these parts, None if there are none. A part is a matrix, several matrices in one, or a slice
        of a matrix's rows; slices come in order."""
        held = [
            pair for part in parts for pair in self.adapters.joined.get(part.name, [(part.name, part.rows)])
        ]
        found, taken = list[list[LowRank | None]](), Counter[str]()
        for name, rows in held:
            self.untaken.discard(name)
            given = self.adapters.changes.get(name, [None] * self.adapters.count)
            found.append([None if change is None else change.of_rows(taken[name], rows) for change in given])
            taken[name] += rows
        if all(change is None for of_part in found for change in of_part):
            return None
        return self.placed(stacked(found, [rows for _, rows in held], parts[0].cols))

    def first_rows(self, weight: Any, rows: int) -> Any:
        return self._plain.first_rows(_base(weight), rows)

    def embed(self, batch: ForwardBatch, weight: Any, scale: float = 1.0) -> Hidden:
        changes = weight.of_rows if isinstance(weight, AdaptedWeight) else None
        if batch.adapters is None or changes is None:
            return self._plain.embed(batch, _base(weight), scale)
        rows = self._plain.embed(replace(batch, embeds=None), weight.base, scale)
        return self.placed_rows(self.changed_rows(batch, rows, changes, batch.adapters, scale), batch.embeds)

    def norm_linear(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: Norm | None,
        weight: Any,
        bias: Tensor | None = None,
    ) -> Hidden:
        plain, pair = self._taken(batch, weight)
        if pair is None:
            return self._plain.norm_linear(batch, x, norm, plain, bias)
        return self.changed_product(batch, self.normed_rows(batch, x, norm), plain, bias, *pair)

    def linear(self, batch: ForwardBatch, x: Tensor, weight: Any) -> Tensor:
        plain, pair = self._taken(batch, weight)
        if pair is None:
            return cast(Tensor, self._plain.linear(batch, x, plain))
        return cast(Tensor, self.changed_product(batch, x, plain, None, *pair))

    def norm_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: Norm | None,
        gate_up: Any,
        activation: Gating = "silu",
    ) -> Hidden:
        plain, pair = self._taken(batch, gate_up)
        if pair is None:
            return self._plain.norm_glu(batch, x, norm, plain, activation)
        return self.changed_glu(batch, self.normed_rows(batch, x, norm), plain, activation, *pair)

    def norm_pointwise(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: Norm | None,
        up: Any,
        activation: Pointwise,
        bias: Tensor | None = None,
    ) -> Hidden:
        plain, pair = self._taken(batch, up)
        if pair is None:
            return self._plain.norm_pointwise(batch, x, norm, plain, activation, bias)
        product = self.changed_product(batch, self.normed_rows(batch, x, norm), plain, bias, *pair)
        return self.pointwise_of(batch, product, activation)

    def linear_add(
        self,
        batch: ForwardBatch,
        x: Hidden,
        weight: Any,
        residual: Hidden,
        next_norm: Norm | None = None,
        post_norm: RMSNorm | None = None,
        bias: Tensor | None = None,
        row_scale: Hidden | None = None,
        branch: Branch | None = None,
        *,
        partial: bool = False,
    ) -> Hidden:
        more = (next_norm, post_norm, bias, row_scale, branch)
        plain, pair = self._taken(batch, weight)
        if pair is None:
            return self._plain.linear_add(batch, x, plain, residual, *more, partial=partial)
        rows = self.normed_rows(batch, x, None)
        if partial:  # the rank's columns of A, so that the changes are summed as the products are
            product = self.changed_product(batch, rows, plain, None, *pair)
            product = self.communicator.all_reduce(product)
            product = product if bias is None else product + bias
            return self.added(batch, product, residual, next_norm, post_norm, row_scale, branch)
        if post_norm is None and row_scale is None:
            return self.changed_sum(batch, rows, plain, residual, next_norm, bias, *pair)
        product = self.changed_product(batch, rows, plain, bias, *pair)
        return self.added(batch, product, residual, next_norm, post_norm, row_scale, branch)

    def logits(self, batch: ForwardBatch, x: Hidden, norm: Norm, weight: Any, softcap: float = 0.0) -> Tensor:
        plain, pair = self._taken(batch, weight)
        if pair is None:
            return cast(Tensor, self._plain.logits(batch, x, norm, plain, softcap))
        product = self.changed_product(batch, self.normed_rows(batch, x, norm), plain, None, *pair)
        return cast(Tensor, self.capped(batch, product, softcap) if softcap else product)

    def _taken(self, batch: ForwardBatch, weight: Any) -> tuple[Any, tuple[Changes, Tensor] | None]:
        """The weight as the plain operations take it in this step, and the changes that they do not add, with the
        changes' scales [M, T]; None in place of these where nothing is left to add."""
        if batch.adapters is None or not isinstance(weight, AdaptedWeight) or weight.changes is None:
            return _base(weight), None
        pair = weight.changes, batch.adapters
        whole = self.with_change(weight.base, *pair)
        return (weight.base, pair) if whole is None else (whole, None)


def _base(weight: Any) -> Any:
    return weight.base if isinstance(weight, AdaptedWeight) else weight
