"""Layers that differ only in sizes and windows: attention, then a feed-forward or a mixture of experts."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from quengine.models.blocks.altup import AltUp
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.block import Block, ChannelMixer, Mixer
from quengine.models.blocks.dense_and_experts import DenseAndExperts
from quengine.models.blocks.experts import Experts
from quengine.models.blocks.feed_forward import FeedForward
from quengine.models.blocks.layer_input import LayerInput
from quengine.models.config import ModelConfig


def uniform_layers(config: ModelConfig) -> Sequence[Block]:
    """Layers with attention and a channel mixer each, with the sizes and window that the configuration gives them."""
    parallel = config.block.norms.placement == "parallel"
    return [
        Block(
            attention_of(config, i), channel_mixer(config, i), parallel, layer_input(config), _around(config)
        )
        for i in range(config.block_count)
    ]


def hybrid_layers(config: ModelConfig, recurrent: Mixer | None) -> Sequence[Block]:
    """Layers of attention, or of `recurrent` where there is none, each followed by a channel mixer."""
    return [
        Block(
            recurrent if i in config.recurrent_layers else attention_of(config, i), channel_mixer(config, i)
        )
        for i in range(config.block_count)
    ]


def _around(config: ModelConfig) -> AltUp | None:
    sizes = config.altup
    return None if sizes is None else AltUp(config.embedding_length, sizes.streams, sizes.rank)


def layer_input(config: ModelConfig) -> LayerInput | None:
    """A layer's part in per-layer embeddings; None: the model has none."""
    if config.layer_input is None:
        return None
    form, width = config.block, config.embedding_length
    return LayerInput(form.feed_forward.activation, form.norms, width, config.layer_input.length)


def attention_of(config: ModelConfig, layer: int) -> Attention:
    """The attention of a layer."""
    scale, length = config.attention_temperature_scale, config.attention_temperature_length
    rotation, form = config.rotation(layer), config.block.attention
    heads, kv_heads, *_ = config.sizes(layer)
    size = config.head_size(layer)
    return Attention(
        form=form if rotation.turns else replace(form, unit_norms=False),
        norms=config.block.norms,
        width=config.embedding_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        rotation=rotation,
        scale=size**-0.5 if config.attention_scale is None else config.attention_scale,
        window=config.layer_windows[layer],
        temperature=(scale, length, config.attention_temperature_offset) if scale else None,
        partial=config.ranks > 1 and config.splits_heads,
        keys_as_values=layer in config.keys_as_values,
        shared=config.kv_source(layer) != layer,
        softcap=config.attention_softcap,
        joins_hidden=config.eagle is not None,
        chunked=config.attention_chunk > 0 and config.layer_windows[layer] is not None,
    )


def channel_mixer(config: ModelConfig, layer: int) -> ChannelMixer:
    """The feed-forward of a layer, or its mixture of experts."""
    form, width, partial = config.block, config.embedding_length, config.ranks > 1
    norms = form.norms
    if config.layer_input is not None:  # the per-layer embeddings come first, then the scale
        norms = replace(norms, scaled=False)
    cutoff = -inf if config.altup is None else config.altup.cutoffs[layer]
    dense = FeedForward(
        form.feed_forward, norms, width, config.sizes(layer).feed_forward_length, partial, cutoff
    )
    if config.has_experts(layer):
        assert config.experts is not None
        experts = Experts(form.experts, form.feed_forward, norms, width, config.experts, partial)
        return DenseAndExperts(dense, experts) if form.experts.beside_dense else experts
    return dense
