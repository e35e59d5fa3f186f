"""The feed-forward of a mixture of experts: a router, experts that compute the rows routed to them, a shared expert."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.backend import Hidden
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import Norm
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.blocks.experts import Experts
from quengine.models.layers import FeedForwardEntry, LayerTensors


class MixtureOfExperts:
    """After one norm, the weighted sum of the experts that the router selects for a row, plus a shared expert, if any.

    A shared expert with the size and formats of the others is computed as the last expert, which every row selects.
    With expert parallelism a rank skips the experts of other ranks.

    Tensors of experts are `ffn_*_exps`, [E, rows, columns]. `host`: computes the experts that stay in host memory.
    `chosen`, int32 [T, k], ascending: the experts of a step's rows, which replace the router's selection.
    """

    chosen: Tensor | None = None

    def __init__(self, declared: Experts, tensors: LayerTensors, host: Any = None) -> None:
        each, experts = declared.each, declared.experts
        self.backend = tensors.backend
        self.expert_backend = host or tensors.backend
        self.partial = declared.partial
        self.activation = each.function
        self.experts = experts
        bias, count, held = declared.form.bias, experts.count, experts.held
        share = () if held is None else (ExpertShare(held.start, count),)
        count = count if held is None else len(held)
        gate, up = _gate_and_up(tensors, count, experts.feed_forward_length, each.has_gate)
        down = _of_experts(tensors, "down", count)
        shared = [] if host is not None else _joined_shared(declared, tensors, [gate, up, down])
        alone = host is None and (bool(shared) or not experts.shared_feed_forward_length)
        self.router = _router(declared, tensors, bool(shared))
        norm = RMSNorm(tensors.vector(declared.norm), tensors.eps, self.router.width if alone else 0)
        self.norm: RMSNorm | None = norm
        self.expert_norm = self.router_norm = norm
        if shared:
            *gates, own_up, own_down = shared
            gate, up, down = gate and [*gate, *gates], [*up, own_up], [*down, own_down]
        gate_up_bias = _bias(tensors, "gate", "up", count=count) if bias else None
        down_bias = _bias(tensors, "down", count=count) if bias else None
        self.gate_up = self.expert_backend.gate_up_experts(gate, up, gate_up_bias, *share)
        self.down = self.expert_backend.down_experts(down, down_bias, *share)
        self.shared_entry = self.shared_down = None
        if experts.shared_feed_forward_length and not shared:
            self.shared_entry = FeedForwardEntry(each, tensors, "_shexp")
            self.shared_down = tensors.weight("ffn_down_shexp")

    def __call__(self, batch: ForwardBatch, x: Hidden, next_norm: Norm | None) -> Hidden:
        """`next_norm`: the norm that reads the result."""
        backend, norm = self.backend, self.norm
        gated, routing = self.routed(batch, x)
        if self.shared_entry is not None:
            shared = self.shared_entry(backend, batch, x, norm)
            x = backend.linear_add(
                batch, shared, self.shared_down, x, row_scale=routing.shared, partial=self.partial
            )
        return self.expert_backend.experts_add(
            batch, gated, routing, self.down, x, next_norm, partial=self.partial
        )

    def routed(self, batch: ForwardBatch, x: Hidden) -> tuple[Any, Routing]:
        """activation(gate) * up of each row's experts, and the routing."""
        given = () if self.chosen is None else (self.chosen,)
        routing = self.backend.route(batch, x, self.router_norm, self.router, *given)
        norm: RMSNorm | None = self.expert_norm
        if self.router.kind.weighs_inputs:
            x, norm = self.backend.weighed(batch, x, self.expert_norm, routing.weights), None
            routing = replace(routing, weights=torch.ones_like(routing.weights))
        rows = self.expert_backend.experts_glu(batch, x, norm, routing, self.gate_up, self.activation)
        return rows, routing

    @property
    def nbytes(self) -> int:
        """Bytes that one row reads: its selected experts, the router and the shared expert."""
        return self.step_bytes(1)

    def step_bytes(self, rows: int) -> int:
        """Bytes that a step of `rows` rows reads, with the expected number of experts (`ExpertConfig.expected`)."""
        router = self.router.weight
        every = router.numel() * router.element_size()
        if self.shared_entry is not None and self.shared_down is not None:
            every += self.shared_entry.nbytes + self.shared_down.nbytes
        joined = int(self.router.joins_shared)
        experts = (self.gate_up.nbytes + self.down.nbytes) / (self.experts.count + joined)
        return int(every + experts * (self.experts.expected(rows) + joined))


def _joined_shared(
    declared: Experts, tensors: LayerTensors, experts: Sequence[Sequence[QuantTensor] | None]
) -> list[QuantTensor]:
    """The gate (if any), up and down matrices of a shared expert that is computed as one of the others, whose matrices
    by kind are `experts`. Empty if there is no shared expert, or if it has another size or format, reads other rows,
    or is divided among ranks in another way."""
    sizes, each = declared.experts, declared.each
    if (
        sizes.shared_feed_forward_length != sizes.feed_forward_length
        or declared.partial
        or sizes.held is not None
        or declared.form.bias
        or each.merged_gate
        or sizes.router.weighs_inputs
    ):
        return []
    others = [matrices[0] for matrices in experts if matrices is not None]
    kinds = ("gate", "up", "down") if each.has_gate else ("up", "down")
    shared = tensors.take(*(f"ffn_{kind}_shexp" for kind in kinds))
    alike = all(own.format == other.format for own, other in zip(shared, others, strict=True))
    return shared if alike else []


def _router(declared: Experts, tensors: LayerTensors, joins_shared: bool) -> Router:
    form, count = declared.form, declared.experts.count
    return Router(
        kind=declared.experts.router,
        weight=tensors.vector("ffn_gate_inp").view(count, -1),
        bias=tensors.vector("ffn_gate_inp", kind="bias") if form.bias else None,
        selection_bias=tensors.vector("exp_probs_b", kind="bias") if form.selection_bias else None,
        shared_gate=tensors.vector("ffn_gate_inp_shexp") if form.shared_gate else None,
        expert_scale=tensors.vector("ffn_down_exps", kind="scale") if form.beside_dense else None,
        joins_shared=joins_shared,
    )


def _gate_and_up(
    tensors: LayerTensors, count: int, rows: int, has_gate: bool
) -> tuple[list[QuantTensor] | None, list[QuantTensor]]:
    """The gate and up matrices [rows, K] of all experts; views of the merged tensor [E, 2 * rows, K] if it exists. The
    gate matrices are None if experts have no gate."""
    if not has_gate:
        return None, _of_experts(tensors, "up", count)
    if not tensors.has("ffn_gate_up_exps"):
        return _of_experts(tensors, "gate", count), _of_experts(tensors, "up", count)
    (both,) = tensors.take("ffn_gate_up_exps")
    pairs = [matrix.row_slices(rows) for matrix in both.matrices()]
    return [gate for gate, _ in pairs], [up for _, up in pairs]


def _of_experts(tensors: LayerTensors, kind: str, count: int) -> list[QuantTensor]:
    """The gate, up or down matrices of all experts, from one tensor, or from one per expert (old files)."""
    if tensors.has(f"ffn_{kind}_exps"):
        (merged,) = tensors.take(f"ffn_{kind}_exps")
        return merged.matrices()
    return tensors.take(*(f"ffn_{kind}.{expert}" for expert in range(count)))


def _bias(tensors: LayerTensors, *kinds: str, count: int) -> Tensor:
    """The biases of each expert, those of several `kinds` side by side: [E, N]."""
    return torch.cat(
        [tensors.vector(f"ffn_{kind}_exps", kind="bias").view(count, -1) for kind in kinds], dim=1
    )
