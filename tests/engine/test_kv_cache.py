"""The key/value cache in each type: what it takes, what it gives back, and that a run with it is the same run."""

import dataclasses

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.errors import EngineError
from quengine.kernels.hadamard import hadamard
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_TYPES, CacheType, row_bytes
from quengine.kernels.kv.kv_rows import allocate_layer, read_rows, write_rows
from quengine.kv_cache import KVCache
from quengine.llm import LLM
from quengine.memory import kv_cache_bytes
from quengine.request.sampling_params import SamplingParams
from tests.gguf_builder import ModelSizes
from tests.tiny_models import small_config, write_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=128, feed_forward=128, head_dim=32)
    return str(write_tiny(tmp_path_factory.mktemp("cache") / "wide.gguf", kind="Q8_0", sizes=sizes))


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_what_is_allocated_is_what_was_estimated(cache_type: CacheType) -> None:
    config = dataclasses.replace(small_config(), head_dim=64)
    cache = KVCache.allocate(config, 100, torch.device("cpu"), cache_type)
    # Whole blocks, and the padding block.
    assert cache.pools == (CachePool(4),) and cache.nbytes == kv_cache_bytes(
        config, 5 * BLOCK_SIZE, cache_type
    )
    assert row_bytes(cache_type, 64) == {"f16": 128, "q8_0": 68, "q4_0": 36}[cache_type]


def test_the_bytes_that_fewer_sequences_spare_are_those_of_a_smaller_cache() -> None:
    config = dataclasses.replace(small_config(), head_dim=64)
    three, two = (
        KVCache.allocate(config, 100, torch.device("cpu"), pools=[CachePool(4 * n)]) for n in (3, 2)
    )
    assert three.nbytes - three.spare_bytes(2, 100) == two.nbytes
    assert three.spare_bytes(3, 100) == three.spare_bytes(4, 100) == 0


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_rows_come_back_rounded_and_others_stay(cache_type: CacheType) -> None:
    config = dataclasses.replace(small_config(), head_dim=64)
    layer = KVCache.allocate(config, 20, torch.device("cpu"), cache_type).layers[0]
    for tensor in layer.tensors:
        tensor.fill_(1)
    k, v = torch.randn(2, 5, 2, 64, generator=torch.Generator().manual_seed(2))
    write_rows(layer, 7, k, v)
    near = {"f16": 2e-3, "q8_0": 4 / 127, "q4_0": 4 / 8}[cache_type]
    for got, wanted in zip(read_rows(layer, slice(7, 12)), (k, v), strict=True):
        wanted = hadamard(wanted) if layer.format.hadamard else wanted
        torch.testing.assert_close(got, wanted, rtol=0, atol=near)
    for rows in (slice(0, 7), slice(12, 20)):
        assert all(bool((tensor[rows] == 1).all()) for tensor in layer.tensors)


def test_a_head_that_is_no_whole_number_of_groups_is_refused() -> None:
    with pytest.raises(EngineError, match="multiple of 32, and this model's is 16; use --cache-type f16"):
        KVCache.allocate(small_config(), 8, torch.device("cpu"), "q8_0")


def test_latents_are_not_stored_in_4_bits() -> None:
    with pytest.raises(EngineError, match=r"keeps one latent for all; use --cache-type f16 or q8_0$"):
        allocate_layer(32, 1, 64, "cpu", "q4_0", latent=True)


def test_an_unknown_type_is_refused(model: str) -> None:
    with pytest.raises(EngineError, match="cache type 'q5_0': must be one of f16, q8_0, q4_0"):
        LLM(model, "cpu", cache_type="q5_0")  # type: ignore[arg-type]


@pytest.mark.parametrize(("cache_type", "most"), [("q8_0", 1e-4), ("q4_0", 2e-3)])
def test_backends_agree_on_a_cache_of_codes(model: str, cache_type: CacheType, most: float) -> None:
    ids = list(range(5, 45))
    logits = {}
    for backend in ("auto", "reference"):
        with LLM(model, "cpu", backend=backend, cache_type=cache_type, chunk_size=16) as llm:
            logits[backend] = llm.logits(ids), llm.logits(ids, decode=True)
    (prefill, decode), (expected, _) = logits["auto"], logits["reference"]
    for got in (prefill, decode):
        assert float((got - expected).square().sum() / expected.square().sum()) < most
    with LLM(model, "cpu", cache_type="f16") as llm:
        assert not torch.equal(llm.logits(ids), prefill), "the type made no difference"


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_reused_prefix_changes_nothing(model: str, cache_type: CacheType) -> None:
    first, second = list(range(3, 60)), [*range(3, 50), 77, 78]
    with LLM(model, "cpu", cache_type=cache_type, reuse_prefix=True) as llm:
        llm.stream(first, GREEDY).finish()
        reused = llm.stream(second, GREEDY).finish()
    with LLM(model, "cpu", cache_type=cache_type) as llm:
        anew = llm.stream(second, GREEDY).finish()
    assert reused.timings.cached_tokens == 47 and anew.timings.cached_tokens == 0
    assert reused.tokens == anew.tokens
