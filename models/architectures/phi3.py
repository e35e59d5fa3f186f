"""Phi-3, Phi-3.5 mini, Phi-4 and Phi-4 mini: merged tensors, rotation of a part of each head, LongRoPE.

LongRoPE has one set of frequency factors for sequences of up to `original_max_position_embeddings` tokens, and one for
longer ones. `transformers` chooses by the sequence, and computes its cache anew when a sequence outgrows the first set.
llama.cpp chooses by the context that a run is given; so does `Rotation.spec`, because cached keys are rotated
already. The attention factor applies to both sets. All layers have the window of config.json, as in `transformers`;
llama.cpp ignores it.
"""

from collections.abc import Mapping

from quengine.models.architectures.architecture import Architecture, Keys, ModelType, sliding_attention
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm


def _common_keys(keys: Keys) -> Keys:
    """Older folders call LongRoPE "su" or "yarn"."""
    changed = dict(keys)
    for key in ("rope_scaling", "rope_parameters"):
        given = keys.get(key)
        if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) in ("su", "yarn"):
            changed[key] = {**given, "rope_type": "longrope"}
    return changed


PHI3 = Architecture(
    name="phi3",
    block=BlockForm(AttentionForm(merged=True), feed_forward=FeedForwardForm(merged_gate=True)),
    rope_scalings=frozenset({"longrope"}),
    vocabulary="spm",
    model_types={
        "phi3": ModelType(
            {
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
            layer_kinds=sliding_attention,
            reads_partial_rotary_factor=True,
            common_keys=_common_keys,
        )
    },
    synthetic={
        "phi3-mini": {
            "vocab_size": 32064,
            "context_length": 4096,
            "embedding_length": 3072,
            "feed_forward_length": 8192,
            "head_count_kv": 32,
            "head_dim": 96,
            "rope_freq_base": 1e4,
            "sliding_window": 2047,
        },
        "phi3-tiny": {"sliding_window": 64},
    },
)
