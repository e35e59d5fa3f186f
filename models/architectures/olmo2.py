"""OLMo 2: norms behind attention and feed-forward only, and norms of whole query and key rows."""

from quengine.models.architectures.architecture import Architecture, Fields, ModelType
from quengine.models.config import BlockKind, ModelConfig
from quengine.models.gguf import GGUFFile


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    """OLMo 3 goes by the same name there, and is told by its windows."""
    if config.sliding_window is not None:
        problem = f"{config.sliding_window}: windowed layers (OLMo 3) are not implemented"
        raise file.error("olmo2.attention.sliding_window", problem)
    return {}


OLMO2 = Architecture(
    name="olmo2",
    block=BlockKind(norms="post", qk_norm="row"),
    model_types={"olmo2": ModelType({"max_position_embeddings": 2048, "rms_norm_eps": 1e-5})},
    hf_modules={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    gguf_fields=_gguf_fields,
    synthetic={
        "olmo2-7b": {
            "vocab_size": 100352,
            "context_length": 4096,
            "feed_forward_length": 11008,
            "head_count_kv": 32,
            "rope_freq_base": 5e5,
        },
        "olmo2-tiny": {},
    },
)
