"""Builds a decoder layer on a backend from its declaration: one class for each kind of mixer and feed-forward.

The declarations (models/blocks) do not import torch; these classes do.
"""

from collections.abc import Sequence

from torch import Tensor

from quengine.kernels.backend import Hidden, LayerState
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import Norm
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.block import Block, ChannelMixer, Mixer
from quengine.models.blocks.dense_and_experts import DenseAndExperts
from quengine.models.blocks.experts import Experts
from quengine.models.blocks.feed_forward import FeedForward
from quengine.models.blocks.gated_delta import GatedDelta
from quengine.models.blocks.latent_attention import LatentAttention
from quengine.models.blocks.layer_input import LayerInput
from quengine.models.blocks.mamba2 import Mamba2
from quengine.models.blocks.short_conv import ShortConv
from quengine.models.dense_and_experts import DenseAndExpertsLayer
from quengine.models.experts import MixtureOfExperts
from quengine.models.gated_delta import GatedDeltaLayer
from quengine.models.latent_attention import LatentAttentionLayer
from quengine.models.layer_input import LayerInputLayer
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import AttentionLayer, FeedForwardLayer, LayerTensors, MixerLayer
from quengine.models.mamba2 import Mamba2Layer
from quengine.models.short_conv import ShortConvLayer


def mixer_layer(declared: Mixer, tensors: LayerTensors, tables: LayerTables) -> MixerLayer:
    match declared:
        case Attention():
            return AttentionLayer(declared, tensors, tables)
        case LatentAttention():
            return LatentAttentionLayer(declared, tensors, tables)
        case ShortConv():
            return ShortConvLayer(declared, tensors, tables)
        case GatedDelta():
            return GatedDeltaLayer(declared, tensors, tables)
        case Mamba2():
            return Mamba2Layer(declared, tensors, tables)
    raise TypeError(f"no layer computes {declared}")


def feed_forward_layer(
    declared: ChannelMixer, tensors: LayerTensors, tables: LayerTables
) -> FeedForwardLayer | MixtureOfExperts:
    match declared:
        case FeedForward():
            return FeedForwardLayer(declared, tensors)
        case DenseAndExperts():
            return DenseAndExpertsLayer(declared, tensors, tables.host_experts(tensors.layer))
        case Experts():
            return MixtureOfExperts(declared, tensors, tables.host_experts(tensors.layer))
    raise TypeError(f"no layer computes {declared}")


class DecoderLayer:
    """One layer on a backend: a mixer, a feed-forward, or both, one after the other or both on the layer's input."""

    def __init__(self, block: Block, tensors: LayerTensors, tables: LayerTables) -> None:
        mixer, ffn = block.mixer, block.feed_forward
        self.backend = tensors.backend
        self.mixer = None if mixer is None else mixer_layer(mixer, tensors, tables)
        self.ffn = None if ffn is None else feed_forward_layer(ffn, tensors, tables)
        self.input = LayerInputLayer(block.input, tensors) if isinstance(block.input, LayerInput) else None
        self._beside: tuple[MixerLayer, FeedForwardLayer] | None = None
        if block.parallel:
            assert self.mixer is not None and isinstance(self.ffn, FeedForwardLayer)
            self.ffn.norm, self._beside = self.mixer.norm, (self.mixer, self.ffn)

    @property
    def parts(self) -> Sequence[MixerLayer | FeedForwardLayer | MixtureOfExperts]:
        return [part for part in (self.mixer, self.ffn) if part is not None]

    @property
    def norm(self) -> Norm | None:
        """The norm that reads the layer's input."""
        return self.parts[0].norm

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step of one row reads."""
        return sum(part.nbytes for part in self.parts) + (0 if self.input is None else self.input.nbytes)

    def __call__(
        self,
        batch: ForwardBatch,
        x: Hidden,
        cache: LayerState,
        next_norm: Norm | None,
        rows: Tensor | None = None,
        inputs: Hidden | None = None,
    ) -> Hidden:
        """Computes the layer on `x`, and returns the new residual stream.

        `next_norm`: the norm after this layer, the next layer's or the output's. `rows`: the rows to keep after the
        mixer, or of x if there is no mixer; None: all. `inputs`: the result of `Backend.layer_inputs`, for models with
        per-layer embeddings.
        """
        if self.input is None:
            return self._parts(batch, x, cache, next_norm, rows)
        x = self._parts(batch, x, cache, None, rows)
        if rows is not None:
            inputs, batch = self.backend.gather_rows(inputs, rows), batch.selected(rows)
        return self.input(batch, x, inputs, next_norm)

    def _parts(
        self, batch: ForwardBatch, x: Hidden, cache: LayerState, next_norm: Norm | None, rows: Tensor | None
    ) -> Hidden:
        """Mixer and feed-forward."""
        if self._beside is not None:  # computed first: the mixer may overwrite x
            mixer, beside = self._beside
            own = x if rows is None else self.backend.gather_rows(x, rows)
            left = batch if rows is None else batch.selected(rows)
            inner = self.backend.kept(beside.inner(left, own))
            return beside.down(left, inner, mixer(batch, x, cache, None, rows), next_norm)
        if self.mixer is not None:
            x = self.mixer(batch, x, cache, next_norm if self.ffn is None else self.ffn.norm, rows)
        elif rows is not None:
            x = self.backend.gather_rows(x, rows)
        left = batch if rows is None else batch.selected(rows)
        return x if self.ffn is None else self.ffn(left, x, next_norm)
