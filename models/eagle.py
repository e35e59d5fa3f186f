"""EAGLE-3 draft models: the configuration in a file or folder, and whether one fits the model that it drafts for.

Such a model is one layer over hidden rows of another model, the target. `fc` joins the inputs of three of the target's
layers at a position to one row g. A row of the draft is a token and the g of the position before it: query, key and
value projections read `[rms(embedding, attn_norm) | rms(g, attn_norm_2)]`, g is the residual stream, and a feed-forward
follows. The layer's result, before the last norm, is the g of the next row of a draft. Its logits are of `drafted`
tokens, whose numbers in the target's vocabulary `d2t` has.

Sources: Li et al. 2025, "EAGLE-3" (arXiv 2503.01840), section 3.1; folders of `LlamaForCausalLMEagle3` and of
speculators' `Eagle3Speculator`; llama.cpp's architecture "eagle3". A norm of the target's rows before `fc`
(`norm_before_fc`) is not computed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quengine.errors import EngineError
from quengine.models.architectures import ARCHITECTURES
from quengine.models.config import EagleSizes, ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.hf.hf_keys import config_error, flag, integer

ARCHITECTURE = "eagle3"
"""The name that GGUF has for them."""

_LAYER = "llama"
"""The architecture that their layer has."""

_FOLDERS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_NORM_BEFORE_FC = "norms before fc are not implemented; use a draft model without"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MOST_LAYERS = 16
_MOST_TOKENS = 1 << 24


def is_eagle_config(keys: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is that of an EAGLE-3 draft model."""
    named = keys.get("architectures")
    return "draft_vocab_size" in keys and isinstance(named, list) and any(name in _FOLDERS for name in named)


def config_of_gguf(file: GGUFFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata, as a model of one layer.

    Raises GGUFError: a key is missing or wrong, or asks for what is not computed.
    """
    config = read_gguf_config(file, replace(ARCHITECTURES[_LAYER], name=ARCHITECTURE))
    key = f"{ARCHITECTURE}.target_layers"
    if key not in file.metadata and f"{ARCHITECTURE}.extract_layers" in file.metadata:
        key = f"{ARCHITECTURE}.extract_layers"  # as llama.cpp called it at first
    layers = file.get_ints(key)
    if layers is None:
        raise file.error(key, "missing from the metadata")
    if file.get_bool(f"{ARCHITECTURE}.norm_before_fc"):
        raise file.error(f"{ARCHITECTURE}.norm_before_fc", _NORM_BEFORE_FC)
    if config.block_count != 1:
        raise file.error(f"{ARCHITECTURE}.block_count", f"{config.block_count}: draft models have 1 layer")
    d2t = file.tensors.get("d2t")
    sizes = EagleSizes(
        layers=tuple(int(layer) for layer in layers),
        width=file.require_int(f"{ARCHITECTURE}.target_hidden_size", 1),
        drafted=config.vocab_size if d2t is None else d2t.shape[0],
        normed_residual=bool(file.get_bool(f"{ARCHITECTURE}.norm_before_residual")),
        own_embedding="token_embd.weight" in file.tensors,
        own_output="output.weight" in file.tensors,
    )
    if problem := _problem(sizes):
        raise file.error(key, problem)
    return _as_layer(config, sizes)


def config_of_folder(
    keys: Mapping[str, Any], held: Collection[str], fc: Sequence[int], target_layers: int
) -> ModelConfig:
    """The configuration in a parsed config.json of a folder with the tensors `held`, of which `fc` has this shape.

    target_layers: number of layers of the model that it drafts for; the usual ones are read if the folder names none.
    Raises EngineError as `config_of_gguf` does.
    """
    inner = keys.get("transformer_layer_config")  # of speculators
    merged = {**keys, **inner} if isinstance(inner, Mapping) else dict(keys)
    layer = read_hf_config({**merged, "model_type": _LAYER, "tie_word_embeddings": False})
    for key in ("norm_before_fc", "norm_before_residual"):
        if merged.get(key) is None:
            merged[key] = False
    if flag(merged, "norm_before_fc"):
        raise config_error("norm_before_fc", _NORM_BEFORE_FC)
    if layer.block_count != 1:
        raise config_error("num_hidden_layers", f"{layer.block_count}: draft models have 1 layer")
    layers = _layer_ids(merged, target_layers)
    sizes = EagleSizes(
        layers=layers,
        width=integer(merged, "target_hidden_size", 1, 1 << 20, default=max(1, fc[-1] // len(layers))),
        drafted=integer(merged, "draft_vocab_size", 1, _MOST_TOKENS),
        normed_residual=flag(merged, "norm_before_residual"),
        own_embedding="embed_tokens.weight" in held,
        own_output="lm_head.weight" in held,
    )
    if problem := _problem(sizes):
        raise config_error(_LAYER_IDS, problem)
    # A folder has the elements of a head in halves; they stay as they are.
    return _as_layer(replace(layer, block=layer.block.with_attention(rope_layout="halves")), sizes)


def _layer_ids(keys: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs are read: those that the folder names, or the defaults of training."""
    inner = keys.get("eagle_config")
    given = keys.get(_LAYER_IDS)
    if given is None and isinstance(inner, Mapping):
        given = inner.get(_LAYER_IDS)
    if given is None or given == []:
        return tuple(max(0, layer) for layer in (2, layers // 2, layers - 3))
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise config_error(_LAYER_IDS, f"{given!r} is not a list of numbers of layers")
    return tuple(given)


def _problem(sizes: EagleSizes) -> str | None:
    """What is wrong with the layers; None: nothing."""
    layers = sizes.layers
    if 0 < len(layers) <= _MOST_LAYERS and min(layers) >= 0 and list(layers) == sorted(set(layers)):
        return None
    return f"{list(layers)} are not numbers of 1 to {_MOST_LAYERS} layers in order"


def _as_layer(config: ModelConfig, sizes: EagleSizes) -> ModelConfig:
    return replace(config, architecture=_LAYER, is_draft_layer=True, eagle=sizes)


def check_fit(name: str, draft: ModelConfig, target: ModelConfig, target_name: str) -> None:
    """Raises EngineError unless the draft model `name` can draft for the target."""
    sizes = draft.eagle
    assert sizes is not None
    begin = f"the EAGLE-3 draft model {name} does not fit {target_name}"
    if sizes.width != target.embedding_length:
        raise EngineError(
            f"{begin}: it reads hidden rows of {sizes.width} elements, which here have {target.embedding_length}"
        )
    if draft.vocab_size != target.vocab_size:
        raise EngineError(
            f"{begin}: it drafts for a vocabulary of {draft.vocab_size} tokens, which here has {target.vocab_size}"
        )
    if max(sizes.layers) > target.block_count:
        raise EngineError(
            f"{begin}: it reads the inputs of layers {', '.join(map(str, sizes.layers))}, of {target.block_count} here"
        )
    shared = [
        what
        for what, own in (("embedding", sizes.own_embedding), ("output matrix", sizes.own_output))
        if not own
    ]
    if shared and draft.embedding_length != target.embedding_length:
        raise EngineError(
            f"{begin}: it has no {shared[0]} of its own, and a width of {draft.embedding_length} in place of "
            f"{target.embedding_length}"
        )
    if not sizes.own_output and sizes.drafted != target.vocab_size:
        raise EngineError(
            f"{begin}: it has no output matrix of its own, and drafts from {sizes.drafted} of {target.vocab_size} "
            "tokens"
        )
