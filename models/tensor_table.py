"""Which tensors a model must have, and of what shape and types: the table that a file is checked against before use."""

import logging
from collections.abc import Iterable, Sized

from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFFile, GGUFTensor
from quengine.models.gguf.errors import shown

log = logging.getLogger(__name__)

FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
# Run as stored.
QUANT_TYPES = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    | {"IQ4_NL", "IQ4_XS", "MXFP4"}
)
# Dequantized at load.
DEQUANTIZED_TYPES = frozenset(
    {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"} | {"TQ1_0", "TQ2_0"}
)
MATRIX_TYPES = FLOAT_TYPES | QUANT_TYPES | DEQUANTIZED_TYPES

Shape = tuple[int, ...]

# Ends of tensor names of layers that some model has and that change its result: never to be passed over.
_MEANINGFUL = (
    *(".bias", ".scale", "norm.weight", "attn_qkv.weight", "attn_sinks.weight"),
    *("ffn_gate_inp.weight", "_exps.weight", "_shexp.weight"),
)
_MEANINGFUL_TOP = (
    "output.bias",
    "output_norm.bias",
    "token_embd_norm.weight",
    "position_embd.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)

# A vector that some files have as a matrix of one row.
_ROW = ".ffn_gate_inp_shexp.weight"


def required_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name and torch-order shape of every tensor that a model of this configuration has."""
    shapes: dict[str, Shape] = {"token_embd.weight": (config.vocab_size, config.embedding_length)}
    for i in range(config.block_count):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in _block_tensors(config, i).items()}
    shapes["output_norm.weight"] = (config.embedding_length,)
    if not config.tied_output:
        shapes["output.weight"] = (config.vocab_size, config.embedding_length)
    if config.rope_scaling.kind == "longrope":
        names = ["rope_factors_long.weight", "rope_factors_short.weight"]
    else:
        names = [] if config.rope_scaling.freq_factors is None else ["rope_freqs.weight"]
    return shapes | dict.fromkeys(names, (config.rope_dim // 2,))


def _block_tensors(config: ModelConfig, layer: int) -> dict[str, Shape]:
    hidden, block = config.embedding_length, config.block
    q, kv = config.head_count * config.head_dim, config.head_count_kv * config.head_dim
    pre, post = block.norms != "post", block.norms != "pre"
    shapes: dict[str, Shape] = {"attn_norm.weight": (hidden,)} if pre else {}
    if block.merged:
        shapes["attn_qkv.weight"] = (q + 2 * kv, hidden)
    else:
        shapes |= {f"attn_{name}.weight": (rows, hidden) for name, rows in (("q", q), ("k", kv), ("v", kv))}
    shapes["attn_output.weight"] = (hidden, q)
    if post:
        shapes["post_attention_norm.weight"] = (hidden,)
    if pre:
        shapes[f"{block.ffn_norm}.weight"] = (hidden,)
    shapes |= _expert_tensors(config) if config.has_experts(layer) else _dense_tensors(config)
    if post:
        shapes["post_ffw_norm.weight"] = (hidden,)
    if block.qkv_bias:
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if block.output_bias:
        shapes["attn_output.bias"] = (hidden,)
    if block.sinks:
        shapes["attn_sinks.weight"] = (config.head_count,)
    if block.qk_norm == "head":
        shapes |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    elif block.qk_norm == "row":
        shapes |= {"attn_q_norm.weight": (q,), "attn_k_norm.weight": (kv,)}
    return shapes


def _dense_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Of a feed-forward that is not a mixture of experts."""
    hidden, inner = config.embedding_length, config.feed_forward_length
    if config.block.merged:
        gate_up: dict[str, Shape] = {"ffn_up.weight": (2 * inner, hidden)}
    else:
        gate_up = {"ffn_gate.weight": (inner, hidden), "ffn_up.weight": (inner, hidden)}
    return {**gate_up, "ffn_down.weight": (hidden, inner)}


def _expert_tensors(config: ModelConfig) -> dict[str, Shape]:
    assert config.experts is not None
    block, hidden, count = config.block, config.embedding_length, config.experts.count
    inner, shared = config.experts.feed_forward_length, config.experts.shared_feed_forward_length
    shapes: dict[str, Shape] = {
        "ffn_gate_inp.weight": (count, hidden),
        "ffn_gate_exps.weight": (count, inner, hidden),
        "ffn_up_exps.weight": (count, inner, hidden),
        "ffn_down_exps.weight": (count, hidden, inner),
    }
    if block.expert_bias:
        shapes |= {
            "ffn_gate_inp.bias": (count,),
            "ffn_gate_exps.bias": (count, inner),
            "ffn_up_exps.bias": (count, inner),
            "ffn_down_exps.bias": (count, hidden),
        }
    if block.selection_bias:
        shapes["exp_probs_b.bias"] = (count,)
    if shared:
        shapes |= {
            "ffn_gate_shexp.weight": (shared, hidden),
            "ffn_up_shexp.weight": (shared, hidden),
            "ffn_down_shexp.weight": (hidden, shared),
        }
    if shared and block.shared_gate:
        shapes["ffn_gate_inp_shexp.weight"] = (hidden,)
    return shapes


def draft_tensors(config: ModelConfig, names: Iterable[str], body: str = "blk.") -> frozenset[str]:
    """Those of `names` that belong to the layers which the decoder passes over (`ModelConfig.draft_layers`).

    body: what names of layers begin with, before the layer's number.
    """
    first = config.block_count
    layers = tuple(f"{body}{layer}." for layer in range(first, first + config.draft_layers))
    return frozenset(name for name in names if name.startswith(layers))


def draft_note(names: Sized) -> list[str]:
    """What the user should know of such tensors, if there are any, in a line."""
    return [f"the model's own draft layer is ignored: {len(names)} tensors"] if names else []


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Checks that `file` has the tensors of `config`, each of its shape and a type that can be computed with.

    Query, key and value rows are in three tensors or in one (`attn_qkv`). A layer's experts are in one tensor for each
    kind of matrix (`ffn_up_exps`), in one for gate and up together (`ffn_gate_up_exps`), or, in old files, in one each
    (`ffn_up.0`) of a common type.
    Extra tensors that nothing uses are named in one warning of this module's logger; extra ones that would
    change the result are refused.

    Raises:
        GGUFError: a tensor is missing, or its shape or type is wrong, or the decoder does not apply it.
    """
    required: dict[str, Shape] = {}
    for name, shape in required_tensors(config).items():
        stored = _stored_form(file, config, name, shape)
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
    _check_extra(file, config, [name for name in file.tensors if name not in required and name not in unused])


def _check_extra(file: GGUFFile, config: ModelConfig, extra: list[str]) -> None:
    for name in extra:
        if name in _MEANINGFUL_TOP or (name.startswith("blk.") and name.endswith(_MEANINGFUL)):
            raise file.tensor_error(
                name, f"a {config.architecture} model with this tensor is not implemented"
            )
    if extra:
        names = ", ".join(map(shown, extra[:8])) + (f" and {len(extra) - 8} more" if len(extra) > 8 else "")
        log.warning("%s: %d tensors that nothing uses: %s", file.path, len(extra), names)


def _stored_form(file: GGUFFile, config: ModelConfig, name: str, shape: Shape) -> dict[str, Shape]:
    """The tensors that hold `name` in the file, or must hold it there: for most `name` itself."""
    joined = (_query_key_value(config, name, shape), _gate_and_up(name, shape))
    forms = (*joined, {name: shape}, _of_each_expert(name, shape))
    return next((form for form in forms if any(one in file.tensors for one in form)), {name: shape})


def _query_key_value(config: ModelConfig, name: str, shape: Shape) -> dict[str, Shape]:
    """Name and shape of the tensor that has query, key and value rows, or their biases; none for other tensors."""
    layer, _, kind = name.rpartition(".attn_")
    part, _, ending = kind.partition(".")
    if part not in ("q", "k", "v"):
        return {}
    rows = (config.head_count + 2 * config.head_count_kv) * config.head_dim
    return {f"{layer}.attn_qkv.{ending}": (rows, *shape[1:])}


def _gate_and_up(name: str, shape: Shape) -> dict[str, Shape]:
    """Name and shape of the tensor that has gate and up of all experts, [E, 2F, K]; none for tensors of other kinds."""
    layer, _, kind = name.rpartition(".ffn_")
    if kind not in ("gate_exps.weight", "up_exps.weight"):
        return {}
    count, rows, cols = shape
    return {f"{layer}.ffn_gate_up_exps.weight": (count, 2 * rows, cols)}


def _of_each_expert(name: str, shape: Shape) -> dict[str, Shape]:
    """The names and shape that old files have for the matrices of a tensor of experts; none for others."""
    base = name.removesuffix("_exps.weight")
    return {} if base == name else {f"{base}.{expert}.weight": shape[1:] for expert in range(shape[0])}


def _check_same_type(file: GGUFFile, names: list[str]) -> None:
    there = [file.tensors[name] for name in names if name in file.tensors]
    for tensor in there[1:]:
        if tensor.type_name != there[0].type_name:
            problem = f"type {tensor.type_name} differs from {there[0].name}'s, {there[0].type_name}"
            raise file.tensor_error(
                tensor.name, f"{problem}: take a file whose experts have one type a layer"
            )


def _check_tensor(file: GGUFFile, tensor: GGUFTensor, shape: Shape) -> None:
    as_row = tensor.name.endswith(_ROW) and tensor.shape == (1, *shape)
    if tensor.shape != shape and not as_row:
        problem = f"shape {list(tensor.shape)} (rows first), the metadata needs {list(shape)}"
        raise file.tensor_error(tensor.name, problem)
    allowed = FLOAT_TYPES if len(shape) == 1 else MATRIX_TYPES
    if tensor.type_name not in allowed:
        kind = "a vector" if len(shape) == 1 else "a matrix"
        problem = f"type {tensor.type_name} is not supported for {kind}; {', '.join(sorted(allowed))} are"
        raise file.tensor_error(tensor.name, problem)
