"""Writes GGUF models of true shapes with random weights: for benchmarks without a download, and for tests.

Weights are drawn in their stored format, tensor by tensor, so a 4 GB model needs the memory of its largest tensor.
Those of experts, of tables by layer, and of the layers of `pooled` presets, come from a pool (`PooledRows`).
"""

import fcntl
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quengine.errors import CannotRunError, EngineError
from quengine.models.architectures import DECLARED
from quengine.models.architectures.rope_axes import even_sections
from quengine.models.blocks.block import Shape, TensorSpec, Uniform
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.blocks.layer_input import TABLE
from quengine.models.blocks.mamba2 import Mamba2Sizes
from quengine.models.config import ModelConfig
from quengine.models.draft_layer import stored_specs
from quengine.models.gguf.config_experts import SCORES
from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.gguf.whole_file import PARTIAL, beside
from quengine.models.synthetic.presets import MXFP4_MOE, PRESETS, Q4_K_M, SyntheticModel, synthetic_preset
from quengine.models.synthetic.random_blocks import PooledRows, random_rows
from quengine.models.synthetic.synthetic_vocabulary import Metadata, bpe_metadata, spm_metadata
from quengine.models.tensor_table import FLOAT_TYPES, QUANT_TYPES, tensor_specs

if TYPE_CHECKING:
    from gguf import GGUFWriter

_PREFERRED = 10
"""With a `router_skew`, one expert of this number is preferred."""

Progress = Callable[[int], None]
"""Called with the bytes of weights that have been written."""


def write_synthetic(
    path: Path, model: str | SyntheticModel, seed: int = 0, progress: Progress | None = None
) -> Path:
    """Writes the preset or model `model` to `path`, beside it first, then renamed. Same seed, same bytes.

    A process that is killed leaves what it had written; `remove_partial_files` removes it.

    Raises:
        EngineError: no such preset, architecture or type, or rows that are not whole blocks of their type.
        CannotRunError: too little free disk.
    """
    spec = _resolve(model)
    config = spec.config()
    shapes = {name: tensor.shape for name, tensor in _specs(config).items()}
    types = {name: tensor_type(spec, name, shape) for name, shape in shapes.items()}
    _check_blocks(spec, shapes, types)
    _check_disk(path, sum(_nbytes(shapes[name], types[name]) for name in shapes))
    with beside(path) as file:
        _write(Path(file.name), spec, config, shapes, types, seed, progress)
    return path


def remove_partial_files(folder: Path) -> int:
    """Remove what `write_synthetic` of processes that were killed left in a folder; its size in bytes."""
    removed = 0
    for partial in folder.glob(f".*.gguf.*{PARTIAL}"):
        with suppress(OSError), partial.open("rb") as file:  # BlockingIOError: it is being written
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            removed += partial.stat().st_size
            partial.unlink()
    return removed


def synthetic_bytes(model: str | SyntheticModel) -> int:
    """Bytes of the weights of a preset or model. Raises EngineError as `write_synthetic`."""
    spec = _resolve(model)
    shapes = {name: tensor.shape for name, tensor in _specs(spec.config()).items()}
    return sum(_nbytes(shape, tensor_type(spec, name, shape)) for name, shape in shapes.items())


def _specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the file; those of draft layers come last."""
    return {**tensor_specs(config), **stored_specs(config)}


def _resolve(model: str | SyntheticModel) -> SyntheticModel:
    if isinstance(model, str):
        spec = synthetic_preset(model)
        if spec is None:
            raise EngineError(f"no synthetic model {model!r}; there are {', '.join(PRESETS)}")
        model = spec
    if model.architecture not in DECLARED:
        raise EngineError(f"no synthetic model of architecture {model.architecture!r}")
    if model.quant not in {Q4_K_M, MXFP4_MOE} | FLOAT_TYPES | QUANT_TYPES:
        raise EngineError(f"no synthetic weights of type {model.quant!r}")
    return model


def _nbytes(shape: Shape, kind: str) -> int:
    return TYPE_BY_NAME[kind].row_bytes(shape[-1]) * prod(shape[:-1])


def _check_blocks(spec: SyntheticModel, shapes: Mapping[str, Shape], types: Mapping[str, str]) -> None:
    for name, shape in shapes.items():
        block = TYPE_BY_NAME[types[name]].block
        if shape[-1] % block:
            raise EngineError(
                f"{spec.name}: {name} has rows of {shape[-1]}, {types[name]} needs a multiple of {block}"
            )


def _check_disk(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < nbytes + (1 << 26):
        raise CannotRunError(f"{path}: needs {nbytes / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free")


def _write(
    path: Path,
    spec: SyntheticModel,
    config: ModelConfig,
    shapes: Mapping[str, Shape],
    types: Mapping[str, str],
    seed: int,
    progress: Progress | None,
) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, spec.architecture)
    add_metadata(writer, _metadata(spec, config))
    for name, shape in shapes.items():
        kind = TYPE_BY_NAME[types[name]]
        # A number in place of the package's enumeration, which lacks the newest types; of any numpy dtype but uint8 the
        # writer takes the weights' shape as it is.
        writer.add_tensor_info(name, shape, np.dtype(np.int8), _nbytes(shape, kind.name), kind.number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pool, written, specs = PooledRows(seed), 0, _specs(config)
    for index, (name, shape) in enumerate(shapes.items()):
        rng = np.random.default_rng([seed, index])
        pooled = spec.pooled and len(shape) == 2 and name.startswith("blk.")
        if len(shape) == 3 or pooled or name == f"{TABLE}.weight":
            writer.write_tensor_data(pool.tensor(types[name], shape, rng))
        else:
            writer.write_tensor_data(_weights(spec, name, specs[name], types[name], rng))
        written += _nbytes(shape, types[name])
        if progress is not None:
            progress(written)
    writer.close()


def add_metadata(writer: "GGUFWriter", metadata: Metadata) -> None:
    """Writes the keys of a file, each in the type that readers expect."""
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _weights(
    spec: SyntheticModel, name: str, tensor: TensorSpec, kind: str, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """A tensor's values, drawn as the layers declare; frequency factors are the configuration's."""
    if name == "rope_freqs.weight":
        return np.array(spec.rope_freq_factors, "<f4").view(np.uint8)
    rows, cols, draw = prod(tensor.shape[:-1]), tensor.shape[-1], tensor.draw
    if isinstance(draw, Uniform):
        return rng.uniform(draw.low, draw.high, rows * cols).astype("<f4").view(np.uint8)
    std = draw.std * cols**-0.5 if draw.by_columns else draw.std
    drawn = random_rows(kind, rows, cols, std, rng, draw.mean)
    if spec.router_skew != 1.0 and name.endswith("ffn_gate_inp.weight"):
        drawn.view("<f4").reshape(rows, cols)[::_PREFERRED] *= spec.router_skew
    return drawn


def _metadata(spec: SyntheticModel, config: ModelConfig) -> Metadata:
    a, rms = spec.architecture, config.block.norms.kind == "rms"
    sizes: Metadata = {
        "general.name": spec.name,
        "general.type": "model",
        "general.quantization_version": 2,
        f"{a}.vocab_size": config.vocab_size,
        f"{a}.context_length": config.context_length,
        f"{a}.embedding_length": config.embedding_length,
        f"{a}.block_count": config.block_count + config.draft_layers,
        **_sizes(config),
        **_head_lengths(config),
        f"{a}.attention.{'layer_norm_rms' if rms else 'layer_norm'}_epsilon": config.rms_eps,
        f"{a}.rope.dimension_count": config.rope_dim,
        f"{a}.rope.freq_base": config.rope_freq_base,
    }
    if config.sliding_window is not None:
        sizes[f"{a}.attention.sliding_window"] = config.sliding_window
    if config.rope_dim_swa is not None:
        sizes |= {f"{a}.{key}": value for key, value in _window_metadata(config).items()}
    if config.logit_softcap:
        sizes[f"{a}.final_logit_softcapping"] = config.logit_softcap
    if config.attention_softcap:
        sizes[f"{a}.attn_logit_softcapping"] = config.attention_softcap
    if config.logit_scale != 1.0:
        sizes[f"{a}.logit_scale"] = config.logit_scale
    if config.encoder is not None:
        sizes[f"{a}.attention.causal"] = False
    if config.rope_scaling.kind == "yarn":
        sizes[f"{a}.rope.scaling.type"] = "yarn"
        sizes[f"{a}.rope.scaling.factor"] = config.rope_scaling.factor
        sizes[f"{a}.rope.scaling.original_context_length"] = config.rope_scaling.original_context_length
    if config.shared_kv_layers:
        sizes[f"{a}.attention.shared_kv_layers"] = config.shared_kv_layers
    if config.layer_input is not None:
        sizes[f"{a}.embedding_length_per_layer_input"] = config.layer_input.length
    if config.altup is not None:
        sizes[f"{a}.altup.num_inputs"], sizes[f"{a}.altup.active_idx"] = config.altup.streams, 0
        sizes[f"{a}.activation_sparsity_scale"] = list(config.altup.cutoffs)
    if config.target_width:
        sizes[f"{a}.embedding_length_out"] = config.target_width
    if config.draft_layers:
        sizes[f"{a}.nextn_predict_layers"] = config.draft_layers
    if config.conv_taps:
        sizes[f"{a}.shortconv.l_cache"] = config.conv_taps
    if config.gated_delta is not None:
        sizes |= {f"{a}.{key}": value for key, value in _gated_delta_metadata(config).items()}
    if config.mamba2 is not None:
        sizes |= {f"{a}.{key}": value for key, value in _mamba2_metadata(config.mamba2).items()}
        sizes[f"{a}.rope.scaling.finetuned"] = not config.unrotated_layers
    if DECLARED[a].has_lone_parts:  # llama.cpp wants this name too
        sizes[f"{a}.attention.layer_norm_epsilon"] = config.rms_eps
    if config.experts is not None:
        sizes |= {f"{a}.{key}": value for key, value in _expert_metadata(config.experts).items()}
    without = {key: f"{a}.{key}" for key in _NEUTRAL.keys() & set(DECLARED[a].gguf_keys)}
    sizes |= {name: _NEUTRAL[key] for key, name in without.items() if name not in sizes}
    if DECLARED[a].vocabulary == "bpe":
        vocabulary = bpe_metadata(config.vocab_size, "qwen2")
    else:
        vocabulary = spm_metadata(config.vocab_size)
    return {**sizes, **vocabulary}


def _sizes(config: ModelConfig) -> Metadata:
    """Heads and feed-forward lengths: one for all layers, or where they differ one a layer."""
    a, layers = config.architecture, [config.sizes(layer) for layer in range(config.block_count)]
    heads, kv_heads, lengths, _ = map(list, zip(*layers, strict=True))
    if DECLARED[a].has_recurrent_layers:
        without = {*config.recurrent_layers, *config.mixerless_layers}
        kv_heads = [0 if i in without else count for i, count in enumerate(kv_heads)]
    if DECLARED[a].has_lone_parts:
        lengths = [count if i in config.mixerless_layers else 0 for i, count in enumerate(lengths)]
    keys = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
    return {
        f"{a}.{key}": values if len(set(values)) > 1 else values[0]
        for key, values in zip(keys, (lengths, heads, kv_heads), strict=True)
    }


def _window_metadata(config: ModelConfig) -> Metadata:
    """The sizes of heads in layers with a window, where they differ."""
    windowed = [window is not None for window in config.layer_windows]
    size, dim = config.head_size(windowed.index(True)), config.rope_dim_swa
    assert dim is not None and config.rope_freq_base_swa is not None
    return {
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "rope.dimension_count_swa": dim,
        "rope.freq_base_swa": config.rope_freq_base_swa,
        "attention.sliding_window_pattern": windowed,
    }


def _head_lengths(config: ModelConfig) -> Metadata:
    """The lengths of keys and values, those of the cache where attention is latent."""
    a, sizes = config.architecture, config.latent
    if sizes is None:
        keys = {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
        return {f"{a}.{key}": length for key, length in keys.items()}
    keys = {
        "attention.key_length": sizes.rank + sizes.rotated,
        "attention.value_length": sizes.rank,
        "attention.key_length_mla": config.head_dim,
        "attention.value_length_mla": sizes.values,
        "attention.kv_lora_rank": sizes.rank,
    }
    keys |= {"attention.q_lora_rank": sizes.query_rank} if sizes.query_rank else {}
    return {f"{a}.{key}": length for key, length in keys.items()}


def _gated_delta_metadata(config: ModelConfig) -> Metadata:
    """Sizes, the layers, and how the three positions share the rotated frequencies."""
    sizes = config.gated_delta
    assert sizes is not None
    return {
        "ssm.conv_kernel": sizes.taps,
        "ssm.state_size": sizes.head_dim,
        "ssm.group_count": sizes.key_heads,
        "ssm.time_step_rank": sizes.value_heads,
        "ssm.inner_size": sizes.values,
        "attention.recurrent_layers": [
            i in config.recurrent_layers for i in range(config.block_count + config.draft_layers)
        ],
        "rope.dimension_sections": [*even_sections(config.rope_dim // 2), 0],
    }


def _mamba2_metadata(sizes: Mamba2Sizes) -> Metadata:
    return {
        "ssm.conv_kernel": sizes.taps,
        "ssm.state_size": sizes.state_dim,
        "ssm.group_count": sizes.groups,
        "ssm.time_step_rank": sizes.heads,
        "ssm.inner_size": sizes.inner,
    }


def _expert_metadata(experts: ExpertConfig) -> Metadata:
    router = experts.router
    sizes: Metadata = {
        "expert_count": experts.count,
        "expert_used_count": router.used,
        "expert_feed_forward_length": experts.feed_forward_length,
        "expert_weights_norm": router.normalized,
        "expert_weights_scale": router.scale,
        "expert_gating_func": next(number for number, scores in SCORES.items() if scores == router.scores),
    }
    if experts.shared_feed_forward_length:
        sizes["expert_shared_feed_forward_length"] = experts.shared_feed_forward_length
        if not experts.shared_feed_forward_length % experts.feed_forward_length:
            count = experts.shared_feed_forward_length // experts.feed_forward_length
            sizes["expert_shared_count"] = count
    if experts.dense_layers:
        sizes["leading_dense_block_count"] = len(experts.dense_layers)
    return sizes


_NEUTRAL = {"embedding_length_per_layer_input": 0, "interleave_moe_layer_step": 1}
"""Keys that llama.cpp needs in files of architectures that have them, and quengine does not."""

_FLOAT = (
    *(".bias", "ffn_gate_inp.weight", "shortconv.conv.weight", "ssm_conv1d.weight"),
    *("ssm_a", "ssm_d", "ssm_norm.weight"),
    *("altup_router.weight", "altup_predict_coef.weight", "altup_correct_coef.weight"),
)


def tensor_type(spec: SyntheticModel, name: str, shape: Shape) -> str:
    """Vectors, biases, routers and convolutions are F32, other matrices `spec.quant` or what the mix of that name says.

    Q4_K_M: Q4_K, but Q6_K for the output matrix, and for attn_v and every kind of ffn_down in the first and last eighth
    of the layers and every third between; Q5_K for attn_qkv. A model of exactly 8 experts has Q8_0 for attn_k and
    attn_v, Q5_K for attn_output. Rows that are not whole blocks have the next larger type with blocks of 32.
    MXFP4_MOE: MXFP4 for the experts, Q8_0 for all else.
    """
    if len(shape) == 1 or name.endswith(_FLOAT):
        return "F32"
    if spec.quant == MXFP4_MOE:
        return "MXFP4" if len(shape) == 3 else "Q8_0"
    if spec.quant != Q4_K_M:
        return spec.quant
    kind = _of_q4_k_m(spec, name)
    return kind if shape[-1] % TYPE_BY_NAME[kind].block == 0 else _OF_OTHER_ROWS[kind]


_OF_OTHER_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""The type that llama.cpp takes for rows that are not whole blocks of 256."""


def _of_q4_k_m(spec: SyntheticModel, name: str) -> str:
    if name == "output.weight" or (name == "token_embd.weight" and spec.tied_output):
        return "Q6_K"
    experts = spec.config().experts
    if experts is not None and experts.count == 8:
        if name.endswith(("attn_k.weight", "attn_v.weight")):
            return "Q8_0"
        if name.endswith("attn_output.weight"):
            return "Q5_K"
    if name.endswith("attn_qkv.weight"):
        return "Q5_K"
    if name.endswith("attn_v.weight") or ".ffn_down" in name:
        layer, count = int(name.split(".")[1]), spec.block_count
        eighth = count // 8
        if layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"
