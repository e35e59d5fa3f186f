"""Models with a sliding window in some layers: which layers have it, and the rotary parameters of either kind."""

from collections.abc import Callable, Sequence

import numpy as np

from quengine.models.architectures.architecture import Fields, Keys, LayerKind
from quengine.models.config import LIMITS, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import config_error, number

PATTERN = "attention.sliding_window_pattern"
LOCAL_BASE = "rope.freq_base_swa"
"""Keys of GGUF, the latter the rotary base of layers with a window.

The converter writes it where a folder has rotary parameters for each kind of layer, and `transformers` rotates by it.
llama.cpp reads it for OLMo 3 too, but rotates all layers there by `rope.freq_base`; released OLMo 3 has one base for
both.
"""


def from_max_window_layers(keys: Keys, blocks: int) -> Sequence[LayerKind]:
    """The layers from `max_window_layers` on have the window."""
    full = max(0, min(int(number(keys, "max_window_layers", blocks)), blocks))
    return ["full_attention" if layer < full else "sliding_attention" for layer in range(blocks)]


def full_layers(blocks: int, period: int) -> tuple[int, ...]:
    """Every `period`th layer: those without a window."""
    return tuple(range(period - 1, blocks, period))


def full_layers_of_gguf(
    file: GGUFFile,
    config: ModelConfig,
    period: int,
    of_period: Callable[[int, int], tuple[int, ...]] = full_layers,
) -> tuple[int, ...]:
    """The layers without a window: a file has their period, a flag by layer (true: with a window), or neither.

    period: used if the file has neither. of_period: the layers without a window, given `blocks` and a period. Raises
    GGUFError for any other value in the file.
    """
    key = f"{config.architecture}.{PATTERN}"
    pattern = file.metadata.get(key)
    if not isinstance(pattern, np.ndarray):
        return of_period(config.block_count, file.get_int(key, *LIMITS["block_count"]) or period)
    if pattern.dtype.kind not in "biu" or len(pattern) != config.block_count:
        raise file.error(key, f"is not a flag for each of {config.block_count} layers")
    return tuple(np.flatnonzero(pattern == 0).tolist())


def gguf_fields(file: GGUFFile, config: ModelConfig, period: int, base: float | None) -> Fields:
    """The rotary base of a file's layers with a window (`base`: its default) and the layers without one; empty if the
    model has no window."""
    if config.sliding_window is None:
        return {}
    own = file.get_float(f"{config.architecture}.{LOCAL_BASE}")
    return {
        "rope_freq_base_swa": base if own is None else own,
        "full_attention_layers": full_layers_of_gguf(file, config, period),
    }


def rope_of_kinds(keys: Keys, base: float | None, local_base: float | None) -> Keys:
    """config.json in the keys of other models: the rotary parameters of layers without a window, which `rope_scaling`
    belongs to, and the rotary base of layers with a window, which are not scaled.

    base, local_base: rotary bases of layers without and with a window, if config.json has none. Where each kind of
    layer has its own parameters, `transformers` ignores the original context at the top level of config.json, and reads
    YaRN's `truncate` beside the kinds, not within them.

    Raises EngineError for other values in config.json.
    """
    full, local = _parameters_of_kinds(keys)
    truncate = bool((keys.get("rope_parameters") or {}).get("truncate", True))
    return {
        **{key: value for key, value in keys.items() if key != "original_max_position_embeddings"},
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": base, **full, "truncate": truncate},
        "rope_local_base_freq": local.get("rope_theta", local_base),
    }


def _parameters_of_kinds(keys: Keys) -> tuple[Keys, Keys]:
    given, scaling = keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {}
    if isinstance(given, dict) and isinstance(scaling, dict):
        kinds = [given.get("full_attention"), given.get("sliding_attention")]
        full, local = ({"rope_type": "default"} if kind is None else kind for kind in kinds)
        if isinstance(full, dict) and isinstance(local, dict):
            if (kind := local.get("rope_type", local.get("type", "default"))) != "default":
                problem = f"{kind!r} for layers with a window is not implemented"
                raise config_error("rope_parameters", problem)
            return {**full, **scaling}, local
    raise config_error("rope_parameters", "is not an object for each kind of layer")
