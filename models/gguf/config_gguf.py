"""Reads a ModelConfig from GGUF metadata.

Key names and defaults follow the GGUF specification, and llama.cpp where that is silent. Keys that change
the computation in a way the decoder lacks are refused, never ignored.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from quengine.errors import EngineError
from quengine.models.architectures import DECLARED, unsupported_architecture
from quengine.models.architectures.architecture import Architecture
from quengine.models.config import LIMITS, LayerSizes, ModelConfig, Pooling
from quengine.models.gguf import GGUFError, GGUFFile
from quengine.models.gguf.config_experts import EXPERT_KEYS, read_experts
from quengine.models.gguf.layer_values import ints_of_layers, uniform_int
from quengine.models.gguf.vocab_checks import TOKENS, check_chat_templates
from quengine.models.rotation import RopeScaling, RopeScalingKind, yarn_attention_factor

log = logging.getLogger(__name__)

# ModelConfig field -> the key, after the architecture's prefix, that an error about it names.
KEYS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "context_length": "context_length",
    "embedding_length": "embedding_length",
    "block_count": "block_count",
    "feed_forward_length": "feed_forward_length",
    "head_count": "attention.head_count",
    "head_count_kv": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_dim": "rope.dimension_count",
    "rope_freq_base": "rope.freq_base",
    "rope_freq_base_swa": "rope.freq_base_swa",
    "rope_dim_swa": "rope.dimension_count_swa",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "rms_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "rope_scaling.factor": "rope.scaling.factor",
    "rope_scaling.attention_factor": "rope.scaling.attn_factor",
    "rope_scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope_scaling.original_context_length": "rope.scaling.original_context_length",
    "attention_scale": "attention.scale",
    "embedding_scale": "embedding_scale",
    "logit_scale": "logit_scale",
    "attention_temperature_scale": "attention.temperature_scale",
    "attention_temperature_length": "rope.scaling.original_context_length",
    "gated_delta.key_heads": "ssm.group_count",
    "gated_delta.value_heads": "ssm.time_step_rank",
    "gated_delta.head_dim": "ssm.state_size",
    "gated_delta.taps": "ssm.conv_kernel",
    "latent.query_rank": "attention.q_lora_rank",
    "latent.rank": "attention.kv_lora_rank",
    "latent.plain": "attention.key_length_mla",
    "latent.values": "attention.value_length_mla",
    "mamba2.heads": "ssm.time_step_rank",
    "mamba2.head_dim": "ssm.inner_size",
    "mamba2.groups": "ssm.group_count",
    "mamba2.state_dim": "ssm.state_size",
    "mamba2.taps": "ssm.conv_kernel",
    "shared_kv_layers": "attention.shared_kv_layers",
    "layer_input.length": "embedding_length_per_layer_input",
    "altup.streams": "altup.num_inputs",
    "altup.cutoffs": "activation_sparsity_scale",
    **EXPERT_KEYS,
}
LAYER_NORM_EPS = "attention.layer_norm_epsilon"
ROPE_FREQS, ROPE_SHORT, ROPE_LONG = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
_QKV_BIASES = frozenset({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"})
_POOLINGS: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
_GGUF_SCALINGS = frozenset({"linear", "yarn", "longrope"})  # llama3 has no name, but a tensor

# Keys that stand for a computation that the decoder lacks, unless they have the neutral value.
_NEUTRAL: dict[str, float | bool] = {
    "attention.scale": 0.0,
    "attention.output_scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "use_parallel_residual": False,
}
_NEUTRAL_OF_YARN: dict[str, float | bool] = {"rope.scaling.yarn_ext_factor": 1.0}
_REFUSED = (
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
    "rope.dimension_sections",
    "attention.kv_lora_rank",
)


_PROJECTOR = "the vision or audio part of a model; give the model's own GGUF file, which runs without it"
_OTHER_FILES: Mapping[str, str] = {
    "adapter": "a LoRA adapter, not a model: run its model with --lora FILE, or engine merge them",
    "mmproj": _PROJECTOR,
    "clip": _PROJECTOR,
    "eagle3": "an EAGLE-3 draft model; give it beside the model that it drafts for, with --draft-model",
    "imatrix": "an importance matrix, from which a model was quantized; give the model's own GGUF file",
    "controlvector": "a control vector, not a model; control vectors are not supported",
}
"""What GGUF files are that hold no language model, by their `general.type`, or else by their architecture."""


def read_gguf_config(file: GGUFFile, given: Architecture | None = None) -> ModelConfig:
    """The configuration in a GGUF file's metadata; needs no tensor data beyond `rope_freqs.weight`.

    given: the architecture, for a draft model whose architecture is not in `DECLARED` (EAGLE-3).

    Raises:
        GGUFError: a value is missing, of the wrong type, out of range or at odds with another.
        EngineError: an architecture, or a trait of one, that the decoder does not implement.
    """
    kind = file.metadata.get("general.type")
    if isinstance(kind, str) and kind in _OTHER_FILES:
        raise EngineError(f"{file.path}: {_OTHER_FILES[kind]}")
    named = file.require_str("general.architecture")
    declared = given or DECLARED.get(named)
    if declared is None:
        what = _OTHER_FILES.get(named)
        raise unsupported_architecture(named, f"is {what}" if what else "is not supported")
    architecture = declared.name
    _refuse_unimplemented(file, declared)
    check_chat_templates(file)
    blocks = _uniform_int(file, architecture, "block_count")
    (heads, heads_kv, feed_forward, _), of_layers = _sizes(file, declared, blocks)
    embedding = _uniform_int(file, architecture, "embedding_length")
    context = _uniform_int(file, architecture, "context_length")
    head_dim = _head_dim(file, declared, embedding, heads, bool(of_layers))
    temperature = file.get_float(f"{architecture}.attention.temperature_scale") or 0.0
    scaling = _rope_scaling(file, declared, context, bool(temperature))
    window = file.get_int(f"{architecture}.attention.sliding_window")
    block = declared.block
    config = ModelConfig(
        architecture=architecture,
        name=_name(file, architecture),
        block=block.with_attention(
            qkv_bias=block.attention.qkv_bias or not _QKV_BIASES.isdisjoint(file.tensors)
        ),
        vocab_size=_vocab_size(file, architecture),
        context_length=context,
        embedding_length=embedding,
        block_count=blocks,
        feed_forward_length=feed_forward,
        head_count=heads,
        head_count_kv=heads_kv,
        head_dim=head_dim,
        rope_dim=_uniform_int(file, architecture, "rope_dim", default=head_dim),
        rope_freq_base=_float(file, f"{architecture}.rope.freq_base", 10000.0),
        rope_scaling=scaling,
        rms_eps=_norm_eps(file, declared),
        # Converters write 0 for "no window". A window is applied in every architecture, as `transformers` does with the
        # folders that such files are made of (Mistral 7B v0.1, Phi-3); llama.cpp passes it over in most.
        sliding_window=window or None,
        tied_output="token_embd.weight" in file.tensors and "output.weight" not in file.tensors,
        attention_temperature_scale=temperature,
        attention_temperature_length=scaling.original_context_length if temperature else 0,
        experts=read_experts(file, declared, feed_forward, blocks),
        pooling=_POOLINGS.get(file.get_int(f"{architecture}.pooling_type") or 0),
        layer_sizes=of_layers,
    )
    config = replace(config, **declared.size_fields(config))
    config = replace(config, **declared.gguf_fields(file, config))
    _refuse_sizes_of_windows(file, config)
    for field, problem in config.problems():
        raise _field_error(file, config, field, problem)
    return config


def _name(file: GGUFFile, architecture: str) -> str:
    """The name that the file gives itself. Nothing is computed with it, so any value but a name is ignored."""
    name = file.metadata.get("general.name")
    if name is not None and not isinstance(name, str):
        log.info("%s: general.name is not a string: passed over", file.path)
    return name if isinstance(name, str) and name else architecture


def _field_error(file: GGUFFile, config: ModelConfig, field: str, problem: str) -> GGUFError:
    if field == "rope_scaling.freq_factors":
        return file.tensor_error(
            ROPE_SHORT if config.rope_scaling.kind == "longrope" else ROPE_FREQS, problem
        )
    if field == "rope_scaling.long_freq_factors":
        return file.tensor_error(ROPE_LONG, problem)
    if field == "vocab_size" and TOKENS in file.metadata:
        return file.error(TOKENS, problem)
    return file.error(f"{config.architecture}.{KEYS[field]}", problem)


def _refuse_unimplemented(file: GGUFFile, declared: Architecture) -> None:
    architecture = declared.name
    if declared.router is None and file.get_int(f"{architecture}.expert_count"):
        experts = file.get_int(f"{architecture}.expert_count")
        why = f"with {experts} experts (a mixture of experts) is not supported"
        raise unsupported_architecture(architecture, why)
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type")
    yarn = isinstance(scaling, str) and scaling == "yarn"
    for suffix, neutral in (_NEUTRAL | _NEUTRAL_OF_YARN if yarn else _NEUTRAL).items():
        key = f"{architecture}.{suffix}"
        value = None if suffix in declared.gguf_keys else file.metadata.get(key)
        if value is not None and (not isinstance(value, int | float) or value != neutral):
            shown = value if isinstance(value, int | float) else f"a {file.entries[key].type_name}"
            raise file.error(key, f"{shown}: the decoder does not implement this, only {neutral}")
    for suffix in set(_REFUSED) - set(declared.gguf_keys):
        key = f"{architecture}.{suffix}"
        if key in file.metadata:
            raise file.error(key, "the decoder does not implement what this key asks for")


def _refuse_sizes_of_windows(file: GGUFFile, config: ModelConfig) -> None:
    """Refuses sizes of heads in layers with a window that differ from the configuration's.

    Released files have none but Gemma 4's, whose declaration reads them; llama.cpp would rotate or cut heads by them.
    """
    if config.sliding_window is None:
        return
    windows = enumerate(config.layer_windows)
    size = next((config.head_size(layer) for layer, window in windows if window), config.head_dim)
    sizes = {"rope.dimension_count_swa": config.rope_dim_swa or config.rope_dim}
    sizes |= dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), size)
    for suffix, size in sizes.items():
        key = f"{config.architecture}.{suffix}"
        if file.get_int(key) not in (None, size):
            problem = f"{file.get_int(key)}: heads of layers with a window have {size} elements here"
            raise file.error(key, problem)


def _sizes(file: GGUFFile, declared: Architecture, blocks: int) -> tuple[LayerSizes, tuple[LayerSizes, ...]]:
    """The largest sizes, and those of each layer where they differ."""
    if declared.sizes_by_layer:
        heads = _ints_of_layers(file, declared, "head_count", blocks)
        kv_heads = _ints_of_layers(file, declared, "head_count_kv", blocks, heads)
        lengths = _ints_of_layers(file, declared, "feed_forward_length", blocks)
        layers = tuple(map(LayerSizes, heads, kv_heads, lengths))
        largest = LayerSizes(max(heads), max(kv_heads), max(lengths))
        return largest, layers if len(set(layers)) > 1 else ()
    head_count, zeros = _uniform_int(file, declared.name, "head_count"), declared.has_recurrent_layers
    kv = _uniform_int(file, declared.name, "head_count_kv", default=head_count, but_zeros=zeros)
    return LayerSizes(head_count, kv, _feed_forward_length(file, declared)), ()


def _ints_of_layers(
    file: GGUFFile, declared: Architecture, field: str, blocks: int, default: Sequence[int] = ()
) -> Sequence[int]:
    return ints_of_layers(file, f"{declared.name}.{KEYS[field]}", *LIMITS[field], blocks, default)


def _uniform_int(
    file: GGUFFile, architecture: str, field: str, default: int | None = None, but_zeros: bool = False
) -> int:
    key = f"{architecture}.{KEYS[field]}"
    return uniform_int(file, key, *LIMITS[field], default=default, but_zeros=but_zeros)


def _feed_forward_length(file: GGUFFile, declared: Architecture) -> int:
    """The feed-forward length; if all layers have experts, a file may have only the experts' length."""
    only = None if declared.may_be_dense else file.get_int(f"{declared.name}.expert_feed_forward_length")
    zeros = declared.has_lone_parts
    return _uniform_int(file, declared.name, "feed_forward_length", default=only, but_zeros=zeros)


def _float(file: GGUFFile, key: str, default: float) -> float:
    value = file.get_float(key)
    return default if value is None else value


def _norm_eps(file: GGUFFile, declared: Architecture) -> float:
    """The epsilon of the norms; if it is absent, the key of the other kind of norm is read if `gguf_keys` has it."""
    names = (KEYS["rms_eps"], LAYER_NORM_EPS)
    own, other = names if declared.block.norms.kind == "rms" else names[::-1]
    key = f"{declared.name}.{own}"
    value = file.get_float(key)
    if value is None and other in declared.gguf_keys:
        value = file.get_float(f"{declared.name}.{other}")
    if value is None:
        raise file.error(key, "missing from the metadata")
    return value


def _vocab_size(file: GGUFFile, architecture: str) -> int:
    """The tokenizer's size, if the file has a tokenizer. The tensors are checked against it elsewhere."""
    tokens = file.get_strings(TOKENS)
    return _uniform_int(file, architecture, "vocab_size") if tokens is None else len(tokens)


def _head_dim(file: GGUFFile, declared: Architecture, embedding: int, heads: int, differ: bool) -> int:
    """Elements of a head. `differ`: the number of heads differs between layers, so it does not give their size."""
    architecture = declared.name
    key_length = file.get_int(f"{architecture}.attention.key_length", *LIMITS["head_dim"])
    value_key = f"{architecture}.attention.value_length"
    value_length = file.get_int(value_key, *LIMITS["head_dim"])
    if key_length is None:
        if differ:
            problem = "missing: layers differ in their number of heads"
            raise file.error(f"{architecture}.attention.key_length", problem)
        if embedding % heads:
            problem = (
                f"{embedding} is not a multiple of the {heads} heads, and there is no attention.key_length"
            )
            raise file.error(f"{architecture}.embedding_length", problem)
        key_length = embedding // heads
    if value_length is not None and value_length != key_length and not declared.latent:
        problem = (
            f"{value_length} differs from the key length, {key_length}, which the decoder does not implement"
        )
        raise file.error(value_key, problem)
    return key_length


def _rope_scaling(file: GGUFFile, declared: Architecture, context: int, tempered: bool) -> RopeScaling:
    """The scaling of a file. `tempered`: the attention's temperature needs the original context, also without YaRN."""
    architecture, prefix = declared.name, f"{declared.name}.rope.scaling"
    named = file.get_str(f"{prefix}.type")
    if named not in (None, "none", *(_GGUF_SCALINGS & declared.rope_scalings)):
        known = ", ".join(["none", *sorted(_GGUF_SCALINGS & declared.rope_scalings)])
        raise file.error(f"{prefix}.type", f"{named!r} is not implemented; of these kinds: {known}")
    if "longrope" in declared.rope_scalings and (named == "longrope" or ROPE_LONG in file.tensors):
        return _longrope(file, prefix, context)
    factor = None if named == "none" else file.get_float(f"{prefix}.factor")
    if factor is None and named != "none":
        factor = file.get_float(f"{architecture}.rope.scale_linear")  # the name before GGUF had scaling types
    # Writers put 0 for "not scaled"; a bare factor has always meant linear scaling.
    factor = factor or 1.0
    kind: RopeScalingKind = "none"
    if named == "yarn":
        kind = "yarn"
    elif named != "none" and factor != 1.0:
        kind = "linear"
    freq_factors = _freq_factors(file, ROPE_FREQS)
    if freq_factors is not None and kind == "none":
        kind = "llama3"
    yarn = kind == "yarn"  # without it these keys are not read, whatever they hold
    return RopeScaling(
        kind=kind,
        factor=factor if kind in ("linear", "yarn") else 1.0,
        original_context_length=_original_context(file, prefix, context) if yarn or tempered else context,
        beta_fast=_float(file, f"{prefix}.yarn_beta_fast", 32.0) if yarn else 32.0,
        beta_slow=_float(file, f"{prefix}.yarn_beta_slow", 1.0) if yarn else 1.0,
        attention_factor=_attention_factor(file, prefix, kind, factor, declared.latent),
        freq_factors=freq_factors,
    )


def _original_context(file: GGUFFile, prefix: str, context: int) -> int:
    original = file.get_int(f"{prefix}.original_context_length", 1, LIMITS["context_length"][1])
    return context if original is None else original


def _longrope(file: GGUFFile, prefix: str, context: int) -> RopeScaling:
    short, long = _freq_factors(file, ROPE_SHORT), _freq_factors(file, ROPE_LONG)
    if short is None or long is None:
        missing = ROPE_SHORT if short is None else ROPE_LONG
        raise file.tensor_error(missing, "missing: LongRoPE needs factors for short and long contexts")
    return RopeScaling(
        "longrope",
        original_context_length=_original_context(file, prefix, context),
        attention_factor=_float(file, f"{prefix}.attn_factor", 1.0),
        freq_factors=short,
        long_freq_factors=long,
    )


def _attention_factor(
    file: GGUFFile, prefix: str, kind: RopeScalingKind, factor: float, latent: bool
) -> float:
    """The multiplier of cos and sin.

    `yarn_attn_factor` is Hugging Face's `attention_factor`, which the converter writes. In `transformers` it replaces
    YaRN's own factor, with or without `yarn_log_multiplier`. llama.cpp ignores it, and in most architectures also
    YaRN's betas, which the converter writes for all. `attn_factor`, which the converter writes only for Phi-3,
    multiplies the result. As part of the scaling it does not apply to layers with a window whose rotation is not scaled
    (Gemma 3, OLMo 3); llama.cpp applies it there too.
    """
    extra = _float(file, f"{prefix}.attn_factor", 1.0)
    if kind != "yarn":
        return extra
    if latent:  # its multiplier is another (architectures/deepseek.py), and the scores' factor
        given = file.get_float(f"{prefix}.yarn_attn_factor")
        return 1.0 if given is None else given
    multiplier = _float(file, f"{prefix}.yarn_log_multiplier", 0.0)
    if not 0.0 <= multiplier <= 100.0:
        raise file.error(f"{prefix}.yarn_log_multiplier", f"{multiplier} is not a number from 0 to 100")
    given = file.get_float(f"{prefix}.yarn_attn_factor")
    return extra * (yarn_attention_factor(factor, multiplier) if given is None else given)


def _freq_factors(file: GGUFFile, name: str) -> tuple[float, ...] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type_name != "F32" or len(tensor.shape) != 1:
        problem = f"{tensor.type_name} of shape {list(tensor.shape)}, must be a vector of F32"
        raise file.tensor_error(name, problem)
    if tensor.shape[0] > LIMITS["rope_dim"][1]:
        raise file.tensor_error(name, f"{tensor.shape[0]} frequency factors are more than any head has")
    values = np.frombuffer(tensor.data.tobytes(), "<f4")
    return tuple(float(value) for value in values)
