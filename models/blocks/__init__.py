"""The layers of models, declared: mixers, feed-forwards, norms and other parts; here the forms of these parts."""

from quengine.models.blocks.attention import AttentionForm
from quengine.models.blocks.block_form import BlockForm
from quengine.models.blocks.experts import ExpertsForm
from quengine.models.blocks.feed_forward import FeedForwardForm
from quengine.models.blocks.norms import Norms

__all__ = ["AttentionForm", "BlockForm", "ExpertsForm", "FeedForwardForm", "Norms"]
