"""OLMo 2 and 3: norms after attention and feed-forward only, and norms of whole query and key rows.

OLMo 3, which goes by OLMo 2's name in GGUF, has a window in three of four layers, whose rotation no scaling applies to.
"""

from collections.abc import Sequence

from quengine.models.architectures.architecture import Architecture, Fields, Keys, LayerKind, ModelType
from quengine.models.architectures.windows import (
    LOCAL_BASE,
    PATTERN,
    full_layers,
    gguf_fields,
    rope_of_kinds,
)
from quengine.models.blocks import AttentionForm, BlockForm, Norms
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import number

_PERIOD = 4
_BASE = 5e5


def _layer_kinds(_keys: Keys, blocks: int) -> Sequence[LayerKind]:
    full = full_layers(blocks, _PERIOD)
    return ["full_attention" if i in full else "sliding_attention" for i in range(blocks)]


def _common_keys(keys: Keys) -> Keys:
    base = keys.get("rope_theta", _BASE)
    return rope_of_kinds(keys, base, base)


def _fields(keys: Keys, _config: ModelConfig) -> Fields:
    return {"rope_freq_base_swa": number(keys, "rope_local_base_freq", _BASE)}


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    return gguf_fields(file, config, _PERIOD, config.rope_freq_base)


OLMO2 = Architecture(
    name="olmo2",
    block=BlockForm(AttentionForm(qk_norm="row"), norms=Norms(placement="post")),
    model_types={
        "olmo2": ModelType({"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
        "olmo3": ModelType(
            {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
            layer_kinds=_layer_kinds,
            reads_layer_types=True,
            common_keys=_common_keys,
            fields=_fields,
        ),
    },
    gguf_keys=(PATTERN, LOCAL_BASE),
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
