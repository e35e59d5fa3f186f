"""Seed-OSS: Llama's layers with biases of query, key and value, which a folder may leave out, and of the output."""

from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.file_traits import gguf_attention_biases
from quengine.models.blocks import AttentionForm, BlockForm, Norms
from quengine.models.config import ModelConfig
from quengine.models.hf.hf_keys import config_error, flag


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    if flag(keys, "mlp_bias"):
        raise config_error("mlp_bias", "biases on the feed-forward projections are not implemented")
    biases, of_output = flag(keys, "attention_bias"), flag(keys, "attention_out_bias")
    return {"block": config.block.with_attention(qkv_bias=biases, output_bias=of_output)}


SEED_OSS = Architecture(
    name="seed_oss",
    block=BlockForm(AttentionForm(qkv_bias=True), norms=Norms(ffn="post_attention_norm")),
    model_types={
        "seed_oss": ModelType(
            {
                "vocab_size": 155136,
                "hidden_size": 4096,
                "intermediate_size": 27648,
                "num_hidden_layers": 64,
                "num_attention_heads": 80,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 524288,
                "attention_bias": True,
                "attention_out_bias": False,
                "mlp_bias": False,
            },
            fields=_fields,
        )
    },
    gguf_fields=gguf_attention_biases,
    synthetic={
        "seed-oss-36b": {
            "vocab_size": 155136,
            "context_length": 524288,
            "embedding_length": 5120,
            "block_count": 64,
            "feed_forward_length": 27648,
            "head_count": 80,
            "head_count_kv": 8,
            "rope_freq_base": 1e7,
            "pooled": True,
        },
        "seed-oss-tiny": {},
    },
)
