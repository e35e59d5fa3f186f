"""A mixture of experts, declared: the router's tensors, those of all experts, those of the shared expert."""

from collections.abc import Mapping
from dataclasses import dataclass

from quengine.models.blocks.block import Axis, Cut, TensorSpec
from quengine.models.config import BlockKind, ExpertConfig

_INNER: tuple[Axis, ...] = ("expert_inner",)
_SHARED: tuple[Axis, ...] = ("shared_inner",)
_ROWS, _COLUMNS = Cut("rows", _INNER, experts=True), Cut("columns", _INNER, experts=True)


@dataclass(frozen=True)
class Experts:
    """See ExpertConfig; width: of the residual stream. partial: a rank has a part of the experts."""

    form: BlockKind
    width: int
    experts: ExpertConfig
    partial: bool = False

    @property
    def every_row_length(self) -> int:
        """Of the shared expert."""
        return self.experts.shared_feed_forward_length

    def tensors(self) -> Mapping[str, TensorSpec]:
        count, inner = self.experts.count, self.experts.feed_forward_length
        found: dict[str, TensorSpec] = {}
        if self.form.norms != "post":
            found[f"{self.form.ffn_norm}.weight"] = TensorSpec((self.width,))
        found |= {
            "ffn_gate_inp.weight": TensorSpec((count, self.width)),
            "ffn_gate_exps.weight": TensorSpec((count, inner, self.width), _ROWS),
            "ffn_up_exps.weight": TensorSpec((count, inner, self.width), _ROWS),
            "ffn_down_exps.weight": TensorSpec((count, self.width, inner), _COLUMNS),
        }
        found |= self._biases() | self._shared()
        if self.form.norms != "pre":
            found["post_ffw_norm.weight"] = TensorSpec((self.width,))
        return found

    def joined(self) -> Mapping[str, TensorSpec]:
        """The tensor that holds gate and up of all experts, [E, 2F, width], in files that do not have two."""
        shape = (self.experts.count, 2 * self.experts.feed_forward_length, self.width)
        return {"ffn_gate_up_exps.weight": TensorSpec(shape, Cut("rows", (*_INNER, *_INNER), experts=True))}

    def _biases(self) -> dict[str, TensorSpec]:
        count, inner = self.experts.count, self.experts.feed_forward_length
        found: dict[str, TensorSpec] = {}
        if self.form.expert_bias:
            columns = Cut("columns", _INNER, experts=True)
            found |= {
                "ffn_gate_inp.bias": TensorSpec((count,)),
                "ffn_gate_exps.bias": TensorSpec((count, inner), columns),
                "ffn_up_exps.bias": TensorSpec((count, inner), columns),
                "ffn_down_exps.bias": TensorSpec((count, self.width), Cut("first", experts=True)),
            }
        if self.form.selection_bias:
            found["exp_probs_b.bias"] = TensorSpec((count,))
        return found

    def _shared(self) -> dict[str, TensorSpec]:
        shared = self.experts.shared_feed_forward_length
        if not shared:
            return {}
        rows, columns = Cut("rows", _SHARED), Cut("columns", _SHARED)
        found = {
            "ffn_gate_shexp.weight": TensorSpec((shared, self.width), rows),
            "ffn_up_shexp.weight": TensorSpec((shared, self.width), rows),
            "ffn_down_shexp.weight": TensorSpec((self.width, shared), columns),
        }
        return found | (
            {"ffn_gate_inp_shexp.weight": TensorSpec((self.width,))} if self.form.shared_gate else {}
        )
