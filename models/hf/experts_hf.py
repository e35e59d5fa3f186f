"""Reads the mixture of experts of a Hugging Face config.json.

Model types have their own keys for it (`ModelType.expert_keys`). Router traits without a key are declared with the
architecture.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quengine.kernels.moe.router_kind import MOST_EXPERTS, MOST_EXPERTS_USED
from quengine.models.architectures.architecture import Architecture, Keys, ModelType
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.config import LIMITS
from quengine.models.hf.hf_keys import flag, integer, number

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys that count a model's experts."""

_ALIASES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Key -> its other name, which `transformers` reads too, and may save."""


def read_experts(
    keys: Keys, declared: Architecture, model_type: ModelType, blocks: int
) -> ExpertConfig | None:
    """The mixture of experts of the text model `keys`, of `blocks` layers; None of a dense model.

    Raises:
        EngineError: a value is missing, of the wrong type or out of range.
    """
    names = expert_keys(keys, model_type)
    if not names or declared.router is None:
        return None
    if model_type.experts_flag and not flag(keys, model_type.experts_flag):
        return None
    count = integer(keys, names["count"], 0 if model_type.may_be_dense else 1, MOST_EXPERTS)
    if not count:
        return None
    most = LIMITS["feed_forward_length"][1]
    length = integer(keys, names["feed_forward_length"], 1, most)
    fields: dict[str, Any] = {"used": integer(keys, names["used"], 1, min(count, MOST_EXPERTS_USED))}
    if "normalized" in names:
        fields["normalized"] = flag(keys, names["normalized"])
    if "scale" in names:
        fields["scale"] = number(keys, names["scale"], 1.0)
    if "groups" in names:
        fields["groups"] = integer(keys, names["groups"], 1, count, default=1)
        fields["groups_used"] = integer(keys, names["groups_used"], 1, fields["groups"], default=1)
    return ExpertConfig(
        count=count,
        router=replace(declared.router, **fields),
        feed_forward_length=length,
        shared_feed_forward_length=_shared_length(keys, names, length),
        dense_layers=tuple(model_type.dense_layers(keys, blocks)),
    )


def expert_keys(keys: Keys, model_type: ModelType) -> Mapping[str, str]:
    """`model_type.expert_keys`, with config.json's own key for the number of experts."""
    names = model_type.expert_keys
    other = _ALIASES.get(names.get("count", ""), "")
    return {**names, "count": other} if other in keys else names


def _shared_length(keys: Keys, names: Mapping[str, str], length: int) -> int:
    """The length of the shared experts side by side: as config.json says, or their number times the length of an
    expert."""
    if "shared_count" in names:
        return length * integer(keys, names["shared_count"], 0, MOST_EXPERTS, default=0)
    if "shared_feed_forward_length" in names:
        most = LIMITS["feed_forward_length"][1]
        return integer(keys, names["shared_feed_forward_length"], 0, most, default=0)
    return 0
