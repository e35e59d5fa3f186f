"""How a router selects experts and weights them: data of an architecture, without torch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Scores: TypeAlias = Literal["softmax", "softmax_of_chosen", "sigmoid"]
"""How a row's logits become scores: softmax over all experts, softmax over the selected ones alone, or sigmoid."""

MOST_EXPERTS, MOST_EXPERTS_USED = 1024, 64
"""Maximum number of experts per layer and per row: kernels keep the scores of a row's experts on the stack."""


@dataclass(frozen=True)
class RouterKind:
    """How experts are selected and weighted.

    used: number of experts per row, k.
    scores: see Scores.
    normalized: the selected scores are divided by their sum.
    scale: multiplies the weights.
    groups, groups_used: if groups > 1, the experts form this number of equal groups, and are selected from the
      `groups_used` best groups only. A group's score is the sum of its two highest scores, the selection bias included
      (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).
    weighs_inputs: an expert reads its row times the weight, and its result is added as it is (Llama 4).
    """

    used: int
    scores: Scores = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    weighs_inputs: bool = False
