"""What several mixtures of experts share: keys of config.json (`ModelType.expert_keys`), modules of folders."""

from collections.abc import Mapping

MIXTRAL: Mapping[str, str] = {
    "count": "num_local_experts",
    "used": "num_experts_per_tok",
    "feed_forward_length": "intermediate_size",
}
QWEN: Mapping[str, str] = {
    "count": "num_experts",
    "used": "num_experts_per_tok",
    "feed_forward_length": "moe_intermediate_size",
    "normalized": "norm_topk_prob",
}
DEEPSEEK: Mapping[str, str] = {
    "count": "n_routed_experts",
    "used": "num_experts_per_tok",
    "feed_forward_length": "moe_intermediate_size",
    "shared_count": "n_shared_experts",
    "normalized": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "groups_used": "topk_group",
}

SHARED_EXPERTS: Mapping[str, str] = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""`Architecture.hf_modules` of a shared expert."""
