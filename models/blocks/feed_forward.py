"""The feed-forward, declared: with a gate, or without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from quengine.models.blocks.block import NORM, Cut, TensorSpec, Uniform
from quengine.models.config import BlockKind

_ROWS, _COLUMNS = Cut("rows", ("inner",)), Cut("columns", ("inner",))


def first_norm(form: BlockKind, width: int) -> dict[str, TensorSpec]:
    """The norm in front of a feed-forward or experts, where there is one."""
    norm = TensorSpec((width,), hf="post_attention_layernorm.weight", draw=NORM)
    return {} if form.norms in ("post", "parallel") else {f"{form.ffn_norm}.weight": norm}


def last_norm(form: BlockKind, width: int) -> dict[str, TensorSpec]:
    """The norm of their result, where there is one, and the number that the layer's sum is multiplied by."""
    norm = TensorSpec((width,), hf="post_feedforward_layernorm.weight", draw=NORM)
    found = {} if form.norms in ("pre", "parallel") else {"post_ffw_norm.weight": norm}
    if form.layer_scale:
        found["layer_output_scale.weight"] = TensorSpec((1,), hf="layer_scalar", draw=Uniform(0.5, 1.0))
    return found


@dataclass(frozen=True)
class FeedForward:
    """activation(gate) * up of `length` elements, or of a form without a gate activation(up), then down to `width`.

    partial: a rank has some of the elements. cutoff: gates count as far as they are above the mean of their row plus so
    many of its standard deviations (kernels/altup.py); -inf: all as they are.
    """

    form: BlockKind
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
        found = first_norm(self.form, self.width)
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
        return {**found, "ffn_down.weight": down, **last_norm(self.form, self.width)}

    def joined(self) -> Mapping[str, TensorSpec]:
        return {}
