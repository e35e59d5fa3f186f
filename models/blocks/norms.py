"""The norms in front of and after a layer's parts, declared: their kind and places."""

from dataclasses import dataclass
from typing import Literal

from quengine.models.blocks.block import NORM, TensorSpec, Uniform


@dataclass(frozen=True)
class Norms:
    """The norms of a layer, and the number that it ends with.

    kind: RMSNorm ("rms"), or LayerNorm ("layer").
    placement: "pre" in front of mixer and feed-forward (`attn_norm`, `ffn`), "post" on their results before the
        residual is added (`post_attention_norm`, `post_ffw_norm`), or "both"; "parallel": mixer and feed-forward read
        the same norm (`attn_norm`) of a layer's input, and both are added to it.
    ffn: what GGUF calls the norm in front of the feed-forward.
    scaled: the residual stream is multiplied by a number of each layer, `layer_output_scale`, at its end.
    """

    kind: Literal["rms", "layer"] = "rms"
    placement: Literal["pre", "post", "both", "parallel"] = "pre"
    ffn: Literal["ffn_norm", "post_attention_norm", "attn_norm"] = "ffn_norm"
    scaled: bool = False

    @property
    def before_mixer(self) -> bool:
        """Whether there is a norm in front of the mixer."""
        return self.placement != "post"

    @property
    def before_ffn(self) -> bool:
        """Whether the feed-forward has its own norm in front."""
        return self.placement in ("pre", "both")

    @property
    def of_results(self) -> bool:
        """Whether results are normalized before they are added to the residual stream."""
        return self.placement in ("post", "both")

    def ffn_entry(self, width: int) -> dict[str, TensorSpec]:
        """The tensor of the norm in front of a feed-forward or of experts, if it has its own."""
        norm = TensorSpec((width,), hf="post_attention_layernorm.weight", draw=NORM)
        return {f"{self.ffn}.weight": norm} if self.before_ffn else {}

    def ffn_result(self, width: int) -> dict[str, TensorSpec]:
        """The tensors after a feed-forward, or experts: the norm of the result, and the layer's output scale."""
        norm = TensorSpec((width,), hf="post_feedforward_layernorm.weight", draw=NORM)
        return {**({"post_ffw_norm.weight": norm} if self.of_results else {}), **self.layer_scale()}

    def layer_scale(self) -> dict[str, TensorSpec]:
        """The tensor of the layer's output scale, if there is one."""
        number = TensorSpec((1,), hf="layer_scalar", draw=Uniform(0.5, 1.0))
        return {"layer_output_scale.weight": number} if self.scaled else {}
