"""Captured steps give what the same steps give eagerly, whatever was in the step before.

Without a GPU a "graph" is the step itself, run again in Triton's interpreter.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from quengine.block_pool import CachePool
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.attention.prefill_tiles import TILE_FIELDS, cut_tiles
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm import workspace
from quengine.kernels.cuda.sampling.sampling import SamplingSettings
from quengine.kernels.forward_batch import STATE_ENTRIES, ForwardBatch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.memory import CacheNeeds
from quengine.model_runner import ModelRunner
from quengine.models.checkpoint import open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.eagle_checkpoint import open_eagle
from quengine.models.eagle_decoder import EagleDecoder
from quengine.models.fused_rows import FusedRows
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.runners import cuda_graphs, graph_keys, static_inputs
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.device_rows import Drafted
from quengine.runners.graph_capture import CapturedStep, capture_step
from quengine.runners.graph_keys import (
    DECODE_ROWS,
    GREEDY,
    PREFILL_SEQUENCES,
    WHOLE_CHUNK,
    GraphKey,
    SamplingKind,
    decode_key,
    expected_keys,
    prefill_key,
)
from quengine.runners.static_inputs import PrefillInputs
from quengine.sampler import Sample, Sampler, Verified
from quengine.slot import Slot
from quengine.speculative.device_drafts import DeviceDraftSteps
from quengine.speculative.draft_model import DraftJob, HostDraftSteps
from quengine.step_plan import GivenRows, SequenceRows, StepPlan, forward_batch
from tests.eagle_files import Eagle
from tests.engine.steps import decode, with_slots
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
        self.path, checkpoint = path, GGUFCheckpoint(path)
        backend = CudaBackend(DEVICE, batch_invariant=True)
        self.decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, CTX, CTX)
        self.cache, self.other = (
            KVCache.allocate(checkpoint.config, CTX, DEVICE, pools=[CachePool(blocks)]) for _ in range(2)
        )
        for cache in (self.cache, self.other):
            for tensor in cache.layers[0].tensors:
                tensor.zero_()
        self.graphs = CudaGraphs(self.decoder, self.cache, 1, capture=capture_step if ON_GPU else self.again)

    def again(self, _warm: Callable[[], Tensor], step: Callable[[], Tensor], _pool: Any) -> CapturedStep:
        logits = torch.empty(max(PREFILL_SEQUENCES), self.decoder.config.vocab_size)
        return CapturedStep(Again(step, logits), logits, 0)

    def compute(self, chunks: list[SequenceRows]) -> Tensor | None:
        key = self.graphs.lookup("prefill", chunks)
        return None if key is None else self.graphs.replay(key, chunks)

    def eagerly(self, chunks: list[SequenceRows]) -> Tensor:
        """In the other cache."""
        return self.decoder.forward(forward_batch("prefill", chunks, DEVICE), self.other.layers)

    def hold(self, first: int, count: int) -> None:
        """Keys and values in so many rows of both caches."""
        for cache in (self.cache, self.other):
            for tensor in cache.layers[0].tensors:
                tensor[first : first + count] = torch.linspace(-1, 1, 32)

    def rows(self, cache: KVCache) -> Tensor:
        """All that sequences have in the cache."""
        return torch.cat([tensor[BLOCK_SIZE:].flatten() for tensor in cache.layers[0].tensors])


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Rig]:
    if not ON_GPU:
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
        monkeypatch.setattr(cuda_graphs, "has_dependent_launch", lambda _device: False)
        monkeypatch.setattr(torch.cuda, "Event", MagicMock())
    sizes = ModelSizes("qwen2", blocks=1, embedding=32, feed_forward=32, heads=2, kv_heads=1, head_dim=32)
    path = write_tiny(tmp_path / "m.gguf", "qwen2", "Q8_0", sizes=sizes)
    return lambda blocks: Rig(path, blocks)


@pytest.mark.parametrize(("parallel", "drafted"), [(1, 1), (5, 8), (600, 600)])
def test_memory_is_planned_for_the_tables_of_slots(
    make_rig: Callable[[int], Rig], parallel: int, drafted: int
) -> None:
    """Of sequences in a long context each takes tokens and block tables, besides the cache."""
    rig = make_rig(2)
    rows, config = min(DECODE_ROWS[-1], drafted), rig.decoder.config
    graphs = CudaGraphs(rig.decoder, rig.cache, rows, slots=parallel)
    inputs = graphs.inputs
    held = [graphs.history, inputs.of_slots.tables, inputs.placed.tables]
    with_them, without = (CacheNeeds(config, 64, None, parallel, rows=count) for count in (drafted, 0))
    planned = with_them.table_bytes(CTX) - without.table_bytes(CTX)
    assert planned == sum(each.nbytes for each in held)


def ids_of(first: int, count: int) -> list[int]:
    return [(37 * i + 11) % 250 for i in range(first, first + count)]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # the interpreter takes long for rows
        for module in (graph_keys, static_inputs):
            monkeypatch.setattr(module, "PREFILL_ROWS", (8,))
            monkeypatch.setattr(module, "PREFILL_SEQUENCES", (1, 2, 4))


@pytest.mark.cuda_kernel
@pytest.mark.usefixtures("small_steps")
def test_chunks_of_several_sequences_come_to_what_they_do_eagerly(make_rig: Callable[[int], Rig]) -> None:
    """One that continues, one that begins, in blocks of any order; nothing but their rows is written."""
    rig = make_rig(5)
    rig.hold(4 * BLOCK_SIZE, 3)
    chunks = [SequenceRows(ids_of(3, 4), 3, [[4]]), SequenceRows(ids_of(50, 2), 0, [[1, 3]])]
    assert rig.compute(chunks) is None, "the first time is eager"
    ours = rig.compute(chunks)
    assert ours is not None and rig.graphs.captured == [GraphKey("prefill", *((16, 4) if ON_GPU else (8, 2)))]
    assert torch.equal(ours, rig.eagerly(chunks))
    assert torch.equal(rig.rows(rig.cache), rig.rows(rig.other))


@pytest.mark.cuda_kernel
@pytest.mark.usefixtures("small_steps")
def test_a_captured_step_that_holds_more_serves_fewer_chunks(make_rig: Callable[[int], Rig]) -> None:
    """But not that of one sequence alone, whose kernels are the same each time."""
    rig, larger = make_rig(5), GraphKey("prefill", *((32, 16) if ON_GPU else (8, 4)))
    rig.hold(4 * BLOCK_SIZE, 3)
    rig.graphs.capture(larger)
    chunks = [SequenceRows(ids_of(3, 4), 3, [[4]]), SequenceRows(ids_of(50, 2), 0, [[1, 3]])]
    assert rig.compute(chunks[:1]) is None
    ours = rig.compute(chunks)
    assert ours is not None and rig.graphs.captured == [larger]
    assert torch.equal(ours, rig.eagerly(chunks))
    assert torch.equal(rig.rows(rig.cache), rig.rows(rig.other))


@pytest.mark.cuda_kernel
@pytest.mark.usefixtures("small_steps")
def test_rows_given_as_their_tokens_embeddings_come_to_what_tokens_do(make_rig: Callable[[int], Rig]) -> None:
    """Captured, and eagerly; a later step of the same graph has no such rows."""
    rig = make_rig(5)
    rig.graphs = CudaGraphs(
        rig.decoder, rig.cache, 1, capture=capture_step if ON_GPU else rig.again, takes_embeds=True
    )
    runner, whole = ModelRunner(rig.decoder, rig.cache, rig.graphs), ids_of(3, 6)
    other = ModelRunner(rig.decoder, rig.other)
    values = rig.decoder.backend.embed(forward_batch("prefill", [SequenceRows(whole, 0, [[1]])], DEVICE),
                                       rig.decoder.token_embd)  # fmt: skip
    hidden = [7 if 1 <= n < 4 else token for n, token in enumerate(whole)]
    given = GivenRows([1, 2, 3], values[1:4])
    expected = other.forward("prefill", [SequenceRows(whole, 0, [[1]])]).clone()
    for _ in range(3):  # eager, captured, replayed
        ours = runner.forward("prefill", [SequenceRows(hidden, 0, [[1]])], given=given)
        assert torch.equal(ours, expected)
    assert len(rig.graphs.captured) == 1 and torch.equal(rig.rows(rig.cache), rig.rows(rig.other))
    assert not torch.equal(runner.forward("prefill", [SequenceRows(hidden, 0, [[1]])]), expected)
    assert torch.equal(runner.forward("prefill", [SequenceRows(whole, 0, [[1]])]), expected)


@pytest.mark.cuda_kernel
@pytest.mark.usefixtures("small_steps")
def test_rows_that_attend_both_ways_are_those_of_the_definition(make_rig: Callable[[int], Rig]) -> None:
    """Never captured: where the runs are is the host's."""
    rig = make_rig(5)
    capture = capture_step if ON_GPU else rig.again
    rig.graphs = CudaGraphs(rig.decoder, rig.cache, 1, capture=capture, takes_embeds=True)
    checkpoint = GGUFCheckpoint(rig.path)
    reference = Decoder(
        checkpoint.config, checkpoint.tensors, ReferenceBackend(torch.device("cpu")), CTX, CTX
    )
    expected = ModelRunner(reference, KVCache.allocate(checkpoint.config, CTX, torch.device("cpu")))
    values, ids = torch.randn(4, 32), ids_of(3, 7)
    causal = GivenRows([1, 2, 3, 4], values)
    both = GivenRows([1, 2, 3, 4], values, [(1, 5, 0)])
    ours, theirs = ModelRunner(rig.decoder, rig.cache, rig.graphs), list[Tensor]()
    for given in (causal, both):
        rows = [SequenceRows(ids, 0, [[1]])]
        theirs.append(expected.forward("prefill", rows, all_logits=True, given=given).clone())
        for _ in range(2):
            found = ours.forward("prefill", rows, given=given)
            assert nmse(found.cpu().double(), theirs[-1][-1:].double()) < 1e-4
    assert nmse(theirs[0], theirs[1]) > 1e-3 and len(rig.graphs.captured) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["this GPU's", "expanded weights"])
def test_long_chunks_on_the_kernels_of_a_real_size(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their attention has padding tiles, and their rows' bits follow from how many there are."""
    if way == "expanded weights":
        monkeypatch.setattr(workspace, "is_hopper", lambda *_: False)
    sizes = ModelSizes(
        blocks=2, embedding=256, feed_forward=512, heads=4, kv_heads=2, head_dim=128, context=512
    )
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", "llama", "Q8_0", sizes=sizes))
    decoder = Decoder(checkpoint.config, checkpoint.tensors, CudaBackend(DEVICE), 512, 512)
    caches = [KVCache.allocate(checkpoint.config, 512, DEVICE, pools=[CachePool(40)]) for _ in range(2)]
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for mine, other in zip(*(layer.tensors for layer in layers), strict=True):
            mine.copy_(other.normal_())
    graphs = CudaGraphs(decoder, caches[0], 1)
    tables = [[list(range(1, 11))], [list(range(12, 24))], [list(range(30, 34))]]
    lengths, starts = (300, 200, 7), (0, 150, 90)
    for cut in (0, 290, 100, 0):
        parts = list(zip(lengths, starts, tables, strict=True))
        chunks = [SequenceRows(ids_of(cut, length - min(cut, length - 5)), s, t) for length, s, t in parts]
        key = prefill_key([len(chunk.ids) for chunk in chunks])
        assert key is not None and (cut or key == GraphKey("prefill", 512, 4))
        expected = decoder.forward(forward_batch("prefill", chunks, DEVICE), caches[1].layers)
        assert nmse(graphs.replay(key, chunks), expected) < 1e-6


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([2], (16, 1)),
        ([16], (16, 1)),
        ([17], (32, 1)),
        ([60, 60, 9], (256, 4)),
        ([3] * 17, (64, 64)),
        ([3] * 65, None),  # more sequences than a step has
        ([1], None),  # few launches more than a step of decode
        ([90] * 12, None),  # the GPU does not wait for the host
        ([80], (128, 1)),
        ([96], (128, 1)),
    ],
)
def test_keys_of_prompts_are_rows_and_sequences(lengths: list[int], size: tuple[int, int] | None) -> None:
    assert prefill_key(lengths) == (None if size is None else GraphKey("prefill", *size))


@pytest.mark.parametrize(
    ("lengths", "whole"),
    [
        ([2048], True),
        ([1921], True),
        ([1920], False),
        ([1025], False),
        ([2049], False),
        ([1024, 1024], False),
    ],
)
def test_nearly_whole_chunks_of_one_prompt_are_captured_for_ranks(lengths: list[int], whole: bool) -> None:
    assert prefill_key(lengths) is None
    assert prefill_key(lengths, whole_chunks=True) == (GraphKey("prefill", 2048, 1) if whole else None)
    assert prefill_key([900], whole_chunks=True) == prefill_key([900])


def test_a_group_of_ranks_captures_its_whole_chunks_first_and_holds_their_rows() -> None:
    whole = GraphKey("prefill", WHOLE_CHUNK, 1)
    assert expected_keys(1, 2048, 512, whole_chunks=True) == [whole, *expected_keys(1, 2048, 512)]
    assert whole not in expected_keys(1, 1920, 512, whole_chunks=True)  # no chunk is so long
    inputs = PrefillInputs(4096, 2048, False, 1, torch.device("cpu"), 8, True, 2, whole_chunks=True)
    chunk = SequenceRows([9] * 1999, 2048, [list(range(127))], adapters=(1.0, 2.0))
    key = whole._replace(adapted=True)
    inputs.send(key, [chunk])
    batch = inputs.batch(key)
    assert batch.token_ids.shape == batch.positions.shape == (2048,) and batch.token_ids.sum() == 9 * 1999
    assert batch.positions[:1999].tolist() == list(range(2048, 4047))
    assert batch.adapters is not None and batch.adapters[:, :1999].unique(dim=1).tolist() == [[1.0], [2.0]]
    assert not batch.adapters[:, 1999:].any() and batch.embeds is not None
    assert batch.embeds.values.shape == (2048, 8)


def test_steps_whose_memory_was_replaced_are_captured_again(
    make_rig: Callable[[int], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, captured = make_rig(4), list[int]()
    moves = [0]
    monkeypatch.setattr(CudaBackend, "rooms_left", property(lambda _: moves[0]))

    def noted(_warm: Any, _step: Any, _pool: Any) -> CapturedStep:
        captured.append(moves[0])
        return CapturedStep(Again(lambda: torch.ones(4, 8), torch.ones(4, 8)), torch.ones(4, 8), 0)

    rig.graphs = CudaGraphs(rig.decoder, rig.cache, 1, capture=noted)
    chunk = [SequenceRows([5, 6], 0, [[1]])]
    answers = [rig.compute(chunk) is None for _ in range(3)]
    assert answers == [True, False, False] and captured == [0]
    small, large = decode_key(128, GREEDY), decode_key(192, GREEDY)
    rig.graphs.capture(small)
    rig.graphs.capture(large)
    moves[0] = 1
    assert rig.compute(chunk) is not None and captured == [0, 0, 0, 1]
    rig.graphs.capture(small)
    assert captured == [0, 0, 0, 1], "its memory stays where it is"
    rig.graphs.capture(large)
    assert captured == [0, 0, 0, 1, 1]


def test_memory_of_graphs_that_are_all_gone_is_not_used_again(
    make_rig: Callable[[int], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a layer that drafts, which has captured prompts alone."""
    rig, pools, moves = make_rig(4), list[Any](), [0]
    monkeypatch.setattr(CudaBackend, "rooms_left", property(lambda _: moves[0]))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def noted(_warm: Any, _step: Any, pool: Any) -> CapturedStep:
        pools.append(pool)
        return CapturedStep(Again(lambda: torch.ones(4, 8), torch.ones(4, 8)), torch.ones(4, 8), 0)

    rig.graphs = CudaGraphs(rig.decoder, rig.cache, 1, capture=noted)
    rig.graphs._history = MagicMock(is_cuda=True)
    prompts = [GraphKey("prefill", rows, 1) for rows in (32, 16)]
    for key in prompts:
        rig.graphs.capture(key)
    assert pools[0] is pools[1] is not None
    moves[0] = 1
    rig.graphs.capture(prompts[0])
    assert pools[2] is not pools[1]
    rig.graphs.capture(prompts[1])
    assert pools[3] is pools[2]


def test_a_step_that_is_captured_ahead_rounds_as_a_prompts_does(
    make_rig: Callable[[int], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are rounded once in prefill, up to the output matrix."""
    rig, phases = make_rig(4), list[str]()

    def noted(batch: ForwardBatch, *_: object) -> Tensor:
        phases.append(batch.phase)
        return torch.zeros(1, 8)

    monkeypatch.setattr(rig.decoder, "forward", noted)
    rig.graphs.run_padding(GraphKey("prefill", 16, 4))
    assert phases == ["prefill"]


def test_static_inputs_hold_what_a_batch_does_and_where_the_padding_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(static_inputs, "tile_rows", lambda *_: 16)
    inputs = PrefillInputs(CTX, 40, False, 1, torch.device("cpu"))
    chunks = [SequenceRows(ids_of(0, 20), 30, [[2, 5]]), SequenceRows(ids_of(3, 33), 0, [[1, 0]])]
    key = GraphKey("prefill", 64, 4)
    inputs.send(GraphKey("prefill", 1024, 16), [SequenceRows([9] * 1000, 0, [[3, 4]])])
    inputs.send(key, [SequenceRows([9] * 64, 0, [[3, 4]])])
    inputs.send(key, chunks)
    expected = forward_batch("prefill", chunks, torch.device("cpu"))
    cut = cut_tiles(expected, 16)
    batch, tiles = inputs.batch(key), inputs.batch(key).tiles
    assert tiles is not None and batch.logits_rows is not None
    assert batch.positions[:53].equal(expected.positions) and tiles.sequences[:53].equal(cut.sequences)
    count = cut.tiles.shape[0]
    assert tiles.tiles[:count].equal(cut.tiles)
    assert tiles.tiles.shape == (7, TILE_FIELDS) and not tiles.tiles[count:].any()
    assert batch.token_ids[:53].tolist() == [*chunks[0].ids, *chunks[1].ids]
    assert batch.logits_rows.tolist() == [19, 52, 0, 0]
    padding = PREFILL_SEQUENCES[-1]
    assert set(tiles.sequences[53:].tolist()) == {padding} and batch.positions[53:].max() < BLOCK_SIZE
    assert batch.block_tables[0, padding].tolist() == [PADDING_BLOCK] * STATE_ENTRIES
    assert batch.block_tables[0, :2, :2].tolist() == [[2, 5], [1, 0]]


def test_expected_keys_are_those_that_a_server_comes_to() -> None:
    prompts, decode = expected_keys(3, CTX, 512)[:5], expected_keys(3, CTX, 512)[5:]
    assert prompts == [
        GraphKey("prefill", *size) for size in ((512, 16), (512, 4), (64, 1), (32, 1), (16, 1))
    ]
    assert decode == [
        *(decode_key(rows, kind) for kind in (GREEDY, SamplingKind(64, False, False)) for rows in (4, 2, 1)),
        *(decode_key(4, kind) for kind in (SamplingKind(64, True, False), SamplingKind(1, True, False))),
    ]


def test_rarer_keys_are_captured_one_by_one_until_all_are_there(make_rig: Callable[[int], Rig]) -> None:
    rig = make_rig(5)
    graphs = CudaGraphs(rig.decoder, rig.cache, 2, capture=rig.again)
    graphs.capture(GraphKey("prefill", 16, 4))
    added = []
    while graphs.capture_next():
        (new,) = set(graphs.captured) - {*added, GraphKey("prefill", 16, 4)}
        added.append(new)
    biased = [SamplingKind(64, True, False), SamplingKind(1, True, False)]
    assert added == [
        *(GraphKey("prefill", *size) for size in ((32, 4), (64, 4), (16, 16), (32, 16), (64, 16))),
        *(decode_key(rows, kind) for kind in biased for rows in (2, 1)),
    ]
    alone = CudaGraphs(rig.decoder, rig.cache, 1, capture=rig.again)
    assert not alone.capture_next()


@pytest.mark.cuda_kernel
@pytest.mark.parametrize(
    ("drafts", "captured", "sizes"),
    [(False, [], {1, 2}), (True, [], {1, 4}), (False, [4], {1, 4}), (True, [4], {1, 4})],
    ids=["their own", "drafts", "larger", "larger, drafts"],
)
def test_captured_decode_steps_choose_the_tokens_of_eager_ones(
    drafts: bool, captured: list[int], sizes: set[int], make_rig: Callable[[int], Rig]
) -> None:
    """Two sequences in blocks of any order, one of which comes later; with drafts that are right, and that are not. A
    captured step of more rows serves both too, but not one alone."""
    rig = make_rig(5)
    rig.graphs = CudaGraphs(
        rig.decoder, rig.cache, 4, shares_sequences=drafts, capture=capture_step if ON_GPU else rig.again
    )
    for rows in captured:
        rig.graphs.capture(decode_key(rows, GREEDY, drafts))
    runner = ModelRunner(rig.decoder, rig.cache, rig.graphs, DeviceDecoder(rig.graphs))
    eager = ModelRunner(rig.decoder, rig.other)
    for cache in (rig.cache, rig.other):
        for tensor in cache.layers[0].tensors:
            tensor.fill_(0.25)
    params = SamplingParams(temperature=0, seed=1, max_tokens=8, ignore_eos=True)

    def sequence(ids: list[int], blocks: list[int]) -> Sequence:
        sampler = Sampler(params, rig.decoder.config.vocab_size)
        made = Sequence(ids, params, sampler, TextStream(lambda _: b""), frozenset(), CTX)
        made.num_cached_tokens, made.block_tables = len(ids) - 1, (blocks,)
        return made

    def step(used: ModelRunner, sequences: list[Sequence]) -> None:
        for one, result in zip(sequences, decode(used, sequences), strict=True):
            draft, one.draft = one.draft, []
            taken = result.first if isinstance(result, Verified) else result
            for number in range(len(draft) + 1):
                assert isinstance(taken, Sample)
                one.num_cached_tokens += 1
                one.token_ids.append(taken.token)
                if number == len(draft) or taken.token != draft[number]:
                    break
                assert isinstance(result, Verified)
                taken = result.later(number + 1)

    texts = []
    for used in (eager, runner):
        first, second = sequence([5, 6, 7], [4]), sequence([9], [1, 3])
        with_slots([first, second])
        step(used, [first])
        if used is runner and drafts:
            first.draft = [texts[0][0][4], 0]
        step(used, [first, second])
        if used is eager and drafts:
            step(used, [first])
        texts.append((first.token_ids, second.token_ids))
    for ours, expected in zip(*reversed(texts), strict=True):
        assert ours[: len(expected)] == expected
    assert set(rig.graphs.captured) == {decode_key(rows, GREEDY, drafts) for rows in sizes}


FIRST = [
    SamplingParams(temperature=0, seed=1, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, presence_penalty=0.6, logit_bias={9: 1.5, 11: 1.0}),
    SamplingParams(temperature=1.3, top_k=0, top_p=1, min_p=0, seed=4),
]


@pytest.mark.cuda_kernel
@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("params", FIRST, ids=["greedy", "penalties and bias", "any token"])
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
def test_first_tokens_are_those_of_the_host_and_the_next_steps_input(
    captures: bool, params: SamplingParams, make_rig: Callable[[int], Rig]
) -> None:
    """Of two prompts that end, one of them sampled on the host, and one that does not."""
    rig = make_rig(5)
    rig.graphs = CudaGraphs(rig.decoder, rig.cache, 4, capture=capture_step if ON_GPU else rig.again)
    if captures:
        rig.graphs.capture(GraphKey("prefill", *((16, 4) if ON_GPU else (8, 4))))
    runner = ModelRunner(rig.decoder, rig.cache, rig.graphs, DeviceDecoder(rig.graphs))
    eager = ModelRunner(rig.decoder, rig.other)
    logged, chunks = replace(params, logprobs=1), ([3], [5, 6, 7], [9, 4])
    texts = []
    for used in (eager, runner):
        made = []
        for number, (ids, own) in enumerate(
            zip(([3, 8], *chunks[1:]), (params, params, logged), strict=True)
        ):
            sampler = Sampler(own, rig.decoder.config.vocab_size, number)
            made.append(Sequence(list(ids), own, sampler, TextStream(lambda _: b""), frozenset(), CTX))
            made[-1].block_tables = ([(4, 1, 2)[number]],)
        with_slots(made)
        pairs = zip(chunks, made, strict=True)
        parts = [SequenceRows(chunk, 0, each.block_tables) for chunk, each in pairs]
        step = used.launch(StepPlan.prefill(made, parts))
        for each, part in zip(made, parts, strict=True):
            each.num_cached_tokens = part.end
        if used is runner:  # before the first token is read
            assert [each.slot.has_token for each in made] == [False, True, False] and step.may_follow
            behind = used.launch(StepPlan.decode([made[1]]))
        nothing, *first = step.results()
        tokens = [sample.token for sample in first if isinstance(sample, Sample)]
        assert nothing is None and len(tokens) == 2
        for each, token in zip(made[1:], tokens, strict=True):
            each.token_ids.append(token)
        if used is eager:
            behind = used.launch(StepPlan.decode([made[1]]))
        (second,) = behind.results()
        assert isinstance(second, Sample)
        texts.append([*tokens, second.token])
    assert texts[0] == texts[1]


@pytest.mark.cuda_kernel
@pytest.mark.parametrize("ranks", [False, True])
def test_settings_are_sent_while_a_prompt_is_computed(
    ranks: bool, make_rig: Callable[[int], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks sample in the step itself, so they get them before it."""
    rig, log = make_rig(4), list[str]()
    graphs = rig.graphs
    if ranks:
        graphs.together = lambda message: nullcontext(log.append(type(message).__name__))
    sample = graphs._sample_ends
    monkeypatch.setattr(graphs, "_sample_ends", lambda *given: (log.append("sample"), sample(*given)))
    replay = graphs.decoder.forward
    monkeypatch.setattr(graphs.decoder, "forward", lambda *given: (log.append("rows"), replay(*given))[1])
    chunk = SequenceRows([5, 6, 7], 0, [[1]])

    def configure() -> None:
        log.append("settings")
        graphs.set_sampling(0, GREEDY, SamplingSettings(temperature=0), {}, [], 0)

    graphs.prefill([chunk], [0], GREEDY, configure=configure)
    assert log == (["settings", "PlannedStep", "rows", "sample"] if ranks else ["rows", "settings", "sample"])


@pytest.mark.cuda_kernel
def test_a_draft_is_verified_where_it_lies_on_the_device(make_rig: Callable[[int], Rig]) -> None:
    """By steps of the same weights in another cache, whose tokens the host reads with the results."""
    rig = make_rig(5)
    capture = capture_step if ON_GPU else rig.again
    for cache in (rig.cache, rig.other):
        for tensor in cache.layers[0].tensors:
            tensor.fill_(0.25)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
    vocab = rig.decoder.config.vocab_size
    rig.graphs = CudaGraphs(rig.decoder, rig.cache, 4, shares_sequences=True, capture=capture)
    drafting = CudaGraphs(rig.decoder, rig.other, 2, shares_sequences=True, pending=3, capture=capture)
    steps = DeviceDraftSteps(drafting, rig.graphs)
    runner = ModelRunner(rig.decoder, rig.cache, rig.graphs, DeviceDecoder(rig.graphs))
    sampler = Sampler(params, vocab)
    one = Sequence([5, 6, 7], params, sampler, TextStream(lambda _: b""), frozenset(), CTX)
    one.num_cached_tokens, one.block_tables = 2, ([4],)
    with_slots([one])
    accepted = []
    for _ in range(2):
        length = len(one.token_ids)
        job = DraftJob([one.token_ids[-1]], length - 1, [4], 2, list(one.token_ids), Sampler(params, vocab))
        (one.draft,) = steps.draft([job])
        (result,) = decode(runner, [one])
        assert isinstance(one.draft, Drafted) and isinstance(result, Verified)
        taken = [result.first, *(result.later(number) for number in (1, 2))]
        tokens = [each.token for each in taken if isinstance(each, Sample)]
        accepted.append(tokens[:2] == list(one.draft))
        one.token_ids += tokens
        one.num_cached_tokens = len(one.token_ids) - 1
        for mine, other in zip(rig.cache.layers[0].tensors, rig.other.layers[0].tensors, strict=True):
            other.copy_(mine)
    assert accepted == [True, True] and len(one.token_ids) == 9


def test_a_step_that_comes_often_is_captured_though_a_larger_one_is_there(
    make_rig: Callable[[int], Rig],
) -> None:
    rig, most = make_rig(4), graph_keys.MOST_PADDING
    replayed = list[GraphKey]()

    def noted(_warm: Any, _step: Any, _pool: Any) -> CapturedStep:
        logits, key = torch.ones(4, 8), captured[len(rig.graphs.captured)]
        return CapturedStep(Again(lambda: replayed.append(key) or logits, logits), logits, 0)

    biased = SamplingKind(1, True, False)
    captured = [decode_key(64, GREEDY), decode_key(16, GREEDY), decode_key(8, biased)]
    captured += [GraphKey("prefill", 512, 16), GraphKey("prefill", 512, 4), GraphKey("prefill", 64, 1)]
    rig.graphs = CudaGraphs(rig.decoder, rig.cache, 64, capture=noted)
    for key in captured[:]:
        rig.graphs.capture(key)
    captured += [(small := decode_key(8, GREEDY)), (other := decode_key(32, biased))]
    for _ in range(most // 8 + 2):
        rig.graphs.launch([Slot(0)] * small.rows, {}, GREEDY)
    assert replayed == [captured[1]] * (most // 8) + [small] * 2, (
        "first by that of 16 rows, of the same sampling"
    )
    rig.graphs.launch([Slot(0)] * other.rows, {}, biased)
    assert replayed[-1] == other, "there is none of more rows"
    chunks = [SequenceRows([1] * count, 0, [[1, 2, 3]]) for count in (60, 60, 9)]
    found = [rig.graphs.lookup("prefill", chunks) for _ in range(most // 256 + 1)]
    assert found == [captured[4]] * (most // 256) + [GraphKey("prefill", 256, 4)]


def with_eagle(rig: Rig, folder: Path) -> Tensor:
    """Has an EAGLE-3 draft model take the place of a rig's model, over rows of it that are made up: these."""
    checkpoint = open_checkpoint(folder / "m.gguf")
    kind = Eagle(width=32, drafted=64, layers=(0, 1))
    eagle = open_eagle(kind.write(folder / "draft", 32, checkpoint.config.vocab_size), checkpoint)
    assert eagle is not None
    rig.cache.keep_hidden(32, torch.float32, DEVICE)
    hidden = rig.cache.hidden
    assert hidden is not None
    hidden.copy_(torch.linspace(-2, 2, hidden.numel()).view(hidden.shape))
    rig.decoder.fused = FusedRows.load(eagle.fusion.layers, eagle.fusion, hidden, rig.decoder.backend)
    rig.decoder = EagleDecoder(eagle.config, eagle.tensors, rig.decoder, eagle.drafted, CTX)
    rig.cache, rig.other = (
        KVCache.allocate(eagle.config, CTX, DEVICE, pools=[CachePool(5)]) for _ in range(2)
    )
    for cache in (rig.cache, rig.other):
        for tensor in cache.layers[0].tensors:
            tensor.zero_()
            tensor[4 * BLOCK_SIZE : 4 * BLOCK_SIZE + 2] = torch.linspace(-1, 1, tensor.shape[-1])
    return hidden


@pytest.mark.cuda_kernel
@pytest.mark.usefixtures("small_steps")
def test_chunks_of_an_eagle_draft_model_come_to_what_they_do_eagerly(
    make_rig: Callable[[int], Rig], tmp_path: Path
) -> None:
    """Whose keys and values lie a position earlier: of one that continues, and of one that begins."""
    rig = make_rig(5)
    with_eagle(rig, tmp_path)
    rig.graphs = CudaGraphs(rig.decoder, rig.cache, 1, capture=capture_step if ON_GPU else rig.again)
    chunks = [SequenceRows(ids_of(3, 4), 3, [[4]]), SequenceRows(ids_of(50, 2), 1, [[1, 3]])]
    assert rig.compute(chunks) is None, "the first time is eager"
    ours = rig.compute(chunks)
    assert ours is not None and len(rig.graphs.captured) == 1
    assert torch.equal(ours, rig.eagerly(chunks))
    assert torch.equal(rig.rows(rig.cache), rig.rows(rig.other))
    written = rig.rows(rig.cache).view(2, 5, BLOCK_SIZE, -1).ne(0).any(-1).any(0)
    assert written[0].nonzero().flatten().tolist() == [0, 1], "of tokens 1 and 2"
    assert written[3].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5], "of tokens up to 6"


@pytest.mark.cuda_kernel
def test_drafts_of_an_eagle_draft_model_are_those_of_eager_steps(
    make_rig: Callable[[int], Rig], tmp_path: Path
) -> None:
    """Over its own rows, which each step writes for the next one; after a token that it had missed."""
    rig = make_rig(5)
    hidden = with_eagle(rig, tmp_path)
    capture = capture_step if ON_GPU else rig.again
    drafting = CudaGraphs(rig.decoder, rig.cache, 2, shares_sequences=True, pending=3, capture=capture)
    before, vocab = hidden.clone(), rig.decoder.config.vocab_size
    for temperature in (0.0, 1.5):
        params = SamplingParams(temperature=temperature, seed=1, top_k=0, top_p=1, min_p=0)
        found = []
        for steps in (DeviceDraftSteps(drafting), HostDraftSteps(ModelRunner(rig.decoder, rig.other))):
            hidden.copy_(before)
            job = DraftJob([60, 7], 3, [4], 3, [9, 8, 5, 60, 7], Sampler(params, vocab))
            found.append([list(draft) for draft in steps.draft([job])])
            changed = (hidden != before).any(1).nonzero().flatten()
            assert changed.tolist() == [4 * BLOCK_SIZE + position for position in (4, 5, 6)]
        assert found[0] == found[1] and len(set(found[0][0])) > 1
