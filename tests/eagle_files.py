"""Tiny EAGLE-3 draft models: folders as they are published, and what they compute, in float64.

The definition follows section 3.1 of the paper (arXiv 2503.01840) and shares nothing with the product.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.llama_cpp_convert import VOCAB

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
LAYERS = [1, 4, 6]
EPS, THETA = 1e-5, 10000.0


@dataclass(frozen=True)
class Eagle:
    """What folders differ in: the names of speculators, a width of its own, and what the names say."""

    speculators: bool = False
    width: int = WIDTH
    drafted: int = 100
    normed_residual: bool = False
    own_embedding: bool = False
    layers: Sequence[int] = tuple(LAYERS)

    def write(self, folder: Path, target_width: int = WIDTH, vocab: int = VOCAB) -> Path:
        """The folder, with random weights; drafted tokens are spread over the vocabulary."""
        folder.mkdir(parents=True)
        random = torch.Generator().manual_seed(5)

        def matrix(rows: int, columns: int, std: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=random) * std * columns**-0.5

        def norm(size: int = self.width) -> Tensor:
            return 1 + 0.2 * torch.randn(size, generator=random)

        width, layer = self.width, "layers.0." if self.speculators else "midlayer."
        tensors = {
            "fc.weight": matrix(width, len(self.layers) * target_width),
            "norm.weight": norm(),
            "lm_head.weight": matrix(self.drafted, width, 4.0),
            f"{layer}input_layernorm.weight": norm(),
            f"{layer}hidden_norm.weight": norm(),
            f"{layer}post_attention_layernorm.weight": norm(),
            f"{layer}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * width, 1.5),
            f"{layer}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * width, 1.5),
            f"{layer}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * width),
            f"{layer}self_attn.o_proj.weight": matrix(width, HEADS * HEAD_DIM),
            f"{layer}mlp.gate_proj.weight": matrix(INNER, width),
            f"{layer}mlp.up_proj.weight": matrix(INNER, width),
            f"{layer}mlp.down_proj.weight": matrix(width, INNER),
        }
        if self.own_embedding:
            tensors["embed_tokens.weight"] = matrix(vocab, width, width**0.5)
        if self.drafted < vocab:
            chosen = torch.randperm(vocab, generator=random)[: self.drafted].sort().values
            tensors["d2t"] = chosen - torch.arange(self.drafted)
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self._config(target_width, vocab)))
        return folder

    def _config(self, target_width: int, vocab: int) -> dict[str, Any]:
        layer = {
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "num_hidden_layers": 1,
            "max_position_embeddings": 256,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "vocab_size": vocab,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
        own = {
            "draft_vocab_size": self.drafted,
            "target_hidden_size": target_width,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "norm_before_residual": self.normed_residual,
        }
        if self.speculators:
            named = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
            return {**named, **own, "transformer_layer_config": layer}
        return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own}


class Definition:
    """The draft model of a folder in float64. embedding: the target's, where it has none of its own."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        names = {name.removeprefix("midlayer.").removeprefix("layers.0."): name for name in stored}
        self._of = {short: stored[name].double() for short, name in names.items() if "2" not in short}
        self._embedding = self._of.get("embed_tokens.weight", embedding).double()
        drafted = len(self._of["lm_head.weight"])
        self.tokens = torch.arange(drafted) + stored.get("d2t", torch.zeros(drafted, dtype=torch.int64))

    def fused(self, inputs: Sequence[Tensor]) -> Tensor:
        """The row g of each position, of the inputs [T, width] of the target's layers."""
        return torch.cat(list(inputs), 1).double() @ self._of["fc.weight"].T

    def rows(self, tokens: Sequence[int], g: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows of a token and the g of the position before it each: logits of the drafted tokens, and the rows that
        follow as the g of the tokens after them."""
        embedded = self._normed(self._embedding[list(tokens)], "input_layernorm")
        hidden = self._normed(g, "hidden_norm")
        both = torch.cat([embedded, hidden], 1)
        q, k, v = (both @ self._of[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = self._attention(q, k, v) @ self._of["self_attn.o_proj.weight"].T
        x = mixed + (hidden if self._config.get("norm_before_residual") else g)
        y = self._normed(x, "post_attention_layernorm")
        gate, up, down = (self._of[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return self._normed(x, "norm") @ self._of["lm_head.weight"].T, x

    def draft(self, ids: Sequence[int], g: Tensor, count: int) -> list[int]:
        """The `count` most likely tokens after `ids`, one after the other; g [len(ids) - 1, width]: those of the
        target."""
        tokens, found = list(ids[1:]), list[int]()
        for _ in range(count):
            logits, after = self.rows(tokens, g)
            found.append(int(self.tokens[logits[-1].argmax()]))
            tokens, g = [*tokens, found[-1]], torch.cat([g, after[-1:]])
        return found

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return rows * scale * self._of[f"{name}.weight"]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = len(q)
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angles = torch.arange(count, dtype=torch.float64)[:, None, None] * frequencies

        def turned(rows: Tensor, heads: int) -> Tensor:
            first, second = rows.view(count, heads, HEAD_DIM).chunk(2, -1)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).transpose(0, 1)

        shared = HEADS // KV_HEADS
        keys = turned(k, KV_HEADS).repeat_interleave(shared, 0)
        values = v.view(count, KV_HEADS, HEAD_DIM).transpose(0, 1).repeat_interleave(shared, 0)
        scores = turned(q, HEADS) @ keys.mT * HEAD_DIM**-0.5
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ values).transpose(0, 1).reshape(count, -1)
