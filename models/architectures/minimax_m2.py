"""MiniMax-M2: norms of whole query and key rows, a part of each head rotated, experts chosen by sigmoid and bias.

Every layer has experts of the feed-forward's length and no shared expert. In released folders `rotary_dim` is the
number of rotated elements of a head. Source: `MiniMaxM2Model` in the `transformers` library.
"""

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Keys, ModelType
from quengine.models.architectures.mixtures import MIXTRAL
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm
from quengine.models.config import LIMITS
from quengine.models.hf.hf_keys import integer


def _common_keys(keys: Keys) -> Keys:
    """config.json with `rotary_dim` as the share of a head that is rotated."""
    if keys.get("rotary_dim") is None or "partial_rotary_factor" in keys:
        return keys
    head = integer(keys, "head_dim", *LIMITS["head_dim"])
    return {**keys, "partial_rotary_factor": integer(keys, "rotary_dim", 1, head) / head}


MINIMAX_M2 = Architecture(
    name="minimax-m2",
    block=BlockForm(AttentionForm(qk_norm="row"), experts=ExpertsForm(selection_bias=True)),
    router=RouterKind(used=8, scores="sigmoid", normalized=True),
    model_types={
        "minimax_m2": ModelType(
            {
                "vocab_size": 200064,
                "hidden_size": 3072,
                "intermediate_size": 1536,
                "num_hidden_layers": 62,
                "num_attention_heads": 48,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 196608,
                "rope_theta": 5e6,
                "num_local_experts": 256,
                "num_experts_per_tok": 8,
            },
            reads_partial_rotary_factor=True,
            expert_keys=MIXTRAL,
            common_keys=_common_keys,
        )
    },
    hf_modules={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate.{expert}": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up.{expert}": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down.{expert}": "block_sparse_moe.experts.{expert}.w2",
        "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
    },
    synthetic={
        "minimax-m2": {
            "vocab_size": 200064,
            "context_length": 196608,
            "embedding_length": 3072,
            "block_count": 62,
            "feed_forward_length": 1536,
            "head_count": 48,
            "rope_dim": 64,
            "rope_freq_base": 5e6,
            "experts": 256,
            "experts_used": 8,
        },
        "minimax-m2-tiny": {"rope_dim": 32, "experts": 16, "experts_used": 4, "feed_forward_length": 256},
    },
)
