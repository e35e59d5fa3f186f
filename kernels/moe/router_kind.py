"""How a router chooses experts and weights them: data of an architecture, read without torch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Scores: TypeAlias = Literal["softmax", "softmax_of_chosen", "sigmoid"]
"""What becomes of a row's logits: softmax over all experts; softmax over the chosen ones alone; sigmoid of each."""

MOST_EXPERTS, MOST_EXPERTS_USED = 1024, 64
"""Experts of a layer, and those of a row: kernels have the scores of a row's experts on their stack."""


@dataclass(frozen=True)
class RouterKind:
    """How experts are chosen and weighted.

    used: experts of a row, k.
    normalized: the chosen scores are divided by their sum.
    scale: multiplies the weights.
    groups, groups_used: where groups > 1, the experts lie in so many groups of equal size, and only those of the
        `groups_used` best are chosen from; a group is as good as the sum of its two highest scores, the selection
        bias included (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).
    """

    used: int
    scores: Scores = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
