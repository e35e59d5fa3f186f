"""All variants of the backend's operations in compiled decode steps: the bits of the eager path, near the reference."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cpu.step import CompiledStep
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Activation
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.rope import RopeSpec, rope_table
from tests.kernels.cpu.cpu_runs import embed
from tests.kernels.weights import nmse, random_weight

WIDTH, FEED_FORWARD, VOCABULARY, EPS = 128, 160, 60, 1e-6
HEADS, KV_HEADS = 4, 2
CONTEXT, BLOCKS = 352, 12  # of the cache; a sequence has 11
POSITIONS = [3, 300, 0, 41, 258]


@dataclass(frozen=True)
class Layer:
    """What differs from layer to layer, and where norms stand."""

    window: int | None = None
    group: int = 0
    head_dim: int = 32
    rope_dim: int = 32
    base: float = 1e4
    norms: str = "before"  # or "after", of each block's matmuls
    qk_norm: str = ""  # or "head", "row"
    activation: Activation = "silu"
    sinks: bool = False
    bias: bool = False  # of all projections of the attention
    gated: bool = False  # the attention's output
    row_scale: bool = False  # the down projection's rows are scaled by those of another matrix


MODELS = {
    "olmo2": [Layer(norms="after", qk_norm="row")] * 2,
    "gemma3": [
        Layer(40, 1, norms="both", qk_norm="head", activation="gelu_tanh"),
        Layer(None, 0, base=1e6, norms="both", qk_norm="head", activation="gelu_tanh"),
        Layer(40, 1, norms="both", qk_norm="head", activation="gelu_tanh"),
    ],
    "partly rotated heads of 96": [Layer(head_dim=96, rope_dim=72), Layer(100, 1, head_dim=96, rope_dim=24)],
    "gpt-oss": [Layer(40, 1, sinks=True, bias=True), Layer(None, 0, sinks=True, bias=True)],
    "scaled rows": [Layer(norms="both", bias=True, row_scale=True), Layer(row_scale=True)],
    "heads of 256": [Layer(head_dim=256, rope_dim=256)],
    "qwen3-next": [Layer(head_dim=64, rope_dim=16, qk_norm="head", gated=True), Layer(gated=True, bias=True)],
}


def quantized(name: str, kind: str, rows: int, cols: int, seed: int) -> QuantTensor:
    block = random_weight(kind, 1, 1).cols
    return dataclasses.replace(random_weight(kind, rows, cols // block, seed=seed), name=name)


def norm(width: int, seed: int) -> RMSNorm:
    return RMSNorm(1.0 + 0.1 * torch.randn(width, generator=torch.Generator().manual_seed(seed)), EPS)


class Model:
    """Some layers on a backend, put together from its operations."""

    def __init__(self, backend: Any, layers: list[Layer], kind: str, cache_type: CacheType) -> None:
        self.backend, self.layers = backend, layers
        dtype = backend.dtype
        self.embedding = backend.weight([quantized("embedding", kind, VOCABULARY, WIDTH, 0)])
        self.output = backend.weight([quantized("output", kind, VOCABULARY, WIDTH, 1)])
        self.weights, self.specs, self.caches, self.biases = [], [], [], []
        for i, layer in enumerate(layers):
            heads = HEADS * layer.head_dim
            queries = 2 * heads if layer.gated else heads
            sizes = {"q": (queries, WIDTH), "k": (heads // 2, WIDTH), "v": (heads // 2, WIDTH)}
            sizes |= {"o": (WIDTH, heads), "gate": (FEED_FORWARD, WIDTH), "up": (FEED_FORWARD, WIDTH)}
            sizes |= {"down": (WIDTH, FEED_FORWARD), "row_scale": (1, FEED_FORWARD)}
            parts = {
                name: quantized(name, kind, *size, seed=10 * i + j)
                for j, (name, size) in enumerate(sizes.items())
            }
            self.weights.append(
                {
                    "qkv": backend.weight([parts["q"], parts["k"], parts["v"]]),
                    "o": backend.weight([parts["o"]]),
                    "gate_up": backend.gate_up_weight(parts["gate"], parts["up"]),
                    "down": backend.weight([parts["down"]]),
                    "row_scale": backend.weight([parts["row_scale"]]),
                }
            )
            widths = [queries + heads, WIDTH] if layer.bias else []  # of QKV and the output projection
            self.biases.append([norm(width, 5).weight.to(dtype) for width in widths] or [None, None])
            self.specs.append(self.spec(layer, i))
            self.caches.append(
                allocate_layer(BLOCKS * len(POSITIONS) * BLOCK_SIZE, 2, layer.head_dim, "cpu", cache_type)
            )
        self.norms = [RMSNorm(n.weight.to(dtype), EPS) for n in (norm(WIDTH, seed) for seed in range(4))]

    def spec(self, layer: Layer, seed: int) -> AttentionSpec:
        cos, sin = rope_table(RopeSpec(layer.rope_dim, layer.base, layout="halves"), CONTEXT)
        by = {"": (0, 0), "head": (1, 1), "row": (HEADS, KV_HEADS)}[layer.qk_norm]
        q_norm, k_norm = (norm(n * layer.head_dim, seed + i).weight if n else None for i, n in enumerate(by))
        return AttentionSpec(
            *(HEADS, KV_HEADS, layer.head_dim, layer.head_dim**-0.5, layer.window, "halves", cos, sin),
            mask_band=causal_mask_band(8, CONTEXT, layer.window),
            q_norm=q_norm,
            k_norm=k_norm,
            eps=EPS,
            cache_group=layer.group,
            sinks=norm(HEADS, seed).weight if layer.sinks else None,
            gated=layer.gated,
        )

    def fill(self, tables: Tensor) -> None:
        """Keys and values at all positions that are seen; NaN elsewhere."""
        for layer, cache in zip(self.layers, self.caches, strict=True):
            generator = torch.Generator().manual_seed(7)
            seen = [torch.arange(max(0, p + 1 - (layer.window or CONTEXT)), p) for p in POSITIONS]
            slots = torch.cat(
                [
                    table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
                    for table, positions in zip(tables[layer.group], seen, strict=True)
                ]
            )
            for tensor in cache.tensors:
                values = torch.randn(len(slots), *tensor.shape[1:], generator=generator)
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
                    tensor[slots] = (values if tensor.shape[2] > 16 else 0.01 * values.abs()).to(tensor.dtype)
                else:
                    tensor.fill_(77)
                    tensor[slots] = (50 * values).clamp(-127, 127).to(tensor.dtype)

    def forward(self, batch: ForwardBatch) -> Tensor:
        b, x = self.backend, self.backend.embed(batch, self.embedding, 11.5)
        parts = zip(self.layers, self.weights, self.specs, self.caches, self.biases, strict=True)
        for layer, weights, spec, cache, (qkv_bias, output_bias) in parts:
            before = self.norms[:2] if layer.norms != "after" else [None, None]
            after = self.norms[2:] if layer.norms != "before" else [None, None]
            qkv = b.norm_linear(batch, x, before[0], weights["qkv"], qkv_bias)
            mixed = b.attention(batch, qkv, spec, cache)
            x = b.linear_add(batch, mixed, weights["o"], x, post_norm=after[0], bias=output_bias)
            gated = b.norm_glu(batch, x, before[1], weights["gate_up"], layer.activation)
            row_scale = b.norm_linear(batch, gated, None, weights["row_scale"]) if layer.row_scale else None
            bias = output_bias if layer.row_scale else None
            x = b.linear_add(batch, gated, weights["down"], x, None, after[1], bias, row_scale)
        return b.logits(batch, x, self.norms[0], self.output)


def block_tables(layers: list[Layer]) -> Tensor:
    """[groups, sequences, blocks], in another order for each group; block 0, for padding, where a window is past."""
    groups = 1 + max(layer.group for layer in layers)
    order = torch.randperm(11 * len(POSITIONS), generator=torch.Generator().manual_seed(3)) + 1
    tables = torch.stack([order.roll(group).view(len(POSITIONS), 11) for group in range(groups)])
    for layer in layers:
        for row, position in enumerate(POSITIONS):
            first = max(0, position + 1 - (layer.window or CONTEXT))
            tables[layer.group, row, : first // BLOCK_SIZE] = 0
            tables[layer.group, row, position // BLOCK_SIZE + 1 :] = 0
    return tables


def batch_of(tokens: list[int], positions: list[int], tables: Tensor) -> ForwardBatch:
    return ForwardBatch(
        "decode", torch.tensor(tokens), torch.tensor(positions, dtype=torch.int32), tables.int()
    )


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_a_step_has_the_bits_of_the_eager_path(name: str, kind: str, cache_type: CacheType) -> None:
    layers, tokens = MODELS[name], [5, 59, 0, 31, 8]
    tables = block_tables(layers)
    reference = Model(ReferenceBackend(keep=True), layers, kind, cache_type)
    reference.fill(tables)
    defined = reference.forward(batch_of(tokens, POSITIONS, tables))
    for threads in {1, cpu.max_threads()}:
        model = Model(CpuBackend(threads), layers, kind, cache_type)
        model.fill(tables)
        eager = model.forward(batch_of(tokens, POSITIONS, tables))
        # a code of 4 bits that falls the other way moves a value by an eighth of its group's largest
        assert nmse(eager, defined) < (1e-3 if cache_type == "q4_0" else 1e-5)
        written = [[tensor.clone() for tensor in cache.tensors] for cache in model.caches]
        buffers: dict[tuple[str, int], Tensor] = {}
        for rows in ([0, 1, 2, 3, 4], [1], [3, 1]):
            model.fill(tables)
            step = CompiledStep(model.forward, len(rows), 11, buffers, len(tables))
            of_rows = [[table.tolist() for table in tables[:, row]] for row in rows]
            logits = step.run([tokens[row] for row in rows], [POSITIONS[row] for row in rows], of_rows)
            assert torch.equal(logits, eager[rows])
            if len(rows) == len(tokens):
                for cache, expected in zip(model.caches, written, strict=True):
                    for tensor, other in zip(cache.tensors, expected, strict=True):
                        torch.testing.assert_close(tensor, other, rtol=0, atol=0, equal_nan=True)


def test_embeddings_are_scaled_as_rounded_products() -> None:
    weight = quantized("embedding", "Q4_1", 9, 96, 0)
    ids = torch.tensor([8, 0, 3])
    assert torch.equal(embed(weight, ids, 11.3), embed(weight, ids) * torch.tensor(11.3))


@torch.no_grad()
def test_each_layer_has_its_own_context() -> None:
    layers = [Layer(), Layer()]
    model = Model(CpuBackend(1), layers, "Q8_0", "f16")
    model.fill(block_tables(layers))
    short = model.specs[1]
    model.specs[1] = dataclasses.replace(short, cos=short.cos[:64].clone(), sin=short.sin[:64].clone())
    step = CompiledStep(model.forward, 1, 11, {})
    step.run([1], [63], [[[1, 2]]])
    with pytest.raises(ValueError, match=r"positions \[64\] are not in a cache of 64"):
        step.run([1], [64], [[[1, 2, 3]]])
