"""Reads the mixture of experts of a GGUF file's metadata.

Files give the sizes. How experts are chosen and weighted is in most architectures fixed by llama.cpp and in no file, so
the declaration has it (`Architecture.router`); a file's keys replace what they name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quengine.kernels.moe.router_kind import MOST_EXPERTS, MOST_EXPERTS_USED, Scores
from quengine.models.architectures.architecture import Architecture
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.config import LIMITS
from quengine.models.gguf import GGUFFile
from quengine.models.gguf.layer_values import uniform_int

EXPERT_KEYS: Mapping[str, str] = {
    "experts.count": "expert_count",
    "experts.used": "expert_used_count",
    "experts.feed_forward_length": "expert_feed_forward_length",
    "experts.shared_feed_forward_length": "expert_shared_feed_forward_length",
    "experts.dense_layers": "leading_dense_block_count",
    "experts.scale": "expert_weights_scale",
    "experts.groups": "expert_group_count",
    "experts.groups_used": "expert_group_used_count",
}
"""Field of an ExpertConfig or its RouterKind -> the key, after the architecture's prefix, that an error names."""

SCORES: Mapping[int, Scores] = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}
"""What `expert_gating_func` stands for."""


def read_experts(file: GGUFFile, declared: Architecture, length: int, blocks: int) -> ExpertConfig | None:
    """The mixture of experts of a file of architecture `declared`; None of a dense model.

    length: the model's feed-forward length, which experts have if no key gives theirs.

    Raises:
        GGUFError: a value is missing, of the wrong type, out of range, or not implemented.
    """
    if declared.router is None:
        return None
    prefix, optional = declared.name, declared.may_be_dense
    count_key = f"{prefix}.expert_count"
    count = uniform_int(file, count_key, 0 if optional else 1, MOST_EXPERTS, default=0 if optional else None)
    if not count:
        return None
    used = uniform_int(file, f"{prefix}.expert_used_count", 1, min(count, MOST_EXPERTS_USED))
    most = LIMITS["feed_forward_length"][1]
    inner = uniform_int(file, f"{prefix}.expert_feed_forward_length", 1, most, default=length)
    dense = file.get_int(f"{prefix}.leading_dense_block_count", 0, blocks) or 0
    return ExpertConfig(
        count=count,
        router=replace(declared.router, used=used, **_router_fields(file, prefix)),
        feed_forward_length=inner,
        shared_feed_forward_length=_shared_length(file, prefix, inner),
        dense_layers=tuple(range(dense)),
    )


def _shared_length(file: GGUFFile, prefix: str, inner: int) -> int:
    """The total length of the shared experts, which lie side by side: the file's, or their number times `inner`."""
    most = LIMITS["feed_forward_length"][1]
    length = uniform_int(file, f"{prefix}.expert_shared_feed_forward_length", 0, most, default=0)
    return length or inner * (file.get_int(f"{prefix}.expert_shared_count", 0, MOST_EXPERTS) or 0)


def _router_fields(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """The RouterKind fields that the file gives; as in llama.cpp, a scale, scores or groups of 0 count as absent.

    Of these architectures llama.cpp reads `expert_weights_norm`, `expert_weights_scale` and `expert_gating_func` only
    for GLM-4.5, and takes the declared router for the others. Its converter writes the first two only for GLM, and the
    third only if a folder has a `scoring_func`, so released files of the others lack them. A file that has them was
    made to be computed with them, and is.
    """
    fields: dict[str, Any] = {}
    gating_key = f"{prefix}.expert_gating_func"
    if gating := file.get_int(gating_key):
        if gating not in SCORES:
            known = ", ".join(f"{number} ({scores})" for number, scores in SCORES.items())
            raise file.error(gating_key, f"{gating} is not implemented; {known} are")
        fields["scores"] = SCORES[gating]
    normalized = file.get_bool(f"{prefix}.expert_weights_norm")
    if normalized is not None:
        fields["normalized"] = normalized
    if scale := file.get_float(f"{prefix}.expert_weights_scale"):
        fields["scale"] = scale
    if groups := file.get_int(f"{prefix}.expert_group_count"):
        fields["groups"] = groups
        if groups > 1:
            fields["groups_used"] = file.require_int(f"{prefix}.expert_group_used_count")
    return fields
