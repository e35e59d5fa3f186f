"""The architectures that the decoder computes, one declaration each. docs/adding.md says how to add one."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from quengine.errors import EngineError
from quengine.models.architectures.arcee import ARCEE
from quengine.models.architectures.architecture import Architecture, ModelType
from quengine.models.architectures.bailingmoe2 import BAILINGMOE2
from quengine.models.architectures.bert import BERT
from quengine.models.architectures.cohere2 import COHERE2
from quengine.models.architectures.deepseek import DEEPSEEK2, MISTRAL4
from quengine.models.architectures.dots1 import DOTS1
from quengine.models.architectures.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from quengine.models.architectures.exaone4 import EXAONE4
from quengine.models.architectures.gemma2 import GEMMA2
from quengine.models.architectures.gemma3 import GEMMA3
from quengine.models.architectures.gemma3n import GEMMA3N
from quengine.models.architectures.gemma4 import GEMMA4
from quengine.models.architectures.gemma4_assistant import GEMMA4_ASSISTANT
from quengine.models.architectures.gemma_embedding import GEMMA_EMBEDDING
from quengine.models.architectures.glm4 import GLM4
from quengine.models.architectures.glm4moe import GLM4MOE
from quengine.models.architectures.gpt_oss import GPT_OSS
from quengine.models.architectures.granite import GRANITE, GRANITEMOE
from quengine.models.architectures.granite_hybrid import GRANITEHYBRID
from quengine.models.architectures.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE
from quengine.models.architectures.jina_bert_v3 import JINA_BERT_V3
from quengine.models.architectures.lfm2 import LFM2, LFM2MOE
from quengine.models.architectures.llama import LLAMA, MISTRAL3
from quengine.models.architectures.llama4 import LLAMA4
from quengine.models.architectures.minimax_m2 import MINIMAX_M2
from quengine.models.architectures.modern_bert import MODERN_BERT
from quengine.models.architectures.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from quengine.models.architectures.nomic_bert import NOMIC_BERT
from quengine.models.architectures.olmo2 import OLMO2
from quengine.models.architectures.olmoe import OLMOE
from quengine.models.architectures.openelm import OPENELM
from quengine.models.architectures.phi3 import PHI3
from quengine.models.architectures.qwen import QWEN2, QWEN3
from quengine.models.architectures.qwen3_next import QWEN3NEXT, QWEN35, QWEN35MOE
from quengine.models.architectures.qwen_moe import QWEN2MOE, QWEN3MOE
from quengine.models.architectures.qwen_vl import QWEN2VL, QWEN3VL, QWEN3VLMOE
from quengine.models.architectures.seed_oss import SEED_OSS
from quengine.models.architectures.smollm3 import SMOLLM3
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.block import Block
from quengine.models.blocks.latent_attention import LatentAttention
from quengine.models.config import ModelConfig

ARCHITECTURES: Mapping[str, Architecture] = {
    a.name: a
    for a in (
        *(LLAMA, MISTRAL3, QWEN2, QWEN3, OLMO2, GEMMA3, PHI3, GRANITE, LFM2),
        *(SMOLLM3, EXAONE4, SEED_OSS, GLM4, ERNIE4_5, QWEN2VL, QWEN3VL, HUNYUAN_DENSE, QWEN35),
        *(OPENELM, GEMMA2, GEMMA3N, GEMMA4, ARCEE, COHERE2, NEMOTRON_H),
        *(QWEN2MOE, QWEN3MOE, OLMOE, GLM4MOE, GRANITEMOE, GPT_OSS, LFM2MOE),
        *(ERNIE4_5_MOE, DOTS1, BAILINGMOE2, MINIMAX_M2, QWEN3VLMOE, HUNYUAN_MOE, QWEN3NEXT, QWEN35MOE),
        *(LLAMA4, DEEPSEEK2, MISTRAL4, GRANITEHYBRID, NEMOTRON_H_MOE, BERT, NOMIC_BERT),
        *(MODERN_BERT, GEMMA_EMBEDDING, JINA_BERT_V3),
    )
}
"""By the name that GGUF has for them."""

DECLARED: Mapping[str, Architecture] = {**ARCHITECTURES, GEMMA4_ASSISTANT.name: GEMMA4_ASSISTANT}
"""ARCHITECTURES, and those that only draft tokens for another model."""

MODEL_TYPES: Mapping[str, tuple[Architecture, ModelType]] = {
    name: (architecture, model_type)
    for architecture in DECLARED.values()
    for name, model_type in architecture.model_types.items()
}
"""By the `model_type` of a Hugging Face config.json."""

BIDIRECTIONAL_TYPES: Mapping[str, tuple[Architecture, ModelType]] = {
    name: (architecture, model_type)
    for architecture in ARCHITECTURES.values()
    for name, model_type in architecture.bidirectional_types.items()
}
"""As MODEL_TYPES, for a config.json with `use_bidirectional_attention`."""


@lru_cache(32)
def layers_of(config: ModelConfig) -> Sequence[Block]:
    """The layers of a model, in order. A rank's config gives that rank's parts (tensor_split.py)."""
    return tuple(DECLARED[config.architecture].build(config))


def attentions_of(config: ModelConfig) -> Sequence[Attention | LatentAttention]:
    """The attentions of a model, in the order of its layers."""
    kinds = (Attention, LatentAttention)
    return [block.mixer for block in layers_of(config) if isinstance(block.mixer, kinds)]


def unsupported_architecture(name: str, why: str = "is not supported") -> EngineError:
    """The error for a model that this engine has no decoder for."""
    return EngineError(f"architecture {name!r} {why}; supported are {', '.join(ARCHITECTURES)}")
