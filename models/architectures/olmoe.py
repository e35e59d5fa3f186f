"""OLMoE: norms of whole query and key rows, and experts whose weights are the softmax's own, as few of them are chosen.

Its experts have the length of the feed-forward. `clip_qkv`, which no released model sets, is refused.
"""

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Keys, ModelType
from quengine.models.architectures.mixtures import QWEN
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.hf.hf_keys import config_error


def _common_keys(keys: Keys) -> Keys:
    if keys.get("clip_qkv") is not None:
        raise config_error("clip_qkv", f"{str(keys['clip_qkv'])[:40]} is not implemented")
    return keys


OLMOE = Architecture(
    name="olmoe",
    block=BlockForm(AttentionForm(qk_norm="row")),
    router=RouterKind(used=8, scores="softmax", normalized=False),
    model_types={
        "olmoe": ModelType(
            {
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
            expert_keys={**QWEN, "feed_forward_length": "intermediate_size"},
            common_keys=_common_keys,
        )
    },
)
