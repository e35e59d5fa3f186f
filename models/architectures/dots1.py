"""dots.llm1: norms of each query and key head, and sigmoid scores that choose experts with a bias of each.

The first layers are dense; the others have shared experts beside the chosen ones. A file's tensors say whether
attention has biases. Source: `Dots1Model` in the `transformers` library.
"""

from collections.abc import Sequence

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Keys, ModelType
from quengine.models.architectures.file_traits import attention_biases, gguf_attention_biases
from quengine.models.architectures.mixtures import DEEPSEEK, SHARED_EXPERTS
from quengine.models.architectures.windows import from_max_window_layers
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm
from quengine.models.config import LIMITS
from quengine.models.hf.hf_keys import integer


def _dense_layers(keys: Keys, blocks: int) -> Sequence[int]:
    return range(min(integer(keys, "first_k_dense_replace", 0, LIMITS["block_count"][1]), blocks))


DOTS1 = Architecture(
    name="dots1",
    block=BlockForm(AttentionForm(qk_norm="head", qkv_bias=True), experts=ExpertsForm(selection_bias=True)),
    router=RouterKind(used=6, scores="sigmoid", normalized=False),
    model_types={
        "dots1": ModelType(
            {
                "vocab_size": 152064,
                "hidden_size": 4608,
                "intermediate_size": 10944,
                "moe_intermediate_size": 1408,
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "max_position_embeddings": 2048,
                "sliding_window": 4096,
                "max_window_layers": 62,
                "attention_bias": False,
                "first_k_dense_replace": 0,
                "norm_topk_prob": False,
            },
            layer_kinds=from_max_window_layers,
            reads_layer_types=True,
            expert_keys=DEEPSEEK,
            dense_layers=_dense_layers,
            fields=attention_biases,
        )
    },
    hf_modules=SHARED_EXPERTS,
    gguf_fields=gguf_attention_biases,
    synthetic={
        "dots1-142b": {
            "vocab_size": 152064,
            "context_length": 32768,
            "block_count": 62,
            "feed_forward_length": 10944,
            "head_count_kv": 32,
            "rope_freq_base": 1e7,
            "experts": 128,
            "experts_used": 6,
            "expert_feed_forward_length": 1408,
            "shared_feed_forward_length": 2816,
            "dense_layers": 1,
        },
        "dots1-tiny": {
            "block_count": 3,
            "experts": 16,
            "experts_used": 4,
            "expert_feed_forward_length": 256,
            "shared_feed_forward_length": 512,
            "dense_layers": 1,
        },
    },
)
