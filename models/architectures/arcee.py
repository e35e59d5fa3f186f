"""Arcee's AFM: Llama's layers with a feed-forward without a gate, whose activation is the square of ReLU.

Source: `ArceeModel` in the `transformers` library.
"""

from quengine.models.architectures.architecture import Architecture, ModelType
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm

ARCEE = Architecture(
    name="arcee",
    block=BlockForm(AttentionForm(rope_layout="pairs"), feed_forward=FeedForwardForm(pointwise="relu2")),
    model_types={
        "arcee": ModelType(
            {
                "vocab_size": 32000,
                "hidden_size": 2560,
                "intermediate_size": 18432,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "hidden_act": "relu2",
            }
        )
    },
    synthetic={
        "arcee-4.5b": {
            "vocab_size": 128005,
            "context_length": 65536,
            "embedding_length": 2560,
            "block_count": 36,
            "feed_forward_length": 18432,
            "head_count": 20,
            "head_count_kv": 4,
            "rope_freq_base": 1e4,
        },
        "arcee-tiny": {},
    },
)
