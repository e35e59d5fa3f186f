"""Experts in host memory beside a model on another device: computed by the CPU's kernels on the weights as stored.

The rows of a layer go to the host behind their norm, and the weighted sum of their experts comes back. So only the
layers' hidden rows cross the bus, 8 bytes a column and token, never the weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.backend import Backend, Hidden
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm

_HOST = torch.device("cpu")


class HostExperts:
    """The expert operations of kernels.backend.Backend for the first `layers` layers of a decoder on `device`, computed
    on `host`.

    A step with such a layer waits for the host, so it cannot be part of a captured graph.
    """

    def __init__(self, device: Backend[Any], host: Backend[Any], layers: int) -> None:
        self.device = device
        self.host = host
        self.layers = layers

    def gate_up_experts(
        self, gate: Sequence[QuantTensor], up: Sequence[QuantTensor], bias: Tensor | None = None
    ) -> Any:
        return self.host.gate_up_experts(gate, up, _on_host(bias))

    def down_experts(self, down: Sequence[QuantTensor], bias: Tensor | None = None) -> Any:
        return self.host.down_experts(down, _on_host(bias))

    def experts_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: RMSNorm,
        routing: Routing,
        gate_up: Any,
        activation: Activation = "silu",
    ) -> Hidden:
        rows = self.device.rms_norm(x, norm).to(_HOST, self.host.dtype)
        return self.host.experts_glu(batch, rows, None, self._routing(routing), gate_up, activation)

    def experts_add(
        self,
        batch: ForwardBatch,
        gated: Hidden,
        routing: Routing,
        down: Any,
        residual: Hidden,
        next_norm: RMSNorm | None = None,  # noqa: ARG002 (the operation that reads the sum begins it)
    ) -> Hidden:
        tokens = routing.experts.shape[0]
        stream = self.device.gather_rows(residual, torch.arange(tokens, device=self.device.device))
        nothing = torch.zeros(stream.shape, dtype=self.host.dtype)
        sums = self.host.experts_add(batch, gated, self._routing(routing), down, nothing)
        return stream + sums.to(stream.device, stream.dtype)

    def _routing(self, routing: Routing) -> Routing:
        """Without the shared expert, which is computed on the device."""
        return Routing(routing.experts.to(_HOST), routing.weights.to(_HOST, self.host.dtype))


def _on_host(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(_HOST)
