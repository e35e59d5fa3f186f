"""Granite 3, and Granite 4.0 without recurrent layers, dense and as a mixture of experts: llama with four multipliers.

They multiply the embedding, the attention's scores and what each attention and feed-forward adds to the residual stream
(r, the residual multiplier), and divide the logits. The decoder has no multiplier of the residual: it computes the
stream divided by r, where embeddings are multiplied by `embedding_multiplier / r` and all else is added as it is. Only
RMSNorms read the stream, and they do not see its scale once their epsilon is divided by the square of r.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite

from quengine.errors import EngineError
from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.architectures.architecture import Architecture, Fields, HFPart, Keys, ModelType
from quengine.models.architectures.mixtures import MIXTRAL
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, number

_LEAST, _MOST = 1e-6, 1e6
_ATTENTION, _EMBEDDING, _LOGITS, _RESIDUAL = (
    "attention.scale",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
)
HF_SCALES = {
    _ATTENTION: "attention_multiplier",
    _EMBEDDING: "embedding_multiplier",
    _LOGITS: "logits_scaling",
    _RESIDUAL: "residual_multiplier",
}
FINETUNED = "rope.scaling.finetuned"


def _scaled(
    config: ModelConfig, scales: Mapping[str, float], error: Callable[[str, str], EngineError]
) -> Fields:
    """The multipliers as the decoder applies them. `error` makes an error of a key of `scales` and what is wrong."""
    for key, scale in scales.items():
        if not (isfinite(scale) and _LEAST <= scale <= _MOST):
            raise error(key, f"{scale} is not from {_LEAST:g} to {_MOST:g}")
    residual = scales[_RESIDUAL]
    eps = config.rms_eps / residual**2
    if config.rms_eps < 1.0 <= eps:
        raise error(_RESIDUAL, f"{residual} is too small beside an epsilon of {config.rms_eps:g}")
    return {
        "attention_scale": scales[_ATTENTION],
        "embedding_scale": scales[_EMBEDDING] / residual,
        "logit_scale": 1.0 / scales[_LOGITS],
        "rms_eps": eps,
    }


def multipliers(keys: Keys, config: ModelConfig) -> Fields:
    """A folder's multipliers; a missing one is 1. A null one of attention means the usual scale (`transformers`)."""
    scales = {name: number(keys, key, 1.0) for name, key in HF_SCALES.items()}
    fields = _scaled(config, scales, lambda name, problem: config_error(HF_SCALES[name], problem))
    null = keys.get(HF_SCALES[_ATTENTION], 1.0) is None
    return {**fields, "attention_scale": None} if null else fields


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    if file.get_bool(key := f"{config.architecture}.{FINETUNED}") is False:
        raise file.error(key, "false: layers without rotation are not implemented")
    return gguf_multipliers(file, config)


def gguf_multipliers(file: GGUFFile, config: ModelConfig) -> Fields:
    """A file's multipliers; one that is 0 or missing is 1, and for attention means the usual scale."""
    prefix = config.architecture
    given = {name: file.get_float(f"{prefix}.{name}") for name in HF_SCALES}
    scales = {name: scale or 1.0 for name, scale in given.items()}
    fields = _scaled(config, scales, lambda name, problem: file.error(f"{prefix}.{name}", problem))
    return fields if given[_ATTENTION] else {**fields, "attention_scale": None}


GRANITE = Architecture(
    name="granite",
    block=BlockForm(AttentionForm(rope_layout="pairs")),
    model_types={"granite": ModelType({"max_position_embeddings": 2048}, fields=multipliers)},
    hf_modules={"ffn_down": "shared_mlp.output_linear"},
    hf_parts={
        "ffn_gate.weight": HFPart("shared_mlp.input_linear.weight", "first half"),
        "ffn_up.weight": HFPart("shared_mlp.input_linear.weight", "second half"),
    },
    gguf_keys=(*HF_SCALES, FINETUNED),
    gguf_fields=_gguf_fields,
)

_MIXTURE = ModelType(
    {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    expert_keys=MIXTRAL,
    fields=multipliers,
)
_MIXTURE_SHARED = replace(
    _MIXTURE,
    expert_keys={**_MIXTURE.expert_keys, "shared_feed_forward_length": "shared_intermediate_size"},
)

GRANITEMOE = replace(
    GRANITE,
    name="granitemoe",
    router=RouterKind(used=2, scores="softmax_of_chosen", normalized=False),
    model_types={"granitemoe": _MIXTURE, "granitemoeshared": _MIXTURE_SHARED},
    hf_modules={
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_up_exps.weight": "block_sparse_moe.input_linear.weight",
        "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    hf_parts={
        "ffn_gate_shexp.weight": HFPart("shared_mlp.input_linear.weight", "first half"),
        "ffn_up_shexp.weight": HFPart("shared_mlp.input_linear.weight", "second half"),
    },
)
