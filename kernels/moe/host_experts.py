"""Experts in host memory, for a model on another device: computed by the CPU's kernels on the weights as stored.

The rows of a layer are copied to the host after their norm, and the weighted sum of their experts is copied back. So
only the layers' hidden rows cross the bus, 8 bytes per column and token, never the weights.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from quengine.kernels.backend import Backend, Hidden
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Activation
from quengine.kernels.layer_norm import Norm
from quengine.kernels.moe.expert_counts import ExpertCounts
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.router import Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm

_HOST = torch.device("cpu")


class PlacedExperts(Protocol):
    """The experts of a decoder's first `layers` layers, which stay in host memory."""

    layers: int

    @property
    def counts(self) -> ExpertCounts | None:
        """The experts' places and uses; None: the device holds none."""
        ...

    def of_layer(self, layer: int) -> Any:
        """The expert operations of kernels.backend.Backend for a layer."""
        ...

    def between_steps(self, rows: int) -> None:
        """Called before a step of `rows` rows is launched."""
        ...


@runtime_checkable
class FollowedExperts(PlacedExperts, Protocol):
    """PlacedExperts whose host part is computed while a captured step runs on the device."""

    @property
    def last_uses(self) -> list[list[int]] | None:
        """Uses of each layer's experts; None: they are not counted."""
        ...

    def begin_loading(
        self, stored: Iterable[QuantTensor], uses: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Called before the decoder is made, with the experts in host memory, and `last_uses` of an earlier run."""
        ...

    def end_loading(self) -> None:
        """Called once the decoder is made."""
        ...

    def close(self) -> None:
        """Called at the end, before the file is unmapped."""
        ...

    def recording(self) -> AbstractContextManager[list[Any]]:
        """Within this context the host's kernels of decode steps are listed, not run."""
        ...

    def followed(self, replay: Callable[[], None], launches: Sequence[Any]) -> Callable[[], None]:
        """A call that replays a captured step on the device and has the host run its `launches`, without waiting."""
        ...


@dataclass(frozen=True)
class HostRows:
    """The gated units of each row's experts, in the host backend's form, and the routing, copied once per layer."""

    gated: Hidden
    routing: Routing


class HostExperts:
    """The expert operations of kernels.backend.Backend on `host`, for a decoder's first `layers` layers.

    The decoder is on `device`. A step with such a layer waits for the host, so it cannot be part of a captured graph.
    """

    def __init__(self, device: Backend[Any], host: Backend[Any], layers: int) -> None:
        self.device = device
        self.host = host
        self.layers = layers

    @property
    def counts(self) -> None:
        return None

    def of_layer(self, layer: int) -> "HostExperts":  # noqa: ARG002 (all layers alike)
        return self

    def between_steps(self, rows: int) -> None:
        """Does nothing."""

    def gate_up_experts(
        self,
        gate: Sequence[QuantTensor] | None,
        up: Sequence[QuantTensor],
        bias: Tensor | None = None,
        share: ExpertShare | None = None,
    ) -> Any:
        return self.host.gate_up_experts(gate, up, self._bias(bias), share)

    def down_experts(
        self, down: Sequence[QuantTensor], bias: Tensor | None = None, share: ExpertShare | None = None
    ) -> Any:
        return self.host.down_experts(down, self._bias(bias), share)

    def experts_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: RMSNorm | None,
        routing: Routing,
        gate_up: Any,
        activation: Activation = "silu",
    ) -> HostRows:
        normed, on_host = x if norm is None else self.device.normed(x, norm), self._routing(routing)
        rows = normed.to(_HOST, self.host.dtype)
        gated = self.host.experts_glu(batch, rows, None, on_host, gate_up, activation)
        return HostRows(gated, on_host)

    def experts_add(
        self,
        batch: ForwardBatch,
        gated: HostRows,
        routing: Routing,  # noqa: ARG002 (`gated` has it on the host)
        down: Any,
        residual: Hidden | None,
        next_norm: Norm | None = None,  # noqa: ARG002 (the operation that reads the sum begins it)
        *,
        partial: bool = False,
    ) -> Hidden:
        tokens = gated.routing.experts.shape[0]
        sums = self.host.experts_add(batch, gated.gated, gated.routing, down, None)
        added = sums.to(self.device.device, self.device.dtype)
        added = self.device.communicator.all_reduce(added) if partial else added
        if residual is None:
            return added
        return self.device.gather_rows(residual, torch.arange(tokens, device=self.device.device)) + added

    def _routing(self, routing: Routing) -> Routing:
        """The routing on the host, without the shared expert, which is computed on the device."""
        return Routing(routing.experts.to(_HOST), routing.weights.to(_HOST, self.host.dtype))

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(_HOST, self.host.dtype)
