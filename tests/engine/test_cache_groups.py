"""A model of two groups of layers, one with a window: to release the blocks behind it changes no token and no bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, CacheType
from quengine.llm import LLM
from quengine.loading import placement
from quengine.models.blocks.attention import Attention
from quengine.models.config import CacheGroup, ModelConfig
from quengine.models.layer_tables import LayerTables
from quengine.request.output import Completion
from quengine.request.sampling_params import SamplingParams
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

CTX, WINDOW, CHUNK = 384, 50, 32
LAYERS = 4
PROMPTS = [[(n * i + 7) % 250 for i in range(n)] for n in (40, 1, 130, 100, 210, 33)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, logprobs=2)
FEWER = replace(PARAMS, max_tokens=40)  # more than a block behind every prompt
OF_REFERENCE = replace(PARAMS, max_tokens=52)  # a prompt of 33 tokens leaves a block behind its window


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(
        embedding=64, feed_forward=64, heads=2, kv_heads=1, head_dim=32, context=CTX, blocks=LAYERS
    )
    return write_tiny(tmp_path_factory.mktemp("groups") / "m.gguf", kind="Q8_0", sizes=sizes, seed=4)


Load = Callable[..., Any]


@pytest.fixture
def params(request: pytest.FixtureRequest) -> SamplingParams:
    """Fewer tokens of the reference backend, whose steps take ten times as long."""
    return PARAMS if request.node.callspec.params["load"] == "auto" else OF_REFERENCE


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    """Fewer for the reference backend: a token, more than two windows, and a block with a token."""
    return PROMPTS if request.node.callspec.params["load"] == "auto" else [PROMPTS[1], PROMPTS[2], PROMPTS[5]]


@pytest.fixture(params=["auto", "reference"])
def load(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """The model with layers 1 and 3 seeing WINDOW positions; their cache is released behind it, or kept."""

    made = LayerTables.attention

    def attention(self: LayerTables, layer: int, declared: Attention, eps: float) -> AttentionSpec:
        shared = made(self, layer, declared, eps)
        if layer % 2:
            band = causal_mask_band(CHUNK, CTX, WINDOW)
            shared = replace(shared, window=WINDOW, mask_band=band, cache_group=1)
        return shared

    monkeypatch.setattr(LayerTables, "attention", attention)

    @contextmanager
    def loaded(releases: bool, **options: Any) -> Iterator[LLM]:
        groups = (CacheGroup(None, (0, 2)), CacheGroup(WINDOW if releases else None, (1, 3)))
        monkeypatch.setattr(ModelConfig, "cache_groups", property(lambda _: groups))
        with LLM(path, "cpu", CTX, 1, request.param, chunk_size=CHUNK, **options) as llm:
            yield llm

    return loaded


def same(got: list[Completion], expected: list[Completion]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.tokens == theirs.tokens and ours.logprobs == theirs.logprobs


@pytest.mark.parametrize(
    ("load", "cache_type"),
    [("auto", "f16"), ("auto", "q8_0"), ("reference", "q8_0"), ("auto", "q4_0")],
    indirect=["load"],
)
def test_tokens_and_their_bits_are_those_of_a_cache_that_keeps_everything(
    load: Load, cache_type: CacheType, params: SamplingParams, prompts: list[list[int]]
) -> None:
    with load(False, cache_type=cache_type) as llm:
        expected = [llm.generate(prompt, params)[0] for prompt in prompts]
        logits = [llm.logits(PROMPTS[4], decode=decode) for decode in (False, True)]
        bytes_kept = llm.loaded.cache.nbytes
    with load(True, cache_type=cache_type) as llm:
        assert llm.loaded.cache.pools == (CachePool(12, None, CHUNK), CachePool(4, WINDOW, CHUNK))
        assert llm.loaded.cache.nbytes == bytes_kept * (13 + 5) // 26
        same([llm.generate(prompt, params)[0] for prompt in prompts], expected)
        for decode, wanted in zip((False, True), logits, strict=True):
            assert torch.equal(llm.logits(PROMPTS[4], decode=decode), wanted)
    with load(True, cache_type=cache_type, parallel=4) as llm:
        same(llm.generate(prompts, params), expected)


def test_tokens_behind_a_shared_prefix_have_their_bits(load: Load, prompts: list[list[int]]) -> None:
    longer = [[*prompt, 5, 6, 7] for prompt in prompts]
    with load(False, deterministic=True) as llm:
        expected = [llm.generate(prompt, FEWER)[0] for prompt in prompts]
        behind = [llm.generate(prompt, FEWER)[0] for prompt in longer]
    with load(True, deterministic=True, parallel=3) as llm:
        for prompt, more, wanted, wanted_behind in zip(prompts, longer, expected, behind, strict=True):
            same(llm.generate(prompt, FEWER), [wanted])
            again = llm.generate([prompt, more, prompt], FEWER)
            same(again, [wanted, wanted_behind, wanted])
            shared = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert shared <= again[0].timings.cached_tokens < len(prompt)
            assert shared <= again[1].timings.cached_tokens < len(more)


@pytest.mark.parametrize(("blocks", "length"), [((8, 16), 33), ((48, 4), 15)])
def test_preempted_sequences_get_their_tokens(
    load: Load, params: SamplingParams, blocks: tuple[int, int], length: int
) -> None:
    prompts = [[(3 * i + n) % 250 for i in range(length)] for n in range(4)]
    with load(False, deterministic=True) as llm:
        expected = [llm.generate(prompt, params)[0] for prompt in prompts]
    with load(True, deterministic=True, parallel=4) as llm:
        pools = zip(llm.loaded.cache.pools, blocks, strict=True)
        llm.loaded.cache.pools = tuple(replace(pool, num_blocks=count) for pool, count in pools)
        llm.scheduler = llm._make_scheduler()
        preempted, preempt = [], llm.scheduler._preempt
        llm.scheduler._preempt = lambda sequence: (preempted.append(sequence), preempt(sequence))[1]
        same(llm.generate(prompts, params), expected)
        assert preempted and llm.scheduler.blocks.num_used == 0


@pytest.mark.parametrize("drafts", ["look-up", "model"])
def test_drafts_that_are_rolled_back_leave_what_the_window_sees(load: Load, path: Path, drafts: str) -> None:
    prompt = [0, 1, 2] * 40
    options = {"draft_ngram": 3} if drafts == "look-up" else {"draft_model": path}
    with load(False) as llm:
        expected = llm.generate([prompt, PROMPTS[4]], PARAMS)
    with load(True, parallel=2, **options) as llm:
        assert [pool.window for pool in llm.loaded.cache.pools] == [None, WINDOW]
        got = llm.generate([prompt, PROMPTS[4]], PARAMS)
        assert [ours.tokens for ours in got] == [theirs.tokens for theirs in expected]
        assert sum(ours.timings.drafted_tokens for ours in got) > 0 and llm.scheduler.blocks.num_used == 0


def test_a_sequence_owns_its_windows_blocks_and_no_others(load: Load) -> None:
    with load(True) as llm:
        stream = llm.stream(PROMPTS[4], PARAMS)
        for _ in stream:
            every, windowed = stream.sequence.block_tables or ([], [])
            owned = [block for block in windowed if block != PADDING_BLOCK]
            assert len(every) == len(windowed) and len(owned) <= 4
        cached = stream.sequence.num_cached_tokens
        assert cached > 6 * BLOCK_SIZE and llm.scheduler.blocks.num_used == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q4_0"])
def test_a_gpu_reads_nothing_behind_the_window_of_a_single_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_type: CacheType
) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=64, heads=2, kv_heads=1, head_dim=32, context=CTX, blocks=2)
    changes = {"llama.attention.sliding_window": WINDOW}
    path = write_tiny(tmp_path / "m.gguf", kind="Q8_0", sizes=sizes, seed=4, changes=changes)
    found = []
    for num_blocks in (4, CTX // BLOCK_SIZE):
        if num_blocks > 4:
            monkeypatch.setattr(placement, "choose_pools", lambda *_: [CachePool(CTX // BLOCK_SIZE)])
        with LLM(path, "cuda", CTX, chunk_size=CHUNK, cache_type=cache_type) as llm:
            assert llm.loaded.cache.pools[0].num_blocks == num_blocks
            found.append([llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS])
    same(*found)
