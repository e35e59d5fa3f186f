"""A dense feed-forward and a mixture of experts side by side (Gemma 4), declared.

Both read the residual stream, each through its own norm. Each result is normalized, and so is their sum before it is
added to the stream. The router reads an RMSNorm of the stream, whose weight is a vector divided by sqrt(width). The
weight of a chosen expert is multiplied by that expert's own number. Source: `Gemma4TextDecoderLayer` and
`Gemma4TextRouter` in the `transformers` library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quengine.models.blocks.block import NORM, ChannelMixer, TensorSpec
from quengine.models.blocks.experts import Experts
from quengine.models.blocks.feed_forward import FeedForward

_NORMS = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
"""GGUF's name of a norm -> the module in a Hugging Face layer."""


@dataclass(frozen=True)
class DenseAndExperts(ChannelMixer):
    """dense: the first branch, with the norm in front of it and the one of the sum. experts: the second."""

    dense: FeedForward
    experts: Experts

    @property
    def traits(self) -> Sequence[str]:
        return ("dense feed-forward beside experts",)

    @property
    def every_row_length(self) -> int:
        """The length of the dense feed-forward."""
        return self.dense.length

    def tensors(self) -> Mapping[str, TensorSpec]:
        count, width = self.experts.experts.count, self.dense.width
        norms = {
            f"{name}.weight": TensorSpec((width,), hf=f"{hf}.weight", draw=NORM)
            for name, hf in _NORMS.items()
        }
        return {
            **self.dense.tensors(),
            **self.experts.tensors(),
            **norms,
            "ffn_gate_inp.scale": TensorSpec((width,), hf="router.scale", draw=NORM),
            "ffn_down_exps.scale": TensorSpec((count,), hf="router.per_expert_scale", draw=NORM),
        }

    def joined(self) -> Mapping[str, TensorSpec]:
        return self.experts.joined()
