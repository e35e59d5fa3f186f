"""Layers that differ in sizes and windows at most: attention, then a feed-forward, or experts where there are some."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from quengine.models.blocks.altup import AltUp
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.block import Block, ChannelMixer
from quengine.models.blocks.dense_and_experts import DenseAndExperts
from quengine.models.blocks.experts import Experts
from quengine.models.blocks.feed_forward import FeedForward
from quengine.models.blocks.layer_input import LayerInput
from quengine.models.config import ModelConfig


def uniform_layers(config: ModelConfig) -> Sequence[Block]:
    """Attention in every layer, with the sizes and the window that the configuration has for it."""
    parallel = config.block.norms == "parallel"
    return [
        Block(
            Attention.of(config, i), channel_mixer(config, i), parallel, layer_input(config), _around(config)
        )
        for i in range(config.block_count)
    ]


def _around(config: ModelConfig) -> AltUp | None:
    sizes = config.altup
    return None if sizes is None else AltUp(config.embedding_length, sizes.streams, sizes.rank)


def layer_input(config: ModelConfig) -> LayerInput | None:
    """What a layer adds at its end of what it gets beside the stream; None: nothing."""
    if config.layer_input is None:
        return None
    return LayerInput(config.block, config.embedding_length, config.layer_input.length)


def channel_mixer(config: ModelConfig, layer: int) -> ChannelMixer:
    """The feed-forward of a layer, or its mixture of experts."""
    form, width, partial = config.block, config.embedding_length, config.ranks > 1
    if config.layer_input is not None:  # the number at a layer's end comes behind its input
        form = replace(form, layer_scale=False)
    cutoff = -inf if config.altup is None else config.altup.cutoffs[layer]
    dense = FeedForward(form, width, config.sizes(layer).feed_forward_length, partial, cutoff)
    if config.has_experts(layer):
        assert config.experts is not None
        experts = Experts(form, width, config.experts, partial)
        return DenseAndExperts(dense, experts) if form.dense_beside_experts else experts
    return dense
