"""Per-layer embeddings, which a layer gets beside the residual stream (Gemma 4 E2B and E4B), declared.

A table has a row for each token, with `length` elements for each layer. A projection of the token's embedding,
normalized for each layer, is added to the row (kernels/backend.py: `layer_inputs`). At its end a layer adds
`norm(project(activation(gate(stream)) * layer's elements))` to the stream. Source: `Gemma4TextModel` and
`Gemma4TextDecoderLayer` in the `transformers` library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quengine.models.blocks.block import NORM, Draw, Part, TensorSpec
from quengine.models.blocks.feed_forward import GateActivation
from quengine.models.blocks.norms import Norms
from quengine.models.config import ModelConfig

TABLE = "per_layer_token_embd"
"""The table's name in GGUF files; a step reads one row of it per token."""


@dataclass(frozen=True)
class LayerInput(Part):
    """activation: of the gate. norms: the layer's, with its output scale. width: of the residual stream. length:
    elements for each layer."""

    activation: GateActivation
    norms: Norms
    width: int
    length: int

    @property
    def traits(self) -> Sequence[str]:
        return ("per-layer embeddings",)

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {
            "inp_gate.weight": TensorSpec((self.length, self.width), hf="per_layer_input_gate.weight"),
            "proj.weight": TensorSpec((self.width, self.length), hf="per_layer_projection.weight"),
            "post_norm.weight": TensorSpec((self.width,), hf="post_per_layer_input_norm.weight", draw=NORM),
            **self.norms.layer_scale(),
        }


def top_tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """The tensors outside of layers, by name; empty for a model without per-layer embeddings."""
    if config.layer_input is None:
        return {}
    width, length = config.embedding_length, config.layer_input.length
    every = config.block_count * length
    return {
        f"{TABLE}.weight": TensorSpec(
            (config.layer_input.rows or config.vocab_size, every),
            hf="{body}embed_tokens_per_layer.weight",
            draw=Draw(length**-0.5, by_columns=False),
        ),
        "per_layer_model_proj.weight": TensorSpec(
            (every, width), hf="{body}per_layer_model_projection.weight"
        ),
        "per_layer_proj_norm.weight": TensorSpec(
            (length,), hf="{body}per_layer_projection_norm.weight", draw=NORM
        ),
    }
