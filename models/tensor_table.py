"""The tensors of a model, as its layers declare them; files are checked against them before use."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sized
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from quengine.models.architectures import DECLARED, layers_of
from quengine.models.blocks import altup, attention, experts, layer_input
from quengine.models.blocks.block import NORM, OUTPUT_CUT, Draw, Shape, TensorSpec
from quengine.models.config import PROJECTIONS, EagleSizes, ModelConfig
from quengine.models.gguf import GGUFError, GGUFTensor
from quengine.models.gguf.errors import shown

log = logging.getLogger(__name__)

FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
# Types that are computed with as stored.
QUANT_TYPES = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    | {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}
    | {"MXFP4", "NVFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0"}
)
MATRIX_TYPES = FLOAT_TYPES | QUANT_TYPES

LOGIT_STD = 4.0
"""Standard deviation of synthetic models' logits: greedy choices are as clear as a trained model's."""

# Ends of layers' tensor names that change the result of some models: such a tensor is never ignored.
_MEANINGFUL = (".bias", ".scale", "norm.weight", *attention.OPTIONAL, *experts.OPTIONAL)
_MEANINGFUL_TOP = (
    "output.bias",
    "output_norm.bias",
    "token_embd_norm.weight",
    "position_embd.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    *("cls.weight", "cls.norm.weight", "cls.output.weight"),
    *(f"{name}.weight" for name in PROJECTIONS),
)

# Vectors that some files have as a matrix of one row.
_ROWS = (".ffn_gate_inp_shexp.weight", ".exp_probs_b.bias")


@lru_cache(32)
def tensor_specs(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """Every tensor that a model of this configuration has, by name, layer by layer. Outside of layers, names in a
    Hugging Face folder begin with {body} or {head} (`hf.hf_names`)."""
    if config.eagle is not None:
        return {**_of_layers(config), **_of_eagle(config, config.eagle)}
    if config.is_draft_layer:
        return {**_of_layers(config), **_of_draft(config.embedding_length)}
    top = DECLARED[config.architecture].top_tensors
    if top is not None:
        return {**top(config), **_of_layers(config)}
    vocab, width = config.vocab_size, config.embedding_length
    logits = Draw(LOGIT_STD)
    embedding = logits if config.tied_output else Draw(by_columns=False)
    specs = {"token_embd.weight": TensorSpec((vocab, width), hf="{body}embed_tokens.weight", draw=embedding)}
    specs |= {**layer_input.top_tensors(config), **altup.top_tensors(config)}
    specs |= _of_layers(config)
    specs[f"{config.output_norm}.weight"] = TensorSpec((width,), hf="{body}norm.weight", draw=NORM)
    if not config.tied_output:
        specs["output.weight"] = TensorSpec((vocab, width), OUTPUT_CUT, "{head}lm_head.weight", draw=logits)
    if config.ranker is not None:
        specs["cls.output.weight"] = TensorSpec((config.ranker.classes, width), hf="{head}score.weight")
    if config.rope_scaling.kind == "longrope":
        names = ["rope_factors_long.weight", "rope_factors_short.weight"]
    else:
        names = [] if config.rope_scaling.freq_factors is None else ["rope_freqs.weight"]
    return specs | dict.fromkeys(names, TensorSpec((config.rope_dim // 2,)))


def _of_draft(width: int) -> dict[str, TensorSpec]:
    """The tensors that a layer that drafts tokens has in addition to any layer's (draft_layer.py)."""
    norm = TensorSpec((width,), draw=NORM)
    norms = {f"{name}.weight": norm for name in ("blk.0.nextn.enorm", "blk.0.nextn.hnorm", "output_norm")}
    return {"blk.0.nextn.eh_proj.weight": TensorSpec((width, 2 * width)), **norms}


def _of_eagle(config: ModelConfig, sizes: EagleSizes) -> dict[str, TensorSpec]:
    """The tensors of an EAGLE-3 draft model outside of its layer (eagle.py)."""
    width, logits = config.embedding_length, Draw(LOGIT_STD)
    found = {
        "fc.weight": TensorSpec((width, len(sizes.layers) * sizes.width), hf="fc.weight"),
        "output_norm.weight": TensorSpec((width,), hf="norm.weight", draw=NORM),
    }
    if sizes.own_output:
        found["output.weight"] = TensorSpec((sizes.drafted, width), hf="lm_head.weight", draw=logits)
    if sizes.own_embedding:
        found["token_embd.weight"] = TensorSpec(
            (config.vocab_size, width), hf="embed_tokens.weight", draw=Draw(by_columns=False)
        )
    if config.rope_scaling.freq_factors is not None:
        found["rope_freqs.weight"] = TensorSpec((config.rope_dim // 2,))
    return found


def _of_layers(config: ModelConfig) -> dict[str, TensorSpec]:
    layers = enumerate(layers_of(config))
    return {f"blk.{i}.{name}": spec for i, block in layers for name, spec in block.tensors().items()}


def joined_specs(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """Tensors that some files have instead of several of a model's tensors, concatenated."""
    layers = enumerate(layers_of(config))
    return {f"blk.{i}.{name}": spec for i, block in layers for name, spec in block.joined().items()}


def adapted_specs(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """The tensors that a LoRA adapter may name: a model's, and those that hold several of these. If the output matrix
    is the embedding, also "output.weight", whose change does not apply to the embedding."""
    specs = {**joined_specs(config), **tensor_specs(config)}
    if config.tied_output and "token_embd.weight" in specs and "output.weight" not in specs:
        shape = specs["token_embd.weight"].shape
        specs["output.weight"] = TensorSpec(shape, OUTPUT_CUT, "{head}lm_head.weight")
    return specs


def required_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name and torch-order shape of every tensor of a model of this configuration."""
    return {name: spec.shape for name, spec in tensor_specs(config).items()}


def draft_tensors(config: ModelConfig, names: Iterable[str], body: str = "blk.") -> frozenset[str]:
    """Those of `names` that belong to draft layers, which the decoder ignores (`ModelConfig.draft_layers`).

    body: the start of layers' names, before the number. Folders of Qwen have draft layers under names of their own.
    """
    first = config.block_count
    layers = tuple(f"{body}{layer}." for layer in range(first, first + config.draft_layers))
    return frozenset(name for name in names if name.startswith((*layers, "mtp.", "model.mtp.")))


def keys_of_sharing_layers(config: ModelConfig) -> Mapping[str, str]:
    """Key and value tensors that files may have for layers that use another layer's keys and values; nothing reads
    them. GGUF name -> the name in a folder, below the layer."""
    modules = {"attn_k": "k_proj", "attn_v": "v_proj", "attn_k_norm": "k_norm"}
    return {
        f"blk.{i}.{name}.weight": f"self_attn.{module}.weight"
        for i in range(config.block_count)
        if config.kv_source(i) != i
        for name, module in modules.items()
    }


def draft_note(config: ModelConfig, names: Sized) -> list[str]:
    """A note for the user on draft tensors, if there are any."""
    if not names:
        return []
    if DECLARED[config.architecture].draft_names is None:
        return [f"the model's own draft layer is ignored: {len(names)} tensors"]
    return [f"the model has a layer that drafts tokens (MTP), which --draft-mtp uses: {len(names)} tensors"]


class TensorFile(Protocol):
    """The part of a GGUF file that `check_tensors` reads."""

    path: Path
    tensors: dict[str, GGUFTensor]

    def tensor_error(self, name: str, problem: str) -> GGUFError: ...


def check_tensors(file: TensorFile, config: ModelConfig, unread: Collection[str] = ()) -> None:
    """Checks that `file` has the tensors of `config`, each with its shape and a supported type.

    Query, key and value rows are in three tensors or in one (`attn_qkv`). A layer's experts are in one tensor for each
    kind of matrix (`ffn_up_exps`), in one for gate and up together (`ffn_gate_up_exps`), or, in old files, in one per
    expert (`ffn_up.0`), all of the same type. Unused extra tensors are named in one warning of this module's logger;
    extra tensors that would change the result raise. `unread`: extra tensors that need no warning.

    Raises:
        GGUFError: a tensor is missing, its shape or type is wrong, or the decoder does not implement it.
    """
    required: dict[str, Shape] = {}
    joined = joined_specs(config)
    for name, shape in required_tensors(config).items():
        stored = _stored_form(file, joined, name, shape)
        required |= stored
        _check_same_type(file, list(stored))
    for name, shape in required.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            held = len(file.tensors)
            raise file.tensor_error(
                name, f"missing: this {config.architecture} model needs it, {held} are there"
            )
        _check_tensor(file, tensor, shape)
    unused = draft_tensors(config, file.tensors)
    scales = tensor_scales(file.tensors)
    for name, scale in scales.items():
        _check_scale(file, file.tensors[name], file.tensors[scale])
    known = {*required, *unused, *scales.values(), *unread, *keys_of_sharing_layers(config)}
    _check_extra(file, config, [name for name in file.tensors if name not in known])


def tensor_scales(tensors: Mapping[str, GGUFTensor]) -> dict[str, str]:
    """NVFP4 matrix -> its scale, names both; a scale is one number for the tensor, or for each expert."""
    scales = {}
    for name, tensor in tensors.items():
        scale = name.removesuffix(".weight") + ".scale"
        if tensor.type_name == "NVFP4" and scale in tensors:
            scales[name] = scale
    return scales


def _check_scale(file: TensorFile, tensor: GGUFTensor, scale: GGUFTensor) -> None:
    count = tensor.shape[0] if len(tensor.shape) == 3 else 1
    if scale.shape != (count,) or scale.type_name != "F32":
        problem = (
            f"{scale.type_name} {list(scale.shape)} is no scale of {tensor.name}, which needs F32 [{count}]"
        )
        raise file.tensor_error(scale.name, problem)
    if tensor.shape[-1] % 256:
        problem = f"NVFP4 with a scale of the tensor needs rows of a multiple of 256, not {tensor.shape[-1]}"
        raise file.tensor_error(tensor.name, problem)


def _check_extra(file: TensorFile, config: ModelConfig, extra: list[str]) -> None:
    for name in extra:
        if name in _MEANINGFUL_TOP or (name.startswith("blk.") and name.endswith(_MEANINGFUL)):
            raise file.tensor_error(
                name, f"a {config.architecture} model with this tensor is not implemented"
            )
    if extra:
        names = ", ".join(map(shown, extra[:8])) + (f" and {len(extra) - 8} more" if len(extra) > 8 else "")
        log.warning("%s: %d tensors that nothing uses: %s", file.path, len(extra), names)


def _stored_form(
    file: TensorFile, joined: Mapping[str, TensorSpec], name: str, shape: Shape
) -> dict[str, Shape]:
    """The tensors, with shapes, that hold `name` in the file, or should hold it: usually `name` itself."""
    holder = holder_of(name)
    together = {holder: joined[holder].shape} if holder in joined else {}
    forms = (together, {name: shape}, _of_each_expert(name, shape))
    return next((form for form in forms if any(one in file.tensors for one in form)), {name: shape})


def holder_of(name: str) -> str:
    """The name of the merged tensor that may hold `name`."""
    return _HELD.sub(lambda found: f".{_HOLDERS[found[1]]}.", name)


_HOLDERS = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn_qkv"),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps"),
    **dict.fromkeys(("attn_qkv", "attn_gate"), "ssm_in"),
    **dict.fromkeys(("attn_k_b", "attn_v_b"), "attn_kv_b"),
}
_HELD = re.compile(rf"\.({'|'.join(_HOLDERS)})\.")


def _of_each_expert(name: str, shape: Shape) -> dict[str, Shape]:
    """The per-expert tensors of old files that correspond to a tensor of experts; empty for other tensors."""
    base = name.removesuffix("_exps.weight")
    return {} if base == name else {f"{base}.{expert}.weight": shape[1:] for expert in range(shape[0])}


def _check_same_type(file: TensorFile, names: list[str]) -> None:
    there = [file.tensors[name] for name in names if name in file.tensors]
    for tensor in there[1:]:
        if tensor.type_name != there[0].type_name:
            problem = f"type {tensor.type_name} differs from {there[0].name}'s, {there[0].type_name}"
            raise file.tensor_error(
                tensor.name, f"{problem}: take a file whose experts have one type a layer"
            )


def _check_tensor(file: TensorFile, tensor: GGUFTensor, shape: Shape) -> None:
    as_row = tensor.name.endswith(_ROWS) and tensor.shape == (1, *shape)
    if tensor.shape != shape and not as_row:
        problem = f"shape {list(tensor.shape)} (rows first), the metadata needs {list(shape)}"
        raise file.tensor_error(tensor.name, problem)
    allowed = FLOAT_TYPES if len(shape) == 1 else MATRIX_TYPES
    if tensor.type_name not in allowed:
        kind = "a vector" if len(shape) == 1 else "a matrix"
        problem = f"type {tensor.type_name} is not supported for {kind}; {', '.join(sorted(allowed))} are"
        raise file.tensor_error(tensor.name, problem)
