"""Checkpoints of states that had to make room: they move to host memory, and prompts go on from there, bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.block_manager import BlockManager, CheckpointCounts, extend_keys
from quengine.block_pool import BlockCopy, CachePool
from quengine.context.prefix_file import PrefixFiles
from quengine.context.saved_prefix import restore_prefix, save_prefix
from quengine.errors import CannotRunError
from quengine.kv_cache import ColdStates
from quengine.memory import CacheNeeds, cold_checkpoints, cold_slab
from quengine.models.synthetic.presets import synthetic_preset
from tests.engine.states import states_that_count, write_small
from tests.engine.test_state_bits import first_logits
from tests.engine.test_states_ahead import ahead

FEW = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
PROMPTS = [[n, *((7 * i + 3) % 250 for i in range(80))] for n in range(6)]
GIB = 2**30


@pytest.fixture(scope="module", autouse=True)
def counting() -> Iterator[None]:
    with states_that_count():
        yield


@pytest.fixture(scope="module", params=["lfm2-tiny", "qwen3.5-tiny"])
def tiny(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The one is computed by the definition, which counts, the other by the CPU's kernels."""
    return write_small(tmp_path_factory.mktemp("cold") / f"{request.param}.gguf", request.param)


def with_cold(llm: LLM, cold: int) -> None:
    """As if the states were on a device of its own, with host memory for so many of them."""
    cache = llm.loaded.cache
    cache.pools = tuple(replace(pool, cold=cold) if pool.is_state else pool for pool in cache.pools)
    llm.scheduler = llm._make_scheduler()


@contextmanager
def engine(tiny: Path, cold: int, checkpoints: int, **options: object) -> Iterator[LLM]:
    backend = "reference" if "lfm2" in tiny.name else "auto"
    options = {
        "ctx_size": 512,
        "backend": backend,
        "reuse_prefix": True,
        "state_checkpoints": checkpoints,
        **options,
    }
    with LLM(tiny, "cpu", **options) as llm:  # type: ignore[arg-type]
        with_cold(llm, cold)
        yield llm
        assert all(pool.num_free == pool.shape.num_blocks for pool in llm.scheduler.blocks._pools)


def cached(llm: LLM, prompt: list[int]) -> int:
    return llm.generate(prompt, FEW)[0].timings.cached_tokens


def test_prompts_go_on_from_states_in_host_memory(tiny: Path) -> None:
    with engine(tiny, 16, 1, parallel=2) as llm:
        fresh = [first_logits(llm, prompt, 5) for prompt in PROMPTS]
        assert [found for *_, found in fresh] == [0] * 6
        counts = llm.scheduler.blocks.checkpoints
        assert counts.on_device + counts.in_host == 6 and counts.in_host == counts.to_host >= 3
        again = [first_logits(llm, prompt, 5) for prompt in PROMPTS]
        assert [found for *_, found in again] == [64] * 6, "of 81 tokens the whole blocks"
        assert llm.scheduler.blocks.checkpoints.from_host >= 3
    for (logits, tokens, _), (others, same, _) in zip(fresh, again, strict=True):
        assert torch.equal(logits, others) and tokens == same


def test_the_least_recently_used_states_leave_host_memory_first(tiny: Path) -> None:
    with engine(tiny, 2, 1, deterministic=True) as llm:  # which keeps no copies of running sequences
        for prompt in PROMPTS[:4]:
            cached(llm, prompt)
        assert llm.scheduler.blocks.checkpoints[:2] == (1, 2)
        assert cached(llm, PROMPTS[1]) == 64
        cached(llm, PROMPTS[4])  # that of PROMPTS[3] moves to where that of PROMPTS[2] was
        assert llm.scheduler.blocks.checkpoints[:2] == (1, 2)
        assert [cached(llm, PROMPTS[n]) for n in (1, 3, 4)] == [64, 64, 64]
        assert cached(llm, PROMPTS[2]) == 0


def test_what_is_discarded_is_in_no_memory(tiny: Path) -> None:
    with engine(tiny, 4, 1) as llm:
        for prompt in PROMPTS[:4]:
            cached(llm, prompt)
        keys = list[bytes]()
        extend_keys(keys, PROMPTS[0])
        (pool,) = llm.scheduler.blocks._states
        assert keys[1] in pool.cold
        llm.scheduler.blocks.discard(keys)
        assert cached(llm, PROMPTS[0]) == 0
        llm.scheduler.reset()
        assert llm.scheduler.blocks.checkpoints[:2] == (0, 0)
        assert [cached(llm, prompt) for prompt in PROMPTS] == [0] * 6


def test_a_conversation_in_host_memory_is_saved_and_restored(tiny: Path, tmp_path: Path) -> None:
    with engine(tiny, 4, 1) as llm:
        expected = first_logits(llm, PROMPTS[0], 5)
        for prompt in PROMPTS[1:4]:
            cached(llm, prompt)
        saved = save_prefix(llm.scheduler, llm.model_config, PROMPTS[0])
        assert saved.reusable_tokens == 64
        PrefixFiles(llm.loaded, "f16", False).write(tmp_path / "saved", saved)
    with engine(tiny, 0, 1) as llm:
        restored, _ = PrefixFiles(llm.loaded, "f16", False).read(tmp_path / "saved")
        restore_prefix(llm.scheduler, llm.model_config, restored)
        logits, tokens, found = first_logits(llm, PROMPTS[0], 5)
    assert found == 64 and torch.equal(logits, expected[0]) and tokens == expected[1]


@pytest.mark.parametrize("draft", [{}, {"draft_ngram": 2, "draft_tokens": 4}])
def test_batches_and_drafts_beside_states_that_move(tiny: Path, draft: dict[str, int]) -> None:
    params = replace(FEW, max_tokens=12)
    prompts = [*PROMPTS, *PROMPTS]
    with engine(tiny, 0, 0, reuse_prefix=False) as llm:
        expected = [llm.generate(prompt, params)[0].tokens for prompt in PROMPTS]
    with engine(tiny, 8, 1, parallel=3, **draft) as llm:
        found = llm.generate(prompts, params)
        assert [each.tokens for each in found] == expected * 2
        assert llm.scheduler.blocks.checkpoints.to_host and sum(e.timings.cached_tokens for e in found)


def test_steps_launched_ahead_have_states_of_host_memory(tmp_path: Path) -> None:
    path = write_small(tmp_path / "lfm2.gguf", "lfm2-tiny")
    params = replace(FEW, max_tokens=9)
    with ahead(path, state_checkpoints=1) as (llm, _):
        with_cold(llm, 8)
        first = llm.generate(PROMPTS, params)
        again = llm.generate(PROMPTS, params)
        assert llm.scheduler.blocks.checkpoints.from_host
    assert [each.tokens for each in first] == [each.tokens for each in again]
    assert sum(each.timings.cached_tokens == 64 for each in again) >= 3


def test_blocks_are_copied_before_they_are_given_away() -> None:
    log = list[BlockCopy]()
    manager = BlockManager((CachePool(16), CachePool(2, is_state=True, checkpoints=1, cold=1)), log.extend)
    keys = [bytes([n]) * 32 for n in range(2)]
    running = manager.allocate([], 64)
    assert running is not None
    manager.computed(running.block_tables, keys, 0)
    own = running.block_tables[1][0]
    first = manager.checkpoint(running.block_tables, keys[0])
    assert first == [BlockCopy(1, own, 3 - own)] and not log
    assert manager.checkpoints == CheckpointCounts(1, 0, 0, 0)
    second = manager.checkpoint(running.block_tables, keys[1])
    assert second == first and log == [BlockCopy(1, 3 - own, 3)]
    assert manager.checkpoints == CheckpointCounts(1, 1, 1, 0)
    # One that goes on from host memory takes the last block: what it held has no room where that is copied from.
    other = manager.allocate(keys[:1], 64)
    assert other is not None and other.num_cached_tokens == 32
    assert other.copies == (BlockCopy(1, 3, 3 - own),) and len(log) == 1
    assert manager.checkpoints == CheckpointCounts(0, 1, 1, 1)


def test_states_on_the_way_through_a_prompt_leave_host_memory_first() -> None:
    manager = BlockManager((CachePool(16), CachePool(2, is_state=True, checkpoints=1, cold=2)))
    tables = manager.allocate([], 32)
    assert tables is not None
    (pool,) = manager._states
    for n, on_the_way in enumerate((False, True, True, False, False)):
        manager.checkpoint(tables.block_tables, bytes([n]), on_the_way)
    assert list(pool.by_key) == [b"\4"] and list(pool.cold) == [b"\0", b"\3"]


def test_host_memory_is_allocated_as_it_is_written_and_keeps_every_bit() -> None:
    parts = (torch.randn(3, 4, 2, 5), torch.randn(3, 4, 7))
    kept, size = [part.clone() for part in parts], 4 * 3 * (2 * 5 + 7)
    states = ColdStates(parts)
    assert states.nbytes == 0
    for block in range(4):
        states.put(9 - block, block)
    slabs = {block // cold_slab(size) for block in (9, 8, 7, 6)}
    assert states.nbytes == size * cold_slab(size) * len(slabs)
    for part in parts:
        part.zero_()
    for block in range(4):
        states.get(9 - block, block)
    assert all(torch.equal(part, before) for part, before in zip(parts, kept, strict=True))


def test_host_memory_is_an_eighth_of_what_is_free_or_what_is_requested() -> None:
    preset = synthetic_preset("qwen3.5-tiny")
    assert preset is not None
    needs = CacheNeeds(preset.config(), 512)
    size = needs.state_bytes
    assert cold_checkpoints(needs, None, 2**40) * size <= 8 * GIB
    assert 0.9 * GIB < cold_checkpoints(needs, None, 8 * GIB) * size <= GIB
    assert cold_checkpoints(needs, None, 8 * GIB, ranks=2) == cold_checkpoints(needs, 512, 8 * GIB)
    assert cold_checkpoints(needs, 0, GIB) == 0
    assert cold_checkpoints(replace(needs, checkpoints=0), None, GIB) == 0
    with pytest.raises(
        CannotRunError,
        match=r"host_checkpoints 4096 MiB, free 2\.00 GiB; use --host-checkpoints 1024 or less$",
    ):
        cold_checkpoints(needs, 4096, 2 * GIB)


@pytest.mark.parametrize("mib", [0.3, 24.1, 32.0, 62.8, 151.5, 300.0, 700.0])
def test_little_of_pinned_memory_is_wasted(mib: float) -> None:
    size = int(mib * 2**20)
    count = cold_slab(size)
    pinned = 1 << (count * size - 1).bit_length()
    assert count == 1 or pinned <= 512 * 2**20
    assert count * size / pinned > (0.75 if mib < 256 else 0.5)


def test_what_is_requested_in_vain_is_said(tiny: Path) -> None:
    with LLM(tiny, "cpu", ctx_size=64, host_checkpoints=64) as llm:
        assert [note for note in llm.loaded.notes if "host_checkpoints" in note] == [
            "host_checkpoints 64 MiB: not used, the states of a model on the cpu are in host memory anyway"
        ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"draft_ngram": 2}], ids=str)
def test_states_move_between_a_gpu_and_pinned_memory(tmp_path: Path, options: dict[str, int]) -> None:
    path, params = write_small(tmp_path / "m.gguf", "qwen3.5-tiny"), replace(FEW, max_tokens=9)
    with LLM(
        path, "cuda", ctx_size=512, parallel=2, state_checkpoints=1, host_checkpoints=64, **options
    ) as llm:  # type: ignore[arg-type]
        assert "more in host memory" in llm.loaded.notes[0]
        first = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
        again = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
        assert llm.scheduler.blocks.checkpoints.from_host >= 3
        (cold,) = llm.loaded.cache.cold.values()
        assert all(slab.is_pinned() for slab in cold._slabs.values())
    assert [each.tokens for each in first] == [each.tokens for each in again]
    assert sum(each.timings.cached_tokens == 64 for each in again) >= 4
