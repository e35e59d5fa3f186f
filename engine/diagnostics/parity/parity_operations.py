"""Watches a decoder's operations as they run: a backend around a backend.

The decoder's own code runs, so that what is watched is what serves.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from quengine.kernels.backend import Backend, Hidden
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

_OPERATIONS: Mapping[str, tuple[Operation, tuple[int, ...]]] = {
    "embed": ("embed", ()),
    "norm_linear": ("norm+qkv", (1,)),
    "attention": ("attention", (1,)),
    "linear_add": ("output+residual", (1, 3)),
    "norm_glu": ("norm+glu", (1,)),
    "logits": ("logits", (1,)),
}
"""Of the methods of `kernels.backend.Backend` that are watched: which of their arguments are hidden states."""


class Watch(Protocol):
    """Is handed each operation in place of its execution, and returns what the decoder is to go on with."""

    def __call__(
        self, operation: Operation, inputs: tuple[Hidden, ...], run: Callable[..., Hidden]
    ) -> Hidden:
        """`run(*inputs)` executes it; other inputs of the same meaning may be given to it instead."""
        ...


def rows_of(hidden: Hidden) -> Tensor:
    """What a backend's operation has given as numbers [T, width], on its device; of a residual stream whose norm has
    been begun, the stream.
    """
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
    around: Any = _WatchedBackend(backend, watch)
    for holder in holders:
        holder.backend = around
    try:
        yield
    finally:
        for holder in holders:
            holder.backend = backend


class _WatchedBackend:
    """A backend whose operations go through `watch`; everything else of it is the backend's own."""

    def __init__(self, backend: Backend[Any], watch: Watch) -> None:
        self._backend = backend
        self._watch = watch
        self._gated = False

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._backend, name)
        if name not in _OPERATIONS:
            return own
        operation, places = _OPERATIONS[name]

        def watched_operation(*args: Any, **more: Any) -> Hidden:
            def run(*inputs: Hidden) -> Hidden:
                given = list(args)
                for place, value in zip(places, inputs, strict=True):
                    given[place] = value
                result: Hidden = own(*given, **more)
                return result

            # `linear_add` stands behind the attention, and again behind the feed-forward's gate.
            ends_layer = name == "linear_add" and self._gated
            self._gated = name == "norm_glu"
            inputs = tuple(args[place] for place in places)
            return self._watch("down+residual" if ends_layer else operation, inputs, run)

        return watched_operation
