"""What the layers of an architecture are made of: the form of each part, without sizes."""

from dataclasses import dataclass, field, replace
from typing import Any

from quengine.models.blocks.attention import AttentionForm
from quengine.models.blocks.experts import ExpertsForm
from quengine.models.blocks.feed_forward import FeedForwardForm
from quengine.models.blocks.norms import Norms


@dataclass(frozen=True)
class BlockForm:
    """The forms from which `build` makes the parts of each layer; a layer may have others (`Architecture.build`).

    feed_forward: of dense feed-forwards, and of each expert.
    """

    attention: AttentionForm = field(default_factory=AttentionForm)
    feed_forward: FeedForwardForm = field(default_factory=FeedForwardForm)
    experts: ExpertsForm = field(default_factory=ExpertsForm)
    norms: Norms = field(default_factory=Norms)

    def with_attention(self, **changes: Any) -> "BlockForm":
        """The same with another attention: AttentionForm's fields."""
        return replace(self, attention=replace(self.attention, **changes))

    def with_feed_forward(self, **changes: Any) -> "BlockForm":
        """The same with another feed-forward: FeedForwardForm's fields."""
        return replace(self, feed_forward=replace(self.feed_forward, **changes))

    def with_experts(self, **changes: Any) -> "BlockForm":
        """The same with other experts: ExpertsForm's fields."""
        return replace(self, experts=replace(self.experts, **changes))
