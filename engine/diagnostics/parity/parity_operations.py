"""Watches a decoder's operations as they run: a backend around a backend.

The decoder's own code runs, so that what is watched is what serves.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from quengine.kernels.backend import Backend, Hidden
from quengine.kernels.cpu.moe.operations import ExpertRows
from quengine.kernels.moe.router import Routing
from quengine.models.decoder import Decoder

Operation = Literal[
    *("embed", "norm+qkv", "attention", "output+residual", "norm+glu", "down+residual"),
    *("route", "experts+glu", "experts+residual", "logits"),
]
LAYER_OPERATIONS: tuple[Operation, ...] = (
    "norm+qkv",
    "attention",
    "output+residual",
    "norm+glu",
    "down+residual",
)
"""Of a dense layer."""

EXPERT_OPERATIONS: tuple[Operation, ...] = (
    *("norm+qkv", "attention", "output+residual", "route", "experts+glu"),
    *("norm+glu", "down+residual", "experts+residual"),
)
"""Of a layer with experts; "norm+glu" and "down+residual" are the shared expert's."""

_OPERATIONS: Mapping[str, tuple[Operation, tuple[int, ...]]] = {
    "embed": ("embed", ()),
    "norm_linear": ("norm+qkv", (1,)),
    "attention": ("attention", (1,)),
    "linear_add": ("output+residual", (1, 3)),
    "norm_glu": ("norm+glu", (1,)),
    "route": ("route", (1,)),
    "experts_glu": ("experts+glu", (1,)),
    "experts_add": ("experts+residual", (1, 4)),
    "logits": ("logits", (1,)),
}
"""Of the methods of `kernels.backend.Backend` that are watched: which of their arguments are hidden states."""


class Watch(Protocol):
    """Is handed each operation in place of its execution, and returns what the decoder is to go on with."""

    def __call__(
        self, operation: Operation, inputs: tuple[Hidden, ...], run: Callable[..., Hidden]
    ) -> Hidden:
        """`run(*inputs)` executes it; other inputs of the same meaning may be given to it instead, and to "route" the
        experts by name.
        """
        ...


def rows_of(hidden: Hidden) -> Tensor:
    """What a backend's operation has given as numbers [T, width], on its device; of a residual stream whose norm has
    been begun, the stream; of experts [T, k, width]; of a routing the weights, with the shared expert's as the last
    column.
    """
    if isinstance(hidden, Tensor):
        return hidden
    if isinstance(hidden, Routing):
        shared = [] if hidden.shared is None else [hidden.shared[:, None]]
        return torch.cat([hidden.weights, *shared], dim=1)
    if isinstance(hidden, ExpertRows):
        return hidden.by_slot()
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
    if isinstance(own, ExpertRows):
        return own.of_slots(placed)
    placed = placed.flatten(0, -2)  # of experts, a row for each of a token's
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
    holders: list[tuple[Any, bool]] = [(decoder, False)]
    for block in decoder.blk:
        holders += [(block.attention, False), (block.ffn, True)]
    own = [holder.backend for holder, _ in holders]
    for holder, in_ffn in holders:
        holder.backend = _WatchedBackend(holder.backend, watch, in_ffn)
    try:
        yield
    finally:
        for (holder, _), backend in zip(holders, own, strict=True):
            holder.backend = backend


class _WatchedBackend:
    """A backend whose operations go through `watch`; everything else of it is the backend's own.

    in_ffn: its `linear_add` is the feed-forward's, not the attention's.
    """

    def __init__(self, backend: Backend[Any], watch: Watch, in_ffn: bool) -> None:
        self._backend = backend
        self._watch = watch
        self._in_ffn = in_ffn

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._backend, name)
        if name not in _OPERATIONS:
            return own
        operation, places = _OPERATIONS[name]
        if name == "linear_add" and self._in_ffn:
            operation = "down+residual"

        def watched_operation(*args: Any, **more: Any) -> Hidden:
            def run(*inputs: Hidden, **further: Any) -> Hidden:
                given = list(args)
                for place, value in zip(places, inputs, strict=True):
                    given[place] = value
                result: Hidden = own(*given, **more, **further)
                return result

            return self._watch(operation, tuple(args[place] for place in places), run)

        return watched_operation
