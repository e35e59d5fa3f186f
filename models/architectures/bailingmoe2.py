"""Ling 2.0 and Ring 2.0: experts chosen by groups, sigmoid scores and a bias per expert; half of each head rotated.

Each query and key head has a norm. The first layers are dense, the others have a shared expert. Layers at a file's
end that only draft tokens are ignored. Folders are not read: their model comes with code of its own.
"""

from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture
from quengine.models.architectures.file_traits import DRAFTS, without_drafts
from quengine.models.blocks import AttentionForm, BlockForm, ExpertsForm

BAILINGMOE2 = Architecture(
    name="bailingmoe2",
    block=BlockForm(AttentionForm(qk_norm="head", merged=True), experts=ExpertsForm(selection_bias=True)),
    router=RouterKind(used=8, scores="sigmoid", normalized=False),
    model_types={},
    gguf_keys=(DRAFTS,),
    gguf_fields=without_drafts,
    synthetic={
        "ling-mini-2.0": {
            "vocab_size": 157184,
            "embedding_length": 2048,
            "block_count": 20,
            "feed_forward_length": 5120,
            "head_count": 16,
            "head_count_kv": 4,
            "rope_dim": 64,
            "rope_freq_base": 6e5,
            "experts": 256,
            "experts_used": 8,
            "expert_feed_forward_length": 512,
            "shared_feed_forward_length": 512,
            "dense_layers": 1,
        },
        "bailingmoe2-tiny": {
            "block_count": 3,
            "rope_dim": 32,
            "experts": 16,
            "experts_used": 4,
            "expert_feed_forward_length": 256,
            "shared_feed_forward_length": 256,
            "dense_layers": 1,
        },
    },
)
