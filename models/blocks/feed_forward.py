"""The gated feed-forward, declared."""

from collections.abc import Mapping
from dataclasses import dataclass

from quengine.models.blocks.block import Cut, TensorSpec
from quengine.models.config import BlockKind

_ROWS, _COLUMNS = Cut("rows", ("inner",)), Cut("columns", ("inner",))


@dataclass(frozen=True)
class FeedForward:
    """activation(gate) * up of `length` elements, then down to `width`. partial: a rank has some of the elements."""

    form: BlockKind
    width: int
    length: int
    partial: bool = False

    def tensors(self) -> Mapping[str, TensorSpec]:
        found: dict[str, TensorSpec] = {}
        if self.form.norms != "post":
            found[f"{self.form.ffn_norm}.weight"] = TensorSpec((self.width,))
        if self.form.merged_gate:
            both = Cut("rows", ("inner", "inner"))
            found["ffn_up.weight"] = TensorSpec((2 * self.length, self.width), both)
        else:
            found["ffn_gate.weight"] = TensorSpec((self.length, self.width), _ROWS)
            found["ffn_up.weight"] = TensorSpec((self.length, self.width), _ROWS)
        found["ffn_down.weight"] = TensorSpec((self.width, self.length), _COLUMNS)
        if self.form.norms != "pre":
            found["post_ffw_norm.weight"] = TensorSpec((self.width,))
        return found

    def joined(self) -> Mapping[str, TensorSpec]:
        return {}
