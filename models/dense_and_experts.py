"""A dense feed-forward and a mixture of experts side by side, on a backend."""

from typing import Any

from quengine.kernels.backend import Branch, Hidden
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import Norm
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.blocks.dense_and_experts import DenseAndExperts
from quengine.models.experts import MixtureOfExperts
from quengine.models.layers import FeedForwardEntry, LayerTensors


class DenseAndExpertsLayer(MixtureOfExperts):
    """See blocks/dense_and_experts.py. `norm` is None: the stream is read through three norms."""

    def __init__(self, declared: DenseAndExperts, tensors: LayerTensors, host: Any = None) -> None:
        super().__init__(declared.experts, tensors, host)
        dense, eps = declared.dense, tensors.eps
        self.norm = None
        scale = tensors.vector("ffn_gate_inp", kind="scale")
        self.router_norm = RMSNorm(scale * dense.width**-0.5, eps)
        self.dense_norm = RMSNorm(tensors.vector(dense.norms.ffn), eps)
        self.first_norm = RMSNorm(tensors.vector("post_ffw_norm_1"), eps)
        self.second_norm = RMSNorm(tensors.vector("post_ffw_norm_2"), eps)
        self.post_norm = tensors.last_norm(dense.norms)
        self.entry = FeedForwardEntry(dense.form, tensors)
        self.ffn_down = tensors.weight("ffn_down")

    def __call__(self, batch: ForwardBatch, x: Hidden, next_norm: Norm | None) -> Hidden:
        """`next_norm`: the norm that reads the result."""
        routed, routing = self.routed(batch, x)
        experts = self.expert_backend.experts_add(
            batch, routed, routing, self.down, None, partial=self.partial
        )
        gated = self.entry(self.backend, batch, x, self.dense_norm)
        branch = Branch(experts, self.second_norm, self.first_norm)
        return self.backend.linear_add(
            *(batch, gated, self.ffn_down, x, next_norm, self.post_norm),
            branch=branch,
            partial=self.partial,
        )

    def step_bytes(self, rows: int) -> int:
        """As MixtureOfExperts, with the dense feed-forward."""
        return super().step_bytes(rows) + self.entry.nbytes + int(self.ffn_down.nbytes)
