"""The decoder on the reference backend: positions, masks, architectures, against a plain re-statement in numpy."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from tests.forward import forward, one_sequence
from tests.gguf_builder import ModelSizes
from tests.tiny_models import chat_vocabulary, random_weights, with_sinks_and_output_biases, write_tiny

IDS = [5, 17, 250, 3, 99, 42, 42, 8, 120, 77, 1]


def load(path: Path, chunk: int = 64, keep: bool = True) -> tuple[Decoder, KVCache]:
    checkpoint = GGUFCheckpoint(path)
    backend = ReferenceBackend(keep=keep)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, chunk)
    return decoder, KVCache.allocate(checkpoint.config, 64, torch.device("cpu"))


def logits(path: Path, chunk: int = 64, keep: bool = True) -> torch.Tensor:
    decoder, cache = load(path, max(chunk, 1), keep)
    parts = [
        forward(decoder, IDS[s : s + chunk], cache.layers, s, all_logits=True)
        for s in range(0, len(IDS), chunk)
    ]
    return torch.cat(parts)


def rotate(x: np.ndarray, position: int, base: float, layout: str) -> np.ndarray:
    """One head [d] rotated, written from the formula and not from the kernel."""
    d = len(x)
    out = x.copy()
    for i in range(d // 2):
        a, b = (2 * i, 2 * i + 1) if layout == "pairs" else (i, i + d // 2)
        angle = position * base ** (-2 * i / d)
        out[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
        out[b] = x[a] * np.sin(angle) + x[b] * np.cos(angle)
    return out


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def plain_forward(sizes: ModelSizes, weights: dict[str, np.ndarray], window: int | None = None) -> np.ndarray:
    """Every token attended for itself with loops over heads; keys and values rounded to fp16 as the cache does."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    layout = "pairs" if sizes.architecture == "llama" else "halves"
    x = w["token_embd.weight"][IDS]
    hd, group = sizes.head_dim, sizes.heads // sizes.kv_heads
    for i in range(sizes.blocks):
        b = {name.removeprefix(f"blk.{i}."): v for name, v in w.items() if name.startswith(f"blk.{i}.")}
        h = norm(x, b["attn_norm.weight"])
        q, k, v = (h @ b[f"attn_{n}.weight"].T + b.get(f"attn_{n}.bias", 0.0) for n in "qkv")
        q, k, v = q.reshape(len(IDS), -1, hd), k.reshape(len(IDS), -1, hd), v.reshape(len(IDS), -1, hd)
        if sizes.architecture == "qwen3":
            q, k = norm(q, b["attn_q_norm.weight"]), norm(k, b["attn_k_norm.weight"])
        out = np.zeros((len(IDS), sizes.heads * hd))
        for t in range(len(IDS)):
            first = 0 if window is None else max(0, t - window + 1)
            for head in range(sizes.heads):
                query = rotate(q[t, head], t, 10000.0, layout)
                keys = np.stack(
                    [half(rotate(k[s, head // group], s, 10000.0, layout)) for s in range(first, t + 1)]
                )
                scores = keys @ query / np.sqrt(hd)
                if "attn_sinks.weight" in b:
                    scores = np.append(scores, b["attn_sinks.weight"][head])
                p = np.exp(scores - scores.max())
                p = (p / p.sum())[: len(keys)]
                out[t, head * hd : (head + 1) * hd] = p @ half(v[first : t + 1, head // group])
        x = x + out @ b["attn_output.weight"].T + b.get("attn_output.bias", 0.0)
        h = norm(x, b["ffn_norm.weight"])
        gate, up = h @ b["ffn_gate.weight"].T, h @ b["ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ b["ffn_down.weight"].T
    head = w.get("output.weight", w["token_embd.weight"])
    return norm(x, w["output_norm.weight"]) @ head.T


def vocab() -> int:
    return len(chat_vocabulary()["tokenizer.ggml.tokens"])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_architecture_matches_the_formulas(tmp_path: Path, architecture: str, tied: bool) -> None:
    sizes = ModelSizes(architecture=architecture)
    path = write_tiny(tmp_path / "m.gguf", architecture, tied=tied, seed=3)
    expected = plain_forward(sizes, random_weights(sizes, vocab(), tied, seed=3))
    np.testing.assert_allclose(logits(path).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_sliding_window_hides_what_lies_before_it(tmp_path: Path) -> None:
    sizes = ModelSizes()
    path = write_tiny(tmp_path / "m.gguf", changes={"llama.attention.sliding_window": 4})
    expected = plain_forward(sizes, random_weights(sizes, vocab(), False, seed=0), window=4)
    np.testing.assert_allclose(logits(path).numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits(path, chunk=1).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_sinks_and_the_bias_of_the_output_projection(tmp_path: Path, chunk: int, window: int | None) -> None:
    sizes = ModelSizes("qwen2")
    path = write_tiny(tmp_path / "m.gguf", "qwen2")
    checkpoint = GGUFCheckpoint(path)
    declared = dataclasses.replace(checkpoint.config, sliding_window=window)
    config, tensors, added = with_sinks_and_output_biases(declared, checkpoint.tensors)
    decoder = Decoder(config, tensors, ReferenceBackend(keep=True), 64, 64)
    cache = KVCache.allocate(config, 64, torch.device("cpu"))
    found = [
        forward(decoder, IDS[start : start + chunk], cache.layers, start, all_logits=True)
        for start in range(0, len(IDS), chunk)
    ]
    expected = plain_forward(sizes, random_weights(sizes, vocab(), False, seed=0) | added, window)
    np.testing.assert_allclose(torch.cat(found).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_the_chunk_size_does_not_change_the_logits(tmp_path: Path, chunk: int) -> None:
    path = write_tiny(tmp_path / "m.gguf", "qwen3")
    torch.testing.assert_close(logits(path, chunk), logits(path), rtol=1e-9, atol=1e-9)


def test_expanding_weights_at_each_use_gives_the_same_logits(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", kind="Q8_0")
    torch.testing.assert_close(logits(path, keep=False), logits(path, keep=True), rtol=1e-12, atol=1e-12)


def test_the_temperature_of_late_positions_scales_the_queries(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(path)
    config = dataclasses.replace(
        checkpoint.config, attention_temperature_scale=0.5, attention_temperature_length=4
    )
    decoder = Decoder(config, checkpoint.tensors, ReferenceBackend(keep=True), 64, 64)
    cache = KVCache.allocate(config, 64, torch.device("cpu"))
    scaled = forward(decoder, IDS, cache.layers, all_logits=True)
    plain = logits(path)
    torch.testing.assert_close(scaled[:4], plain[:4], rtol=1e-12, atol=1e-12)
    assert (scaled[4:] - plain[4:]).abs().max() > 1e-3


def test_bytes_per_token_counts_every_matrix_once_and_one_embedding_row(tmp_path: Path) -> None:
    decoder, _ = load(write_tiny(tmp_path / "m.gguf"))
    sizes = ModelSizes()
    matrices = [shape for shape in sizes.tensor_shapes(vocab()).values() if len(shape) == 2]
    weights = sum(rows * cols for rows, cols in matrices) - (vocab() - 1) * sizes.embedding
    assert decoder.bytes_per_token == weights * 8


def test_logits_are_the_hidden_rows_times_the_output_matrix(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    decoder, cache = load(path)
    hidden = decoder.hidden(one_sequence(IDS, blocks=2), cache.layers)
    assert hidden.shape == (len(IDS), decoder.config.embedding_length)
    output = decoder.output.dense
    torch.testing.assert_close(hidden @ output.T, logits(path))
