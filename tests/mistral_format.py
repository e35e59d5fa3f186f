"""Checkpoint folders in Mistral's own format: params.json, consolidated.safetensors and the tokenizer's file."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.mistral_vocab_files import TEKKEN, data_file

_MODULES = {
    "embed_tokens": "tok_embeddings",
    "norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_mistral_format(source: Path, folder: Path, tokenizer: str, **params: Any) -> Path:
    """The model of the Hugging Face folder `source`, with the tokenizer `tokenizer` of mistral-common.

    Rotated query and key rows, halves there, are neighbours here. `params` are keys of params.json beside the sizes.
    """
    config = json.loads((source / "config.json").read_text())
    folder.mkdir()
    sizes = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "max_position_embeddings": config["max_position_embeddings"],
        "tied_embeddings": config["tie_word_embeddings"],
    }
    (folder / "params.json").write_text(json.dumps(sizes | params))
    heads = {"attention.wq": config["num_attention_heads"], "attention.wk": config["num_key_value_heads"]}
    tensors = {}
    for name, values in load_file(source / "model.safetensors").items():
        module = name.removeprefix("model.").removesuffix(".weight")
        layer, _, inner = (
            module.removeprefix("layers.").partition(".") if "layers." in module else ("", "", module)
        )
        native = _MODULES[inner]
        if native in heads:
            halves = values.reshape(heads[native], 2, config["head_dim"] // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape).contiguous()
        tensors[f"layers.{layer}.{native}.weight" if layer else f"{native}.weight"] = values
    save_file(tensors, folder / "consolidated.safetensors")
    _write_tokenizer(folder, tokenizer, config["vocab_size"])
    return folder


def _write_tokenizer(folder: Path, tokenizer: str, vocab: int) -> None:
    """A tekken tokenizer is cut to its first `vocab` tokens: control tokens, bytes, and the commonest merges."""
    path = data_file(tokenizer)
    if tokenizer not in TEKKEN:
        shutil.copy(path, folder / path.name)
        return
    data = json.loads(path.read_text())
    data["config"]["default_vocab_size"] = vocab
    data["vocab"] = data["vocab"][:vocab]
    (folder / "tekken.json").write_text(json.dumps(data))
