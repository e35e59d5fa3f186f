"""Alternating updates around a layer (Gemma 3n), declared: a token has several rows, of which a layer computes one.

A layer predicts all rows of a token and reads the first. Beside its attention it has a low-rank product with its own
norm ("LAuReL"). See kernels/altup.py. Sources: Baykal et al. 2023, "Alternating Updates for Efficient
Transformers"; Menghani et al. 2024, "LAuReL: Learned Augmented Residual Layer".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quengine.models.blocks.block import NORM, Draw, Part, TensorSpec
from quengine.models.config import ModelConfig

PROJECT, UNEMBED = "altup_proj", "altup_unembd_proj"
"""Matrices of all rows but the first: those that make the rows of the embedding, and those applied before the
output."""

_SMALL = Draw(0.3, by_columns=False)


@dataclass(frozen=True)
class AltUp(Part):
    """A layer's alternating updates. width: of a row. streams: rows of a token. rank: of the low-rank product."""

    width: int
    streams: int
    rank: int

    @property
    def traits(self) -> Sequence[str]:
        return ("alternating updates",)

    def tensors(self) -> Mapping[str, TensorSpec]:
        width, count = self.width, self.streams
        return {
            "altup_router.weight": TensorSpec((count, width), hf="altup.modality_router.weight"),
            "altup_router_norm.weight": TensorSpec((width,), hf="altup.router_norm.weight", draw=NORM),
            "altup_predict_coef.weight": TensorSpec(
                (count * count, count), hf="altup.prediction_coefs.weight", draw=_SMALL
            ),
            "altup_correct_coef.weight": TensorSpec(
                (count, count), hf="altup.correction_coefs.weight", draw=_SMALL
            ),
            "altup_correct_scale.weight": TensorSpec((width,), hf="altup.correct_output_scale", draw=NORM),
            "laurel_l.weight": TensorSpec((self.rank, width), hf="laurel.linear_left.weight"),
            "laurel_r.weight": TensorSpec((width, self.rank), hf="laurel.linear_right.weight"),
            "laurel_post_norm.weight": TensorSpec((width,), hf="laurel.post_laurel_norm.weight", draw=NORM),
        }


def top_tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """The tensors outside of layers, by name; empty for a model without alternating updates."""
    if config.altup is None:
        return {}
    shape = (config.altup.streams - 1, config.embedding_length, config.embedding_length)
    return {
        f"{PROJECT}.weight": TensorSpec(shape, hf_each="{body}altup_projections.{expert}.weight"),
        f"{UNEMBED}.weight": TensorSpec(shape, hf_each="{body}altup_unembed_projections.{expert}.weight"),
    }
