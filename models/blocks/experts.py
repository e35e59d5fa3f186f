"""A mixture of experts, declared: the tensors of the router, of all experts and of the shared expert."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import pow

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.blocks.block import BIAS, Axis, ChannelMixer, Cut, TensorSpec
from quengine.models.blocks.feed_forward import FeedForwardForm
from quengine.models.blocks.norms import Norms

OPTIONAL = ("ffn_gate_inp.weight", "_exps.weight", "_shexp.weight")
"""Ends of the names of matrices that models without experts lack."""

_INNER: tuple[Axis, ...] = ("expert_inner",)
_SHARED: tuple[Axis, ...] = ("shared_inner",)
_ROWS, _COLUMNS = Cut("rows", _INNER, experts=True), Cut("columns", _INNER, experts=True)


@dataclass(frozen=True)
class ExpertConfig:
    """The mixture of experts in a model's feed-forwards.

    count: number of experts per layer, of which `router` selects some for each row.
    feed_forward_length: width of an expert.
    shared_feed_forward_length: width of the shared expert, which computes every row; 0: there is none.
    dense_layers: layers with a dense feed-forward of `ModelConfig.feed_forward_length` instead of experts.
    held: the experts on this rank, with expert parallelism; None: all.
    """

    count: int
    router: RouterKind
    feed_forward_length: int
    shared_feed_forward_length: int = 0
    dense_layers: tuple[int, ...] = ()
    held: range | None = None

    def expected(self, rows: float) -> float:
        """The expected number of experts per layer that a step of `rows` rows reads: `E (1 - (1 - k/E)^rows)`.

        Assumes that all sets of k experts are equally likely for each row. `rows` may be a mean over steps.
        """
        return self.count * (1.0 - pow(1.0 - self.router.used / self.count, rows))


@dataclass(frozen=True)
class ExpertsForm:
    """What the mixtures of an architecture have beside their router and experts.

    bias: experts and their router have biases.
    selection_bias: experts are selected by their scores plus a bias per expert.
    shared_gate: the shared expert is weighted by a gate of its own.
    beside_dense: layers with experts also have a dense feed-forward (blocks/dense_and_experts.py); the experts are the
        second branch.
    """

    bias: bool = False
    selection_bias: bool = False
    shared_gate: bool = False
    beside_dense: bool = False


@dataclass(frozen=True)
class Experts(ChannelMixer):
    """A layer's mixture of experts. form: the mixture's. each: the form of an expert. width: of the residual stream.
    experts: number and sizes. partial: each rank has a part of the experts."""

    form: ExpertsForm
    each: FeedForwardForm
    norms: Norms
    width: int
    experts: ExpertConfig
    partial: bool = False

    @property
    def norm(self) -> str:
        """The name of the norm whose result the experts read."""
        return "pre_ffw_norm_2" if self.form.beside_dense else self.norms.ffn

    @property
    def every_row_length(self) -> int:
        """The length of the shared expert."""
        return self.experts.shared_feed_forward_length

    def tensors(self) -> Mapping[str, TensorSpec]:
        count, inner = self.experts.count, self.experts.feed_forward_length
        each = "mlp.experts.{expert}"
        gate = TensorSpec((count, inner, self.width), _ROWS, hf_each=f"{each}.gate_proj.weight")
        return {
            **({} if self.form.beside_dense else self.norms.ffn_entry(self.width)),
            "ffn_gate_inp.weight": TensorSpec((count, self.width), hf="mlp.gate.weight"),
            **({"ffn_gate_exps.weight": gate} if self.each.has_gate else {}),
            "ffn_up_exps.weight": TensorSpec(
                (count, inner, self.width), _ROWS, hf_each=f"{each}.up_proj.weight"
            ),
            "ffn_down_exps.weight": TensorSpec(
                (count, self.width, inner), _COLUMNS, "mlp.experts.down_proj", f"{each}.down_proj.weight"
            ),
            **self._biases(),
            **self._shared(),
            **({} if self.form.beside_dense else self.norms.ffn_result(self.width)),
        }

    def joined(self) -> Mapping[str, TensorSpec]:
        """The tensor with gate and up of all E experts of length F, [E, 2F, width], in files without separate ones."""
        if not self.each.has_gate:
            return {}
        shape = (self.experts.count, 2 * self.experts.feed_forward_length, self.width)
        cut = Cut("rows", (*_INNER, *_INNER), experts=True)
        return {"ffn_gate_up_exps.weight": TensorSpec(shape, cut, "mlp.experts.gate_up_proj")}

    def _biases(self) -> dict[str, TensorSpec]:
        count, inner = self.experts.count, self.experts.feed_forward_length
        found: dict[str, TensorSpec] = {}
        if self.form.bias:
            columns, first = Cut("columns", _INNER, experts=True), Cut("first", experts=True)
            down = TensorSpec((count, self.width), first, "mlp.experts.down_proj_bias", draw=BIAS)
            found |= {
                "ffn_gate_inp.bias": TensorSpec((count,), hf="mlp.gate.bias", draw=BIAS),
                "ffn_gate_exps.bias": TensorSpec((count, inner), columns, draw=BIAS),
                "ffn_up_exps.bias": TensorSpec((count, inner), columns, draw=BIAS),
                "ffn_down_exps.bias": down,
            }
        if self.form.selection_bias:
            hf = "mlp.gate.e_score_correction_bias"
            found["exp_probs_b.bias"] = TensorSpec((count,), hf=hf, draw=BIAS)
        return found

    def _shared(self) -> dict[str, TensorSpec]:
        shared, hf = self.experts.shared_feed_forward_length, "mlp.shared_expert"
        if not shared:
            return {}
        rows, columns = Cut("rows", _SHARED), Cut("columns", _SHARED)
        gate = TensorSpec((shared, self.width), rows, f"{hf}.gate_proj.weight")
        found = {
            **({"ffn_gate_shexp.weight": gate} if self.each.has_gate else {}),
            "ffn_up_shexp.weight": TensorSpec((shared, self.width), rows, f"{hf}.up_proj.weight"),
            "ffn_down_shexp.weight": TensorSpec((self.width, shared), columns, f"{hf}.down_proj.weight"),
        }
        if self.form.shared_gate:
            found["ffn_gate_inp_shexp.weight"] = TensorSpec((self.width,), hf=f"{hf}_gate.weight")
        return found
