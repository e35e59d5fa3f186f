"""The router of a mixture of experts: which experts compute a row, and with what weights. The torch definition.

Experts are selected by fp32 logits (fp64 in the reference backend); ties go to the lower expert. The selected experts
of a row are listed in ascending order, which is also the order in which their results are added.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.moe.router_kind import RouterKind

SUM_EPS = 1e-20
"""Added to the sum that normalizes the scores; it matters if all sigmoids are 0."""


@dataclass(frozen=True, eq=False)
class Router:
    """The tensors of one layer's router, on the device, in fp32 (fp64 in the reference backend).

    weight: [E, K].
    bias: [E], added to the logits (gpt-oss).
    selection_bias: [E], added to the scores for the selection of experts, not for their weights.
    shared_gate: [K]; the sigmoid of its product with the row weights the shared expert (Qwen2-MoE).
    expert_scale: [E]; multiplies the weights of the selected experts, after all else (Gemma 4).
    joins_shared: the shared expert's matrices follow those of the E experts: every row has it as expert E, with the
      weight of its gate, or 1.
    """

    kind: RouterKind
    weight: Tensor
    bias: Tensor | None = None
    selection_bias: Tensor | None = None
    shared_gate: Tensor | None = None
    expert_scale: Tensor | None = None
    joins_shared: bool = False

    @property
    def width(self) -> int:
        """Experts of a row in a Routing."""
        return self.kind.used + self.joins_shared


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts that compute each of T rows, with their weights.

    experts: int32 [T, k], ascending within a row.
    weights: [T, k], in the router's dtype.
    shared: [T], the weights of the shared expert, if the router has a gate for it and it is none of the k.
    joined: whether the last expert of each row is the shared one (Router.joins_shared).
    """

    experts: Tensor
    weights: Tensor
    shared: Tensor | None = None
    joined: bool = False

    @property
    def selected(self) -> Tensor:
        """The experts that the router selected, int32 [T, used]."""
        return self.experts[:, :-1] if self.joined else self.experts


def route(x: Tensor, router: Router, experts: Tensor | None = None) -> Routing:
    """Routes rows x [T, K], already normed. `experts`, int32 [T, k], ascending: given instead of selected."""
    logits = x @ router.weight.T
    if router.bias is not None:
        logits = logits + router.bias
    kind = router.kind
    scores = logits.softmax(-1) if kind.scores == "softmax" else logits
    scores = scores.sigmoid() if kind.scores == "sigmoid" else scores
    if experts is None:
        experts = chosen(scores, router)
    weights = scores.gather(1, experts.long())
    if kind.scores == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if kind.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + SUM_EPS)
    shared = None if router.shared_gate is None else (x @ router.shared_gate).sigmoid()
    weights = weights * kind.scale
    if router.expert_scale is not None:
        weights = weights * router.expert_scale[experts.long()]
    if not router.joins_shared:
        return Routing(experts, weights, shared)
    own = torch.full_like(experts[:, :1], len(router.weight))
    weight = torch.ones_like(weights[:, :1]) if shared is None else shared[:, None]
    return Routing(torch.cat([experts, own], 1), torch.cat([weights, weight], 1), joined=True)


def chosen(scores: Tensor, router: Router) -> Tensor:
    """The `used` experts of each row with the highest scores [T, E], ascending, int32; NaN is the lowest score."""
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    if router.selection_bias is not None:
        scores = scores + router.selection_bias
    if router.kind.groups > 1:
        scores = _of_best_groups(scores, router.kind)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, : router.kind.used].sort(dim=-1).values.to(torch.int32)


def _of_best_groups(scores: Tensor, kind: RouterKind) -> Tensor:
    """The scores, -inf for experts outside the best groups; ties go to the lower group."""
    by_group = scores.view(len(scores), kind.groups, -1)
    best_two = by_group.topk(min(2, by_group.shape[2]), dim=-1).values.sum(-1)
    order = best_two.sort(dim=-1, descending=True, stable=True).indices[:, : kind.groups_used]
    used = torch.zeros_like(best_two, dtype=torch.bool).scatter(1, order, True)
    return by_group.masked_fill(~used[..., None], float("-inf")).flatten(1)
