"""Fixed kernels: a row has the same bits alone, among others of a batch, and in whatever chunk of its prompt it is."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda import rms_norm as rms_norm_module
from quengine.kernels.cuda.attention.attention_prefill import is_hopper
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm import workspace as workspace_module
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemm.matmul import matmul, matmul_glu, matmul_norm
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.ranks.peers import peer_buffers, received_buffer_shape
from quengine.kernels.cuda.ranks.push import push_all_reduce
from quengine.kernels.cuda.rms_norm import rms_norm, rms_norm_fp16
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.packed import pack
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.glu import Activation, glu
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, CacheType
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import OneRank
from quengine.kernels.rms_norm import RMSNorm
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from tests.forward import forward
from tests.gguf_builder import ModelSizes
from tests.kernels.cuda.attention.attention_cases import PagedCache, make_spec, run_chunks, sinks_near
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight
from tests.tiny_models import write_tiny

ON_GPU = torch.cuda.is_available()
ROWS = [1, 2, 3, 8, 9, 33, 64, 100, 128, 130, 300] if ON_GPU else [1, 9, 20]
"""Few in the interpreter, which is slow: its matrix products are added up in one order (interpreter.py)."""

FP16_ROUNDING = 5e-7


@pytest.fixture(params=["wgmma", "fused"])
def way(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "wgmma" and not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    if request.param == "fused":
        monkeypatch.setattr(workspace_module, "is_hopper", lambda *_: False)


def exact(x: torch.Tensor, weights: list[QuantTensor]) -> torch.Tensor:
    return x.double() @ torch.cat([dequantize(w.format, w.data) for w in weights]).double().T


def room(device: torch.device) -> MatmulWorkspace:
    return MatmulWorkspace(1 << 16, device, batch_invariant=True)


class Echo(OneRank):
    """One of two ranks, whose other has what it has."""

    size = 2

    def __init__(self, device: torch.device) -> None:
        received = torch.zeros(received_buffer_shape(2, 1 << 15), dtype=torch.int64, device=device)
        places = [received.data_ptr() + 8 * rank * received.shape[2] for rank in range(2)]
        self.few = peer_buffers(received, places, 0)

    def peers(self, _rows: int, _width: int) -> None:
        raise AssertionError("a launch that sums few rows has other bits than one that is given their sum")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return push_all_reduce(x, self.few) if x.numel() <= self.few.capacity else x + x


@pytest.mark.usefixtures("way")
def test_a_row_that_ranks_sum_and_norm_does_not_depend_on_how_many_there_are(device: torch.device) -> None:
    """One, few, whose sums are pushed, and many."""
    width = 512 if ON_GPU else 96
    backend = CudaBackend(device, batch_invariant=True)
    backend.communicator, weight = Echo(device), backend.weight([ordinary_weight("Q8_0", width, 256)])
    x, stream = ordinary_activations(ROWS[-1], 256).to(device), torch.randn(ROWS[-1], width, device=device)
    norm = RMSNorm(torch.rand(width, device=device) + 0.5, 1e-5)
    batch: Any = SimpleNamespace(phase="decode")
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rows in ROWS:
        part, residual = x[:rows].contiguous(), stream[:rows].clone()
        made = backend.linear_add(batch, part, weight, residual, norm, partial=True)
        assert isinstance(made, RmsNormed) and isinstance(made.rms_normed, Fp16Operand)
        normed = made.rms_normed.dequantize(width)
        assert nmse(normed, rms_norm(made.hidden, norm.weight, norm.eps)) < FP16_ROUNDING
        found.append((made.hidden[0], normed[0].clone()))
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))
    assert (ROWS[-1] * width > backend.communicator.few.capacity) is ON_GPU


@pytest.mark.parametrize(
    "names", [("Q4_0",), ("Q8_0", "F16"), *[("Q4_K",), ("Q6_K",), ("BF16",), ("F32",)] * ON_GPU], ids="+".join
)
@pytest.mark.usefixtures("way")
def test_a_matmuls_row_does_not_depend_on_how_many_there_are(
    names: tuple[str, ...], device: torch.device
) -> None:
    sizes = (200, 2048) if ON_GPU else (16, 640)
    weights = [ordinary_weight(name, *sizes) for name in names]
    packed, space = pack(weights, device), room(device)
    x, residual = ordinary_activations(ROWS[-1], sizes[1]), torch.randn(ROWS[-1], packed.rows)
    most = matmul(x.to(device), packed, space, residual.to(device))
    assert nmse(most, exact(x, weights) + residual) < FP16_ROUNDING
    for rows in ROWS:
        ours = matmul(x[:rows].to(device), packed, space, residual[:rows].to(device))
        assert torch.equal(ours, most[:rows]), rows
        # Another row's place is another lane's, and another block's.
        assert torch.equal(
            matmul(x[-rows:].to(device), packed, space, residual[-rows:].to(device)), most[-rows:]
        )


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "rows", "cols"),
    [("Q4_K", 4096, 4096), ("Q6_K", 1024, 4096), ("Q4_K", 4096, 14336), ("Q5_1", 1536, 576)],
)
@pytest.mark.usefixtures("way")
def test_a_models_matmuls_neither(name: str, rows: int, cols: int, device: torch.device) -> None:
    weight, space = pack(ordinary_weight(name, rows, cols), device), room(device)
    x = ordinary_activations(ROWS[-1], cols).to(device)
    most = matmul(x, weight, space)
    for count in ROWS:
        assert torch.equal(matmul(x[:count].contiguous(), weight, space), most[:count]), count


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [256, 192] if ON_GPU else [32])
@pytest.mark.usefixtures("way")
def test_a_glus_row_neither(width: int, activation: Activation, device: torch.device) -> None:
    """A width that Hopper's kernel writes as the next one's rows, and one that it does not."""
    gate, up = ordinary_weight("Q8_0", width, 128), ordinary_weight("Q8_0", width, 128, 1)
    packed, space = pack([gate, up], device, paired=True), room(device)
    x = ordinary_activations(ROWS[-1], 128) * 0.1

    def rows_of(y: torch.Tensor | Fp16Operand) -> torch.Tensor:
        return y.dequantize(width) if isinstance(y, Fp16Operand) else y

    most = rows_of(matmul_glu(x.to(device), packed, space, activation)).clone()
    assert nmse(most, glu(exact(x, [gate, up]), activation)) < 4 * FP16_ROUNDING
    for rows in ROWS:
        few = rows_of(matmul_glu(x[:rows].to(device), packed, space, activation))
        assert torch.equal(few, most[:rows]), rows


@pytest.mark.usefixtures("way")
def test_the_norm_behind_a_matmul_neither(device: torch.device) -> None:
    width = 256 if ON_GPU else 32
    packed, space = pack(ordinary_weight("Q8_0", width, 128), device), room(device)
    x, residual = ordinary_activations(ROWS[-1], 128), torch.randn(ROWS[-1], width)
    norm = (torch.rand(width) + 0.5).to(device)
    kept = []
    for rows in (ROWS[-1], *ROWS):
        hidden, normed = matmul_norm(
            x[:rows].to(device), packed, space, residual[:rows].to(device), RMSNorm(norm, 1e-5)
        )
        kept.append((hidden, normed.row_major(width).clone(), normed.row_scale.clone()))
    for few in kept[1:]:
        assert all(torch.equal(a, b[: len(a)]) for a, b in zip(few, kept[0], strict=True))


@pytest.mark.parametrize("width", [96, 4096] if ON_GPU else [96])
def test_a_norms_row_neither(width: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 513 rows on the kernel would have another geometry, and from 16384 on yet another."""
    count = 16400 if ON_GPU else 20
    if not ON_GPU:
        monkeypatch.setattr(rms_norm_module, "_FEW_ROWS", 2)
    x, weight = torch.randn(count, width).to(device), (torch.rand(width) + 0.5).to(device)
    most = rms_norm(x, weight, 1e-5, batch_invariant=True)
    halves = rms_norm_fp16(x, weight, 1e-5, batch_invariant=True)
    for rows in (1, 17):
        assert torch.equal(rms_norm(x[-rows:], weight, 1e-5, batch_invariant=True), most[-rows:])
        few = rms_norm_fp16(x[-rows:], weight, 1e-5, batch_invariant=True)
        assert torch.equal(few.values, halves.values[-rows:])
        assert torch.equal(few.row_scale, halves.row_scale[-rows:])


@pytest.mark.parametrize(
    ("head_dim", "window", "cache_type", "sinks"),
    [(64, None, "f16", False), (64, 30, "q8_0", False), (64, 30, "f16", True), (64, 30, "q4_0", False)]
    + [(64, None, "q8_0", False), (128, None, "f16", False), (128, 50, "f16", True), (80, None, "f16", False)]
    * ON_GPU
    + [(128, None, "q4_0", False)] * ON_GPU,
)
def test_a_prompts_attention_does_not_depend_on_its_chunks(
    head_dim: int, window: int | None, cache_type: CacheType, sinks: bool, device: torch.device
) -> None:
    tokens = 140 if ON_GPU else 70
    spec = make_spec(device, 256, 4, 2, head_dim, window, sinks=sinks_near(0.5, 4) if sinks else None)
    qkv = torch.randn(tokens, 8 * head_dim, generator=torch.Generator().manual_seed(1)).to(device)

    def run(chunks: list[int]) -> torch.Tensor:
        cache = PagedCache.empty(device, 1, 256, 2, head_dim, cache_type)
        sizes = [*chunks, tokens - sum(chunks)]
        return run_chunks(spec, cache.layer, qkv, sizes, cache.tables, batch_invariant=True)

    whole = run([])
    for chunks in [[1, 64]] + [[1, 2, 40], [64, 5], [33, 1], [1] * 100, [128]] * ON_GPU:
        assert torch.equal(run(chunks), whole), chunks


class Rig:
    """A tiny model on batch_invariant kernels."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.backend = CudaBackend(device, batch_invariant=True)
        self.checkpoint = GGUFCheckpoint(path)
        self.decoder = Decoder(self.checkpoint.config, self.checkpoint.tensors, self.backend, 96, 96)
        self.device = device

    def cache(self, blocks: int = 3) -> KVCache:
        return KVCache.allocate(self.checkpoint.config, 96, self.device, pools=[CachePool(blocks)])

    def rows(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Logits of all tokens; in the interpreter, which takes long for them, the rows that they are made of."""
        run = self.decoder.forward if ON_GPU else self.decoder.hidden
        return run(batch, cache.layers)

    def prompt(self, ids: list[int], chunks: list[int], cache: KVCache, table: list[int]) -> torch.Tensor:
        """The rows of all tokens of a prompt."""
        parts, start = [], 0
        for size in [*chunks, len(ids) - sum(chunks)]:
            part = ids[start : start + size]
            batch = prefill_batch([part], [start], [[table]], self.device, all_logits=True)
            parts.append(self.rows(batch, cache))
            start += size
        return torch.cat(parts)


@pytest.fixture(params=["llama", "qwen2"] if ON_GPU else ["qwen2"])
def rig(
    request: pytest.FixtureRequest, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Rig:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    sizes = ModelSizes(
        request.param, blocks=1, embedding=32, feed_forward=32, heads=2, kv_heads=1, head_dim=32
    )
    return Rig(write_tiny(tmp_path / "m.gguf", request.param, "Q8_0", sizes=sizes), device)


def test_a_prompt_has_the_same_bits_however_it_is_cut(rig: Rig) -> None:
    ids = [(37 * i) % 250 for i in range(70 if ON_GPU else 4)]
    whole, held = rig.prompt(ids, [], cache := rig.cache(), [0, 1, 2]), cache.layers[0]
    orders = ([0, 1, 2], [3, 1, 0])
    for chunks, table in product(([1], [69], [2, 1], [64]), orders) if ON_GPU else [([2, 1], orders[1])]:
        again = rig.cache(4)
        assert torch.equal(rig.prompt(ids, chunks, again, table), whole)
        rows = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(len(ids))]
        for mine, first in zip(again.layers[0].tensors, held.tensors, strict=True):
            assert torch.equal(mine[rows], first[: len(ids)])
    alone = rig.rows(decode_batch(ids[-1:], [len(ids) - 1], [[[0, 1, 2]]], rig.device), cache)
    # One token in decode, whose attention keeps more bits: else this tests nothing.
    assert not torch.equal(alone, whole[-1:])


def test_rows_that_go_on_alone_behind_the_last_attention_have_their_bits(rig: Rig) -> None:
    lengths = (40, 30) if ON_GPU else (2,)
    ids = [(37 * i) % 250 for i in range(sum(lengths))]
    chunks = [ids[: lengths[0]], *([ids[lengths[0] :]] * (len(lengths) > 1))]
    cache, parts = rig.cache(4), list[torch.Tensor]()
    for chunk in chunks:
        every = forward(rig.decoder, chunk, rig.cache().layers, all_logits=True)
        if ON_GPU:
            assert torch.equal(forward(rig.decoder, chunk, rig.cache().layers), every[-1:])
        parts.append(every[-1])
    both = prefill_batch(chunks, [0] * len(chunks), [[[3, 1]], [[0, 2]]][: len(chunks)], rig.device)
    assert torch.equal(rig.decoder.forward(both, cache.layers), torch.stack(parts))


def test_a_step_has_the_same_bits_alone_and_in_every_batch(rig: Rig) -> None:
    """Over caches with something in them; two sequences, the rest of the batch is padding."""
    cache, plain, expected = rig.cache(7), rig.cache(), []
    tables = [[4, 6, 2], [3, 1, 5]]
    for pooled, rows in zip(cache.layers[0].tensors, plain.layers[0].tensors, strict=True):
        pooled.copy_(torch.randn(pooled.shape, generator=torch.Generator().manual_seed(2)))
        for block, at in enumerate(tables[0]):
            rows[block * BLOCK_SIZE :][:BLOCK_SIZE] = pooled[at * BLOCK_SIZE :][:BLOCK_SIZE]
    positions, tokens = [70, 40], [11, 12]

    def step(ids: list[int], at: list[int], blocks: list[list[int]], held: KVCache) -> torch.Tensor:
        return rig.rows(decode_batch(ids, at, [[table] for table in blocks], rig.device), held)

    for i in range(2):
        expected.append(step(tokens[i : i + 1], positions[i : i + 1], tables[i : i + 1], cache)[0])
    single = step(tokens[:1], positions[:1], [[0, 1, 2]], plain)
    assert torch.equal(single[0], expected[0]), "blocks of another order"
    for count in [2, 3, 4, 7, 8, 9, 24, 33, 100, 128, 130] if ON_GPU else [3]:
        padding = count - 2
        blocks = [[PADDING_BLOCK] * 3] * padding + tables
        got = step([0] * padding + tokens, [0] * padding + positions, blocks, cache)
        assert torch.equal(got[-2], expected[0]) and torch.equal(got[-1], expected[1]), count
