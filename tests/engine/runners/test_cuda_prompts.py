"""Prompts' steps that are recorded: they come to what the same chunks come to eagerly, whatever filled the step before.

Without a GPU a "graph" is the step itself, run again in Triton's interpreter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS, cut_tiles
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm import matmul
from quengine.kernels.forward_batch import ForwardBatch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.runners import cuda_prompts
from quengine.runners.cuda_prompts import Board, PromptChunk, PromptGraphs, StepSize
from quengine.runners.graph_capture import capture
from tests.gguf_builder import ModelSizes
from tests.kernels.cuda.weights import nmse
from tests.tiny_models import write_tiny

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CTX = 96


class Again:
    """A step, run again."""

    def __init__(self, step: Callable[[], Tensor], logits: Tensor) -> None:
        self.step, self.logits = step, logits

    def replay(self) -> None:
        logits = self.step()
        self.logits[: len(logits)] = logits


class Rig:
    """A tiny model whose rows have the same bits in whatever step they are."""

    def __init__(self, path: Path, blocks: int) -> None:
        checkpoint = GGUFCheckpoint(path)
        backend = CudaBackend(DEVICE, batch_invariant=True)
        self.decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, CTX, CTX)
        self.cache, self.other = (
            KVCache.allocate(checkpoint.config, CTX, DEVICE, num_blocks=blocks) for _ in range(2)
        )
        for cache in (self.cache, self.other):
            for tensor in cache.layers[0].tensors:
                tensor.zero_()
        self.graphs = PromptGraphs(self.decoder, self.cache, capture if ON_GPU else self.again)

    def again(
        self, _warm: Callable[[], Tensor], step: Callable[[], Tensor], _pool: Any
    ) -> tuple[Again, Tensor]:
        logits = torch.empty(max(cuda_prompts.SEQUENCES), self.decoder.config.vocab_size)
        return Again(step, logits), logits

    def eagerly(self, chunks: list[PromptChunk]) -> Tensor:
        """In the other cache."""
        return self.decoder.forward(batch_of(chunks), self.other.layers)

    def hold(self, first: int, count: int) -> None:
        """Keys and values in so many rows of both caches."""
        for cache in (self.cache, self.other):
            for tensor in cache.layers[0].tensors:
                tensor[first : first + count] = torch.linspace(-1, 1, 32)

    def rows(self, cache: KVCache) -> Tensor:
        """All that sequences have in the cache."""
        count = self.cache.num_blocks * BLOCK_SIZE
        return torch.cat([tensor[:count].flatten() for tensor in cache.layers[0].tensors])


def batch_of(chunks: list[PromptChunk], device: torch.device = DEVICE) -> ForwardBatch:
    ids, starts, tables = zip(*chunks, strict=True)
    return prefill_batch(ids, starts, tables, device)


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Rig]:
    if not ON_GPU:
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    sizes = ModelSizes("qwen2", blocks=1, embedding=32, feed_forward=32, heads=2, kv_heads=1, head_dim=32)
    path = write_tiny(tmp_path / "m.gguf", "qwen2", "Q8_0", sizes=sizes)
    return lambda blocks: Rig(path, blocks)


def ids_of(first: int, count: int) -> list[int]:
    return [(37 * i + 11) % 250 for i in range(first, first + count)]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # the interpreter takes long for rows
        monkeypatch.setattr(cuda_prompts, "ROWS", (8,))
        monkeypatch.setattr(cuda_prompts, "SEQUENCES", (1, 2))


@pytest.mark.cuda_kernel
@pytest.mark.usefixtures("small_steps")
def test_chunks_of_several_sequences_come_to_what_they_do_eagerly(make_rig: Callable[[int], Rig]) -> None:
    """One that continues, one that begins, in blocks of any order; nothing but their rows is written."""
    rig = make_rig(5)
    rig.hold(4 * BLOCK_SIZE, 3)
    chunks = [PromptChunk(ids_of(3, 4), 3, [4]), PromptChunk(ids_of(50, 2), 0, [1, 3])]
    assert rig.graphs.compute(chunks) is None, "the first time is eager"
    ours = rig.graphs.compute(chunks)
    assert ours is not None and len(rig.graphs.recorded) == 1
    assert torch.equal(ours, rig.eagerly(chunks))
    assert torch.equal(rig.rows(rig.cache), rig.rows(rig.other))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["this GPU's", "expanded weights"])
def test_long_chunks_on_the_kernels_of_a_real_size(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose attention has tiles of nobody's rows, and whose rows' bits follow from how many there are."""
    if way == "expanded weights":
        monkeypatch.setattr(matmul, "uses_wgmma", lambda *_: False)
    sizes = ModelSizes(
        blocks=2, embedding=256, feed_forward=512, heads=4, kv_heads=2, head_dim=128, context=512
    )
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", "llama", "Q8_0", sizes=sizes))
    decoder = Decoder(checkpoint.config, checkpoint.tensors, CudaBackend(DEVICE), 512, 512)
    caches = [KVCache.allocate(checkpoint.config, 512, DEVICE, num_blocks=40) for _ in range(2)]
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for mine, other in zip(*(layer.tensors for layer in layers), strict=True):
            mine.copy_(other.normal_())
    graphs = PromptGraphs(decoder, caches[0])
    tables = [list(range(10)), list(range(12, 24)), list(range(30, 34))]
    lengths, starts = (300, 200, 7), (0, 150, 90)
    for cut in (0, 290, 100, 0):
        parts = list(zip(lengths, starts, tables, strict=True))
        chunks = [PromptChunk(ids_of(cut, length - min(cut, length - 5)), s, t) for length, s, t in parts]
        graphs.record(StepSize(512, 4) if cut == 0 else graphs.size_of(chunks) or StepSize(0, 0))
        ours = graphs.compute(chunks)
        expected = decoder.forward(batch_of(chunks), caches[1].layers)
        assert ours is not None and nmse(ours, expected) < 1e-6


@pytest.mark.parametrize(
    ("lengths", "blocks", "size"),
    [
        ([2], 9, StepSize(16, 1)),
        ([16], 9, StepSize(16, 1)),
        ([17], 9, StepSize(32, 1)),
        ([60, 60, 9], 9, StepSize(256, 4)),
        ([3] * 17, 9, None),  # more sequences than a step has
        ([1], 9, None),  # a step of decode
        ([90] * 12, 9, None),  # the host is not in the way
        ([80], 3, StepSize(128, 1)),
        ([CTX], 3, StepSize(128, 1)),
    ],
)
def test_steps_are_told_by_rows_and_sequences(
    lengths: list[int], blocks: int, size: StepSize | None, make_rig: Callable[[int], Rig]
) -> None:
    graphs = make_rig(blocks).graphs
    assert graphs.size_of([PromptChunk([0] * length, 0, [0]) for length in lengths]) == size


def test_steps_whose_memory_was_let_go_of_are_recorded_again(
    make_rig: Callable[[int], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, recorded = make_rig(4), list[int]()
    rooms = [0]
    monkeypatch.setattr(CudaBackend, "rooms_left", property(lambda _: rooms[0]))

    def noted(_warm: Any, _step: Any, _pool: Any) -> tuple[Any, Tensor]:
        recorded.append(rooms[0])
        return Again(lambda: torch.ones(4, 8), torch.ones(4, 8)), torch.ones(4, 8)

    rig.graphs = PromptGraphs(rig.decoder, rig.cache, noted)
    chunk = [PromptChunk([5, 6], 0, [1])]
    answers = [rig.graphs.compute(chunk) is None for _ in range(3)]
    assert answers == [True, False, False] and recorded == [0]
    rooms[0] = 1
    assert rig.graphs.compute(chunk) is not None and recorded == [0, 1]


def test_a_step_that_is_captured_ahead_rounds_as_a_prompts_does(
    make_rig: Callable[[int], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are rounded once in prefill, up to the output matrix."""
    rig, phases = make_rig(4), list[str]()

    def noted(batch: ForwardBatch, *_: object) -> Tensor:
        phases.append(batch.phase)
        return torch.zeros(1, 8)

    monkeypatch.setattr(rig.decoder, "forward", noted)
    rig.graphs.rehearse(StepSize(16, 4))
    assert phases == ["prefill"]


def test_a_board_says_what_a_batch_says_and_where_the_rest_goes() -> None:
    board = Board(StepSize(64, 4), 40, 16, CTX, 7, torch.device("cpu"))
    chunks = [PromptChunk(ids_of(0, 20), 30, [2, 5]), PromptChunk(ids_of(3, 33), 0, [1, 0])]
    board.send([PromptChunk([9] * 64, 0, [3, 4])])
    board.send(chunks)
    expected = batch_of(chunks, torch.device("cpu"))
    cut = cut_tiles(expected, board.tile_rows)
    batch, tiles = board.batch, board.batch.tiles
    assert tiles is not None and batch.logits_rows is not None
    assert batch.positions[:53].equal(expected.positions) and tiles.sequences[:53].equal(cut.sequences)
    count = cut.tiles.shape[0]
    assert tiles.tiles[:count].equal(cut.tiles)
    assert tiles.tiles.shape == (7, TILE_FIELDS) and not tiles.tiles[count:].any()
    assert batch.token_ids[:53].tolist() == [*chunks[0].ids, *chunks[1].ids]
    assert batch.logits_rows.tolist() == [19, 52, 0, 0]
    assert set(tiles.sequences[53:].tolist()) == {4} and batch.positions[53:].max() < BLOCK_SIZE
    assert board.tables[4].tolist() == [7] * 3
    assert board.tables[:2, :2].tolist() == [[2, 5], [1, 0]]


def test_sizes_are_those_that_a_server_meets(make_rig: Callable[[int], Rig]) -> None:
    assert make_rig(9).graphs.sizes(512)[:3] == [StepSize(rows, 1) for rows in (16, 32, 64)]
    assert make_rig(9).graphs.sizes(512)[3:] == [StepSize(512, 4), StepSize(512, 16)]
    assert set(cuda_prompts.SEQUENCES) >= {1}
