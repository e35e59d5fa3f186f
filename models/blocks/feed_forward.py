"""The feed-forward, declared: with a gate, or without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from quengine.models.blocks.block import ChannelMixer, Cut, TensorSpec
from quengine.models.blocks.norms import Norms

GateActivation: TypeAlias = Literal["silu", "gelu_tanh", "gelu_erf", "clamped_swish"]
Pointwise: TypeAlias = Literal["relu2", "gelu"]

_ROWS, _COLUMNS = Cut("rows", ("inner",)), Cut("columns", ("inner",))


@dataclass(frozen=True)
class FeedForwardForm:
    """What a feed-forward, or an expert, computes between up and down.

    activation: the gate's (kernels/glu.py).
    pointwise: the activation of a form without a gate (kernels/pointwise.py); None: there is a gate.
    merged_gate: one tensor `ffn_up` holds the rows of gate and up.
    """

    activation: GateActivation = "silu"
    pointwise: Pointwise | None = None
    merged_gate: bool = False

    @property
    def has_gate(self) -> bool:
        return self.pointwise is None

    @property
    def function(self) -> GateActivation | Pointwise:
        """The activation: `pointwise` of a form without a gate, else the gate's."""
        return self.pointwise or self.activation


@dataclass(frozen=True)
class FeedForward(ChannelMixer):
    """activation(gate) * up of `length` elements (without a gate: activation(up)), then down to `width`.

    partial: each rank has some of the elements. cutoff c: of a gate only the excess over its row's mean + c * standard
    deviation counts (kernels/altup.py); -inf: gates count as they are.
    """

    form: FeedForwardForm
    norms: Norms
    width: int
    length: int
    partial: bool = False
    cutoff: float = -inf

    @property
    def traits(self) -> Sequence[str]:
        sparse = ("sparse activations",) if self.cutoff > -inf else ()
        return (*(("merged projections",) if self.form.merged_gate else ()), *sparse)

    @property
    def every_row_length(self) -> int:
        return self.length

    def tensors(self) -> Mapping[str, TensorSpec]:
        found = self.norms.ffn_entry(self.width)
        if self.form.merged_gate:
            both = Cut("rows", ("inner", "inner"))
            found["ffn_up.weight"] = TensorSpec(
                (2 * self.length, self.width), both, "mlp.gate_up_proj.weight"
            )
        else:
            shape = (self.length, self.width)
            if self.form.has_gate:
                found["ffn_gate.weight"] = TensorSpec(shape, _ROWS, "mlp.gate_proj.weight")
            found["ffn_up.weight"] = TensorSpec(shape, _ROWS, "mlp.up_proj.weight")
        down = TensorSpec((self.width, self.length), _COLUMNS, "mlp.down_proj.weight")
        return {**found, "ffn_down.weight": down, **self.norms.ffn_result(self.width)}
