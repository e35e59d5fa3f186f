"""The metadata of a converted file: keys and values as llama.cpp's converter writes them.

General keys (name, sizes, licence, from the folder's name and model card), special tokens, merges and the chat template
are read by the `gguf` package, which that converter uses for them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quengine.errors import EngineError
from quengine.models.config import ModelConfig, Task
from quengine.models.convert.convert_eagle import DraftFile
from quengine.models.convert.convert_projector import ProjectorFile
from quengine.models.convert.encoder_keys import ENCODER_PARTS
from quengine.models.convert.encoder_vocabulary import add_encoder_vocabulary
from quengine.models.convert.keys import LLAMA_PARTS, PARTS, Keys, Part, Source, Writer, eagle
from quengine.models.convert.tensors import FileTensor
from quengine.models.convert.vocabulary import add_vocabulary
from quengine.models.gguf.cursor import SCALAR_TYPES
from quengine.models.gguf.writer import Field
from quengine.models.hf.config_hf import text_keys
from quengine.models.hf.hf_headers import read_config

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32, "MXFP4": 38}
"""`general.file_type` (llama.h, llama_ftype); a file whose experts are MXFP4 is of that type, whatever the rest is."""

SENTENCEPIECE = ("gemma-embedding",)
"""Encoders whose tokenizers are those of decoders."""

_TYPE_NAMES = {name.upper(): name for name in (kind.name for kind in SCALAR_TYPES.values())} | {
    "STRING": "string"
}
"""Type of the `gguf` package -> type of `Field`."""


def file_fields(folder: Path, config: ModelConfig, tensors: list[FileTensor], kind: str) -> dict[str, Field]:
    """Every metadata entry of the file.

    Raises:
        EngineError: the architecture's keys are not known here, or the tokenizer is of a kind that is not converted.
    """
    import gguf

    writer = gguf.GGUFWriter(None, config.architecture)
    writer.add_type("model")
    _add_general(writer, folder, tensors)
    keys = text_keys(read_config(folder))
    _add_sizes(writer, config, keys)
    packed = any(tensor.info.type_name == "MXFP4" for tensor in tensors)
    writer.add_file_type(FILE_TYPES["MXFP4" if packed else kind])
    for part in _parts(config):
        part(Source(writer, config, keys))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if config.encoder is None or config.architecture in SENTENCEPIECE:
        add_vocabulary(writer, folder, config)
    else:
        add_encoder_vocabulary(writer, folder, config)
    return {key: _field(value) for key, value in writer.kv_data[0].items()}


def eagle_fields(folder: Path, draft: DraftFile, kind: str) -> dict[str, Field]:
    """Every metadata entry of the file of an EAGLE-3 draft model, whose tokenizer is that of its target."""
    import gguf

    writer = gguf.GGUFWriter(None, draft.config.architecture)
    writer.add_type("model")
    _add_general(writer, folder, draft.tensors)
    _add_sizes(writer, draft.config, draft.keys)
    writer.add_file_type(FILE_TYPES[kind])
    for part in (*LLAMA_PARTS, eagle):
        part(Source(writer, draft.config, draft.keys))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, draft.target, replace(draft.config, architecture="llama"))
    return {key: _field(value) for key, value in writer.kv_data[0].items()}


def adapter_fields(
    folder: Path, config: ModelConfig, tensors: list[FileTensor], alpha: float
) -> dict[str, Field]:
    """Every metadata entry of the file of a LoRA adapter in `folder`. config: of the model that it changes."""
    import gguf

    writer = _of_adapter(config, alpha)
    _add_general(writer, folder, tensors)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return {key: _field(value) for key, value in writer.kv_data[0].items()}


def task_fields(config: ModelConfig, task: Task, alpha: float) -> dict[str, Field]:
    """Every metadata entry of the file of an encoder's task."""
    writer = _of_adapter(config, alpha)
    writer.add_string("adapter.lora.task_name", task.name)
    if config.encoder is not None and any(each.prefix for each in config.encoder.tasks):
        writer.add_string("adapter.lora.prompt_prefix", task.prefix)
    return {key: _field(value) for key, value in writer.kv_data[0].items()}


def projector_fields(folder: Path, projector: ProjectorFile, kind: str) -> dict[str, Field]:
    """Every metadata entry of the file of a folder's vision part."""
    import gguf

    writer = gguf.GGUFWriter(None, "clip")
    writer.add_type("mmproj")
    _add_general(writer, folder, projector.tensors)
    writer.add_file_type(FILE_TYPES[kind])
    projector.add_keys(writer)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return {key: _field(value) for key, value in writer.kv_data[0].items()}


def _of_adapter(config: ModelConfig, alpha: float) -> Writer:
    import gguf

    writer = gguf.GGUFWriter(None, config.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    return writer


def check_converted(config: ModelConfig) -> None:
    """Raises EngineError for a model whose file's metadata are not known here."""
    _parts(config)
    if config.ranker is not None and not config.ranker.tokens:
        raise EngineError(
            f"{config.name}: a classifier of architecture {config.architecture} is not converted: no GGUF file has "
            "such a head; its folder runs as it is"
        )
    if config.pooling is not None and config.architecture not in ENCODER_PARTS:
        raise EngineError(
            f"{config.name}: a folder of sentence-transformers of architecture {config.architecture} is not converted"
        )


def _add_general(writer: Writer, folder: Path, tensors: list[FileTensor]) -> None:
    import gguf

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
    """The keys that files of all architectures have."""
    writer.add_block_count(config.block_count + config.draft_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.embedding_length)
    writer.add_feed_forward_length(config.feed_forward_length)
    writer.add_head_count(config.head_count)
    writer.add_head_count_kv(config.head_count_kv)
    _add_rope(writer, config, keys)
    eps = keys.get("rms_norm_eps")
    writer.add_layer_norm_rms_eps(config.rms_eps if eps is None else eps)
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


def _parts(config: ModelConfig) -> Sequence[Part]:
    every = {**PARTS, **ENCODER_PARTS}
    found = every.get(config.architecture)
    if found is None:
        raise EngineError(
            f"architecture {config.architecture} is not converted yet; {', '.join(every)} are: "
            "use llama.cpp's convert_hf_to_gguf.py, or run the folder as it is"
        )
    return found


def _field(value: Any) -> Field:
    if value.type.name != "ARRAY":
        return Field(_TYPE_NAMES[value.type.name], value.value)
    if isinstance(value.value, bytes):
        return Field("array of uint8", np.frombuffer(value.value, np.uint8))
    return Field(f"array of {_element_type(value)}", value.value)


def _element_type(value: Any) -> str:
    from gguf import GGUFValueType

    element = value.sub_type or GGUFValueType.get_type(value.value[0])
    return _TYPE_NAMES[element.name]
