"""The metadata of a converted file: keys and values as llama.cpp's converter writes them.

General keys (name, sizes, licence, from the folder's name and model card), special tokens, merges and the chat template
are read by the `gguf` package, which that converter uses for them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quengine.errors import EngineError
from quengine.models.config import ModelConfig
from quengine.models.convert.tensors import FileTensor
from quengine.models.convert.vocabulary import add_vocabulary
from quengine.models.gguf.cursor import SCALAR_TYPES
from quengine.models.gguf.writer import Field
from quengine.models.hf.hf_headers import read_config

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""`general.file_type` (llama.h, llama_ftype)."""

_TYPE_NAMES = {name.upper(): name for name in (kind.name for kind in SCALAR_TYPES.values())} | {
    "STRING": "string"
}
"""Type of the `gguf` package -> type of `Field`."""

Writer = Any
"""A `gguf.GGUFWriter` without a file, which collects keys."""
Keys = Mapping[str, Any]


def file_fields(folder: Path, config: ModelConfig, tensors: list[FileTensor], kind: str) -> dict[str, Field]:
    """Every metadata entry of the file.

    Raises:
        EngineError: the architecture's keys are not known here, or the tokenizer is of a kind that is not converted.
    """
    import gguf

    writer = gguf.GGUFWriter(None, config.architecture)
    writer.add_type("model")
    _add_general(writer, folder, tensors)
    keys = read_config(folder)
    _add_sizes(writer, config, keys)
    writer.add_file_type(FILE_TYPES[kind])
    _own_keys(config)(writer, config, keys)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, folder, config)
    return {key: _field(value) for key, value in writer.kv_data[0].items()}


def check_converted(config: ModelConfig) -> None:
    """Raises EngineError for a model whose file's metadata are not known here."""
    _own_keys(config)
    if config.pooling is not None:
        raise EngineError(f"{config.name}: a folder of sentence-transformers is not converted yet")


def _add_general(writer: Writer, folder: Path, tensors: list[FileTensor]) -> None:
    import gguf
    import numpy as np

    for tensor in tensors:
        info, kind = tensor.info, np.dtype(np.float32)
        writer.add_tensor_info(info.name, info.shape, kind, info.nbytes, gguf.GGMLQuantizationType.F32)
    total, shared, expert, experts = writer.get_total_parameter_count()
    metadata = gguf.Metadata.load(None, folder, None, total)
    metadata.name = metadata.name or folder.resolve().name
    if metadata.size_label is None and total > 0:
        metadata.size_label = gguf.size_label(total, shared, expert, experts)
    metadata.set_gguf_meta_model(writer)


def _add_sizes(writer: Writer, config: ModelConfig, keys: Keys) -> None:
    """What files of all architectures here have."""
    writer.add_block_count(config.block_count)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.embedding_length)
    writer.add_feed_forward_length(config.feed_forward_length)
    writer.add_head_count(config.head_count)
    writer.add_head_count_kv(config.head_count_kv)
    _add_rope(writer, config, keys)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    if config.experts is not None:
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.router.used)


def _add_rope(writer: Writer, config: ModelConfig, keys: Keys) -> None:
    import gguf

    given: Keys = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    given = given.get("full_attention", given)
    kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
    if (kind := kinds.get(config.rope_scaling.kind)) is not None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    if config.rope_scaling.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_context_length)
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if given.get(key) is not None:
                add(given[key])
    writer.add_rope_freq_base(config.rope_freq_base)


def _add_head_size(writer: Writer, config: ModelConfig) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def _plain(writer: Writer, config: ModelConfig, keys: Keys) -> None:
    if keys.get("head_dim") is not None or config.architecture in ("qwen3", "seed_oss"):
        _add_head_size(writer, config)


def _llama(writer: Writer, config: ModelConfig, keys: Keys) -> None:
    # The classes of these two give a head size where config.json has none.
    if keys["model_type"] in ("llama", "mistral") or keys.get("head_dim") is not None:
        _add_head_size(writer, config)
    _add_llama_sizes(writer, config)


def _add_llama_sizes(writer: Writer, config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)


def _granite(writer: Writer, config: ModelConfig, keys: Keys) -> None:
    _add_llama_sizes(writer, config)
    for key, add in (
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        add(keys.get(key, 1.0))
    if config.experts is not None and config.experts.shared_feed_forward_length:
        writer.add_expert_shared_feed_forward_length(config.experts.shared_feed_forward_length)


def _qwen_moe(writer: Writer, config: ModelConfig, keys: Keys) -> None:
    _plain(writer, config, keys)
    assert config.experts is not None
    writer.add_expert_feed_forward_length(config.experts.feed_forward_length)
    if config.architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.experts.shared_feed_forward_length)


def _olmo2(writer: Writer, config: ModelConfig, keys: Keys) -> None:
    _plain(writer, config, keys)
    if config.sliding_window is not None:
        writer.add_rope_freq_base_swa(config.rope_freq_base_swa or config.rope_freq_base)
        writer.add_sliding_window(config.sliding_window)
        full = config.full_attention_layers
        writer.add_sliding_window_pattern([layer not in full for layer in range(config.block_count)])


_OWN_KEYS: Mapping[str, Callable[[Writer, ModelConfig, Keys], None]] = {
    "llama": _llama,
    "qwen2": _plain,
    "qwen3": _plain,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "olmo2": _olmo2,
    "olmoe": _plain,
    "seed_oss": _plain,
    "smollm3": _llama,
    "granite": _granite,
    "granitemoe": _granite,
}
"""What files have beside the keys of all; the architectures that are converted."""


def _own_keys(config: ModelConfig) -> Callable[[Writer, ModelConfig, Keys], None]:
    found = _OWN_KEYS.get(config.architecture)
    if found is None:
        raise EngineError(
            f"architecture {config.architecture} is not converted yet; {', '.join(_OWN_KEYS)} are: "
            "use llama.cpp's convert_hf_to_gguf.py, or run the folder as it is"
        )
    return found


def _field(value: Any) -> Field:
    if value.type.name != "ARRAY":
        return Field(_TYPE_NAMES[value.type.name], value.value)
    return Field(f"array of {_element_type(value)}", value.value)


def _element_type(value: Any) -> str:
    from gguf import GGUFValueType

    element = value.sub_type or GGUFValueType.get_type(value.value[0])
    return _TYPE_NAMES[element.name]
