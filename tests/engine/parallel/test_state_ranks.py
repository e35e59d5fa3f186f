"""States that two ranks share, of a tiny Qwen3.5: read and written as one rank has them, and copied on both."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.block_pool import CachePool
from quengine.loading import automatic_drafts
from quengine.parallel.cached_rows import read_cached, write_cached
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

PROMPT = [(7 * i + 5) % 200 for i in range(70)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """On one rank, and on two."""
    sizes = ModelSizes("qwen35", context=256)
    path = write_tiny(tmp_path_factory.mktemp("ranks") / "tiny.gguf", "qwen35", sizes=sizes)
    options = {"ctx_size": 256, "reuse_prefix": True, "draft_ngram": 2}
    with (
        LLM(path, "cpu", threads=1, **options) as one,  # type: ignore[arg-type]
        LLM(path, "cpu", threads=2, tensor_parallel=2, **options) as two,  # type: ignore[arg-type]
    ):
        yield one, two


def test_they_are_read_and_written_as_one_rank_has_them(pair: tuple[LLM, LLM]) -> None:
    whole = pair[0].model_config
    for llm in pair:
        llm.logits(PROMPT)
    rows, shared = (read_cached(llm.runner, 0, len(PROMPT), whole) for llm in pair)
    for mine, other in zip(rows, shared, strict=True):
        assert mine.shape == other.shape
        mine, other = mine.double(), other.double()
        assert float((mine - other).square().sum() / mine.square().sum()) < 1e-5
    write_cached(pair[1].runner, 0, len(PROMPT), rows)
    assert all(map(torch.equal, rows, read_cached(pair[1].runner, 0, len(PROMPT), whole)))


def test_they_are_copied_on_both(pair: tuple[LLM, LLM]) -> None:
    found = []
    for llm in pair:
        first = llm.generate(PROMPT, GREEDY)[0]
        second = llm.generate([*PROMPT, *first.tokens, 5], GREEDY)[0]
        assert second.timings.cached_tokens == 96, "of 70 tokens and 39"
        found.append([first.tokens, second.tokens])
    assert found[0] == found[1]


def test_checkpoints_move_to_host_memory_on_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA devices: each rank has host memory for its part of as many states."""
    choose = automatic_drafts.choose_cache

    def with_cold(*given: Any) -> tuple[int, list[CachePool]]:
        ctx_size, pools = choose(*given)
        return ctx_size, [replace(pool, cold=8) if pool.is_state else pool for pool in pools]

    monkeypatch.setattr(automatic_drafts, "choose_cache", with_cold)
    sizes = ModelSizes("qwen35", context=256)
    path = write_tiny(tmp_path / "tiny.gguf", "qwen35", sizes=sizes)
    options = {"parallel": 2, "state_checkpoints": 1, "ctx_size": 256, "tensor_parallel": 2}
    prompts, params = [[n, *PROMPT[1:]] for n in range(4)], replace(GREEDY, max_tokens=5)
    with LLM(path, "cpu", threads=2, **options) as llm:  # type: ignore[arg-type]
        first = [llm.generate(prompt, params)[0] for prompt in prompts]
        again = [llm.generate(prompt, params)[0] for prompt in prompts]
        assert llm.scheduler.blocks.checkpoints.from_host >= 2
    assert [each.tokens for each in first] == [each.tokens for each in again]
    assert sum(each.timings.cached_tokens == 64 for each in again) >= 3
