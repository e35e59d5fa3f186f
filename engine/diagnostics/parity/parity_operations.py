"""Watches a decoder's operations as they run: a backend around a backend.

The decoder's own code runs, so the operations that are watched are those that serve requests.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from quengine.kernels.backend import Backend, Hidden
from quengine.kernels.cpu.moe.operations import ExpertRows
from quengine.kernels.moe.router import Routing
from quengine.models.decoder import Decoder
from quengine.models.experts import MixtureOfExperts

if TYPE_CHECKING:
    from quengine.kernels.cuda.moe.grouped import GroupedRows

Operation = Literal[
    "embed",
    "norm+qkv",
    "attention",
    "output+residual",
    "norm+glu",
    "down+residual",
    "route",
    "experts+glu",
    "experts+residual",
    "layer inputs",
    "input+glu",
    "input+residual",
    "logits",
]
LAYER_OPERATIONS: tuple[Operation, ...] = (
    "norm+qkv",
    "attention",
    "output+residual",
    "norm+glu",
    "down+residual",
)
"""The operations of a dense layer."""

EXPERT_OPERATIONS: tuple[Operation, ...] = (
    *(*LAYER_OPERATIONS[:3], "route", "experts+glu"),
    *(*LAYER_OPERATIONS[3:], "experts+residual"),
)
"""The operations of a layer with experts; "norm+glu" and "down+residual" are those of a separate shared expert."""

IN_LAYERS: tuple[Operation, ...] = (*EXPERT_OPERATIONS, "input+glu", "input+residual")
"""The operations of any layer; the last two are those of a layer with inputs beside the stream."""

_OPERATIONS: Mapping[str, tuple[Operation, tuple[int, ...]]] = {
    "embed": ("embed", ()),
    "norm_linear": ("norm+qkv", (1,)),
    "attention": ("attention", (1,)),
    "latent_attention": ("attention", (1, 2)),
    "short_conv": ("attention", (1,)),
    "gated_delta": ("attention", (1,)),
    "mamba2": ("attention", (1,)),
    "linear_add": ("output+residual", (1, 3)),
    "norm_glu": ("norm+glu", (1,)),
    "norm_pointwise": ("norm+glu", (1,)),
    "route": ("route", (1,)),
    "experts_glu": ("experts+glu", (1,)),
    "experts_add": ("experts+residual", (1, 4)),
    "layer_inputs": ("layer inputs", (1,)),
    "input_glu": ("input+glu", (1,)),
    "logits": ("logits", (1,)),
}
"""The watched methods of `kernels.backend.Backend`, and which of their arguments are hidden states."""


_Names: TypeAlias = Mapping[str, Operation]
_IN_FFN: _Names = {"linear_add": "down+residual"}
_IN_INPUT: _Names = {"linear_add": "input+residual"}
_IN_INPUTS: _Names = {"norm_linear": "layer inputs"}


@dataclass(frozen=True)
class Call:
    """An operation that a decoder is about to run. layer: its number; None for one outside the layers. args: all that
    the backend's method is given, the batch first."""

    operation: Operation
    layer: int | None
    args: tuple[Any, ...]
    _places: tuple[int, ...]
    _run: Callable[..., Hidden]

    @property
    def inputs(self) -> tuple[Hidden, ...]:
        """The hidden states among `args`."""
        return tuple(self.args[place] for place in self._places)

    def run(self, *inputs: Hidden, **further: Any) -> Hidden:
        """Executes it on these inputs, which may be others of the same meaning; "route" takes `experts` as well."""
        given = list(self.args)
        for place, value in zip(self._places, inputs, strict=True):
            given[place] = value
        return self._run(*given, **further)


Watch = Callable[[Call], Hidden]
"""Called with each operation in place of its execution; returns the result that the decoder continues with."""


def rows_of(hidden: Hidden) -> Tensor:
    """The result of a backend's operation as numbers [T, width], on its device.

    For a residual stream whose norm has been begun, this is the stream; for experts it is [T, k, width] or
    [T * k, width], which may be padded; for a routing the weights, with the shared expert's as the last column.
    """
    if isinstance(hidden, Tensor):
        return hidden
    if isinstance(hidden, Routing):
        shared = [] if hidden.shared is None else [hidden.shared[:, None]]
        return torch.cat([hidden.weights, *shared], dim=1)
    if isinstance(hidden, ExpertRows):
        return hidden.by_slot()
    # Only the CUDA backend gives anything else, so what it needs is installed.
    from quengine.kernels.cuda.moe.grouped import GroupedRows
    from quengine.kernels.cuda.rms_normed import RmsNormed

    if isinstance(hidden, GroupedRows):
        places = hidden.groups.positions.view(hidden.tokens, -1).long()
        return hidden.rows.dequantize()[places]
    rows: Tensor = hidden.hidden if isinstance(hidden, RmsNormed) else hidden.dequantize()
    return rows


def in_the_form_of(rows: Tensor, own: Hidden, backend: Backend[Any]) -> Hidden:
    """`rows` in the form in which `backend` holds `own`, so that the same kernel reads them.

    A residual stream whose norm has been begun cannot be made from rows: `own` is given back.
    """
    placed = rows.to(backend.device, backend.dtype)
    if isinstance(own, Tensor):
        return placed
    if isinstance(own, ExpertRows):
        slots, width = own.groups.places.shape, own.values.shape[1]
        return own.of_slots(rows[..., :width].reshape(*slots, width).to(own.values))
    placed = placed.flatten(0, -2)  # of experts, a row for each of a token's
    from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, ScaledProduct, to_fp16_operand
    from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
    from quengine.kernels.cuda.moe.grouped import GroupedRows

    if isinstance(own, GroupedRows):
        return _grouped(placed, own)
    if isinstance(own, Fp16Operand):
        return to_fp16_operand(placed)
    if isinstance(own, ScaledProduct):
        ones = torch.ones(len(placed), device=placed.device)
        return ScaledProduct(placed.contiguous(), ones, 1.0)
    return quantize_activations(placed) if isinstance(own, QuantizedActivations) else own


def _grouped(rows: Tensor, own: "GroupedRows") -> "GroupedRows":
    """Rows fp32 [T * k, width] in the places that `own` has for them."""
    from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, padded_cols, to_fp16_operand

    width = padded_cols(rows.shape[1])
    placed = rows.new_zeros(own.rows.rows, width)
    placed[own.groups.positions.long(), : rows.shape[1]] = rows
    operand = Fp16Operand.empty(own.rows.rows, width, rows.device, own.rows.layout)
    return replace(own, rows=to_fp16_operand(placed, operand))


@contextmanager
def replaced(holders: Iterable[tuple[Any, str]], around: Iterable[Any]) -> Iterator[None]:
    """A block in which parts of a decoder have the backends `around`. holders: each part, and its attribute's name."""
    held = [(holder, name, getattr(holder, name)) for holder, name in holders]
    try:
        for (holder, name, _), backend in zip(held, around, strict=True):
            setattr(holder, name, backend)
        yield
    finally:
        for holder, name, backend in held:
            setattr(holder, name, backend)


def watched(decoder: Decoder, watch: Watch) -> AbstractContextManager[None]:
    """A block in which every operation of `decoder` goes through `watch`."""
    holders: list[tuple[Any, str, int | None, _Names]] = [(decoder, "backend", None, {})]
    if decoder.inputs is not None:
        holders.append((decoder.inputs, "backend", None, _IN_INPUTS))
    for layer, block in enumerate(decoder.blk, decoder.config.held_layers.start):
        parts: list[tuple[Any, _Names]] = [(block, {}), (block.mixer, {}), (block.ffn, _IN_FFN)]
        parts.append((block.input, _IN_INPUT))
        holders += [(part, "backend", layer, names) for part, names in parts if part is not None]
        if isinstance(block.ffn, MixtureOfExperts):
            holders.append((block.ffn, "expert_backend", layer, _IN_FFN))
    around = [
        _WatchedBackend(getattr(part, name), watch, layer, names) for part, name, layer, names in holders
    ]
    return replaced([(part, name) for part, name, *_ in holders], around)


class _WatchedBackend:
    """A backend whose operations go through `watch`; everything else of it is the backend's own.

    layer: the layer of its calls. names: the operations of its methods, where they differ from `_OPERATIONS`.
    """

    def __init__(self, backend: Backend[Any], watch: Watch, layer: int | None, names: _Names) -> None:
        self._backend, self._watch = backend, watch
        self._layer, self._names = layer, names

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._backend, name)
        if name not in _OPERATIONS:
            return own
        operation, places = _OPERATIONS[name]
        operation = self._names.get(name, operation)

        def watched_operation(*args: Any, **more: Any) -> Hidden:
            return self._watch(Call(operation, self._layer, args, places, partial(own, **more)))

        return watched_operation
