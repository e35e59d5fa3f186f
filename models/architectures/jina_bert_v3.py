"""Jina Embeddings v3: XLM-RoBERTa whose positions rotate queries and keys.

The adapters for its tasks are separate files, as llama.cpp's converter writes them (models/lora/task_files.py), or lie
within the folder that jinaai publishes (models/hf/task_adapters.py); folders of `transformers` have none. Source:
Sturua et al. 2024, "jina-embeddings-v3"; `JinaEmbeddingsV3Model` in the `transformers` library; llama.cpp's converter
for the names of GGUF files.
"""

from collections.abc import Mapping
from dataclasses import replace

from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.bert import (
    CAUSAL,
    classes_of,
    encoder_layers,
    encoder_sizes,
    encoder_tensors,
    kinds_of_segments,
    layer_norm_keys,
    sizes_of,
)
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm, Norms
from quengine.models.config import EncoderSizes, ModelConfig, Pooling, Task
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error

_BASE = 20_000.0


def _fields(keys: Keys, _config: ModelConfig) -> Fields:
    headed = any("ForSequenceClassification" in str(name) for name in keys.get("architectures") or ())
    sizes = EncoderSizes(
        kinds_of_segments(keys),
        classes=classes_of(keys) if headed else 0,
        head_dense=headed,
        rotates=True,
        one_segment=True,
        tasks=_tasks(keys),
    )
    return {"encoder": sizes, "pooling": _pooling(sizes)}


def _tasks(keys: Keys) -> tuple[Task, ...]:
    """The tasks of a folder with adapters. Raises EngineError."""
    names, prefixes = keys.get("lora_adaptations") or [], keys.get("task_instructions") or {}
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config_error("lora_adaptations", f"{names!r} is not a list of names")
    if len(set(names)) < len(names):
        raise config_error("lora_adaptations", f"{names!r} has a name twice")
    if not isinstance(prefixes, Mapping) or not all(isinstance(each, str) for each in prefixes.values()):
        raise config_error("task_instructions", f"{prefixes!r} is not texts by names")
    return tuple(Task(name, prefixes.get(name, "")) for name in names)


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    sizes = encoder_sizes(file, config, rotates=True)
    return {"encoder": replace(sizes, one_segment=True), "pooling": config.pooling or _pooling(sizes)}


def _pooling(sizes: EncoderSizes) -> Pooling | None:
    return "rank" if sizes.classes else None


JINA_BERT_V3 = Architecture(
    name="jina-bert-v3",
    block=BlockForm(
        AttentionForm(qkv_bias=True, merged=True),
        feed_forward=FeedForwardForm(pointwise="gelu"),
        norms=Norms(kind="layer"),
    ),
    build=encoder_layers,
    model_types={
        "jina_embeddings_v3": ModelType(
            {
                "vocab_size": 250002,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "max_position_embeddings": 8194,
                "layer_norm_eps": 1e-5,
                "type_vocab_size": 1,
                "hidden_act": "gelu",
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": _BASE},
                "rope_theta": _BASE,
            },
            common_keys=layer_norm_keys,
            fields=_fields,
        )
    },
    rope_scalings=frozenset(),
    hf_modules={
        "attn_qkv": "mixer.Wqkv",
        "attn_output": "mixer.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
        "token_embd_norm": "emb_ln",
    },
    hf_layers="encoder.layers.",
    top_tensors=encoder_tensors,
    hf_unused=("pooler.", "lm_head."),
    size_fields=sizes_of(EncoderSizes(1, rotates=True, one_segment=True)),
    gguf_keys=(CAUSAL,),
    adapts=True,
    gguf_fields=_gguf_fields,
    synthetic={
        "jina-embeddings-v3": {
            "vocab_size": 250002,
            "context_length": 8192,
            "embedding_length": 1024,
            "block_count": 24,
            "feed_forward_length": 4096,
            "head_count": 16,
            "head_count_kv": 16,
            "head_dim": 64,
            "rope_freq_base": _BASE,
            "tied_output": True,
        },
        "jina-embeddings-tiny": {"head_count_kv": 8, "rope_freq_base": _BASE, "tied_output": True},
    },
)
