"""Watches a decoder's operations as they run: a backend around a backend.

The decoder's own code runs, so that what is watched is what serves; there is no second copy of it here. Knows the
operations of `kernels.backend.Backend` and their order in a layer; measures nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from quengine.kernels.backend import Activation, AttentionSpec, Backend, Hidden, KVLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.decoder import Decoder

Operation = Literal[
    "embed", "norm+qkv", "attention", "output+residual", "norm+glu", "down+residual", "logits"
]
LAYER_OPERATIONS: tuple[Operation, ...] = (
    "norm+qkv",
    "attention",
    "output+residual",
    "norm+glu",
    "down+residual",
)


class Watch(Protocol):
    """Is handed each operation in place of its execution, and returns what the decoder is to go on with."""

    def __call__(
        self, operation: Operation, inputs: tuple[Hidden, ...], run: Callable[..., Hidden]
    ) -> Hidden:
        """`run(*inputs)` executes it; other inputs of the same meaning may be given to it instead."""
        ...


def rows_of(hidden: Hidden) -> Tensor:
    """The numbers that a backend's operation has given, [T, width], on whatever device; a residual stream whose norm
    has been begun is the stream."""
    if isinstance(hidden, Tensor):
        return hidden
    # Only the CUDA backend gives anything else, so what it needs is installed.
    from quengine.kernels.cuda.rms_normed import RmsNormed

    rows: Tensor = hidden.hidden if isinstance(hidden, RmsNormed) else hidden.dequantize()
    return rows


def in_the_form_of(rows: Tensor, own: Hidden, backend: Backend[Any]) -> Hidden:
    """`rows` as `backend` would carry them where it has `own`, so that the same kernel reads them.

    A residual stream whose norm has been begun cannot be made from rows: `own` is given back.
    """
    placed = rows.to(backend.device, backend.dtype)
    if isinstance(own, Tensor):
        return placed
    from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, ScaledProduct, to_fp16_operand
    from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations

    if isinstance(own, Fp16Operand):
        return to_fp16_operand(placed)
    if isinstance(own, ScaledProduct):
        ones = torch.ones(len(placed), device=placed.device)
        return ScaledProduct(placed.contiguous(), ones, 1.0)
    return quantize_activations(placed) if isinstance(own, QuantizedActivations) else own


@contextmanager
def watched(decoder: Decoder, watch: Watch) -> Iterator[None]:
    """While it lasts, every operation of `decoder` goes through `watch`."""
    backend = decoder.backend
    holders = [decoder, *(part for block in decoder.blk for part in (block.attention, block.ffn))]
    around = _WatchedBackend(backend, watch)
    for holder in holders:
        holder.backend = around
    try:
        yield
    finally:
        for holder in holders:
            holder.backend = backend


class _WatchedBackend:
    """See the module docstring; implements kernels.backend.Backend."""

    def __init__(self, backend: Backend[Any], watch: Watch) -> None:
        self.name = backend.name
        self.device = backend.device
        self.dtype = backend.dtype
        self._backend = backend
        self._watch = watch
        self._gated = False

    def weight(self, parts: Sequence[QuantTensor]) -> Any:
        return self._backend.weight(parts)

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> Any:
        return self._backend.gate_up_weight(gate, up)

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return self._backend.vector(parts)

    def embed(self, batch: ForwardBatch, weight: Any, scale: float = 1.0) -> Hidden:
        return self._watch("embed", (), lambda: self._backend.embed(batch, weight, scale))

    def norm_linear(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: RMSNorm | None,
        weight: Any,
        bias: Tensor | None = None,
    ) -> Hidden:
        return self._watch(
            "norm+qkv", (x,), lambda x: self._backend.norm_linear(batch, x, norm, weight, bias)
        )

    def attention(self, batch: ForwardBatch, qkv: Hidden, spec: AttentionSpec, layer: KVLayer) -> Hidden:
        self._gated = False
        return self._watch("attention", (qkv,), lambda qkv: self._backend.attention(batch, qkv, spec, layer))

    def norm_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: RMSNorm | None,
        gate_up: Any,
        activation: Activation = "silu",
    ) -> Hidden:
        self._gated = True
        return self._watch(
            "norm+glu", (x,), lambda x: self._backend.norm_glu(batch, x, norm, gate_up, activation)
        )

    def linear_add(
        self,
        batch: ForwardBatch,
        x: Hidden,
        weight: Any,
        residual: Hidden,
        next_norm: RMSNorm | None = None,
        post_norm: RMSNorm | None = None,
    ) -> Hidden:
        # The same operation twice a layer: behind the attention, and behind the feed-forward's gate.
        name: Operation = "down+residual" if self._gated else "output+residual"
        return self._watch(
            name,
            (x, residual),
            lambda x, residual: self._backend.linear_add(batch, x, weight, residual, next_norm, post_norm),
        )

    def gather_rows(self, x: Hidden, rows: Tensor) -> Hidden:
        return self._backend.gather_rows(x, rows)

    def rms_norm(self, x: Hidden, norm: RMSNorm) -> Tensor:
        return self._backend.rms_norm(x, norm)

    def logits(self, batch: ForwardBatch, x: Hidden, norm: RMSNorm, weight: Any) -> Tensor:
        logits: Tensor = self._watch("logits", (x,), lambda x: self._backend.logits(batch, x, norm, weight))
        return logits
