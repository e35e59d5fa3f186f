"""Drafts by EAGLE-3 draft models on a GPU: captured steps draft what eager ones do, and texts stay as they are."""

from pathlib import Path

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.models.checkpoint import open_checkpoint
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.synthetic.synthetic_eagle import write_synthetic_eagle
from quengine.runners.draft_graphs import DraftGraphs
from quengine.speculative.draft_eagle import EagleDrafts
from tests.engine.speculative.test_cuda_speculation import (
    CTX,
    GREEDY,
    PENALIZED,
    PROMPTS,
    SAMPLED,
    check_captured_drafts,
    tokens,
)
from tests.engine.speculative.test_draft_eagle import write_agreeing, write_pair
from tests.engine.speculative.test_speculation import PROMPTS as SMALL_PROMPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a first run compiles the kernels
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("eagle")
    target = write_synthetic(folder / "tiny.gguf", "tiny")
    config = open_checkpoint(target).config
    return target, write_synthetic_eagle(folder / "draft.gguf", config, drafted=384)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalties"])
def test_texts_stay_as_they_are_but_for_near_ties(files: tuple[Path, Path], params: SamplingParams) -> None:
    path, draft = files
    with LLM(path, "cuda", CTX, parallel=4) as plain:
        expected = tokens(plain.generate(PROMPTS, params))
    for parallel in (1, 4):
        with LLM(path, "cuda", CTX, parallel=parallel, draft_model=draft, draft_tokens=3) as llm:
            got = llm.generate(PROMPTS, params)
            decoder = llm.runner.device_decoder
            assert decoder is not None and isinstance(decoder.drafting, DraftGraphs)
            assert (decoder.drafting._launched > 0) == (params is not PENALIZED)
        same = [ours == theirs for ours, theirs in zip(tokens(got), expected, strict=True)]
        assert sum(same) >= len(PROMPTS) - 1, same
        assert sum(c.timings.drafted_tokens for c in got) > 0


@pytest.mark.parametrize("parallel", [1, 4])
def test_deterministic_texts_are_those_without_drafts_to_the_bit(
    files: tuple[Path, Path], parallel: int
) -> None:
    path, draft = files
    with LLM(path, "cuda", CTX, deterministic=True, parallel=4) as plain:
        expected = [tokens(plain.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED)]
    with LLM(
        path, "cuda", CTX, deterministic=True, parallel=parallel, draft_model=draft, draft_tokens=3
    ) as llm:
        assert [tokens(llm.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED)] == expected


def test_a_draft_model_that_is_right_is_accepted(tmp_path: Path) -> None:
    found = write_agreeing(write_pair(tmp_path))
    for params in (GREEDY, SAMPLED):
        for parallel in (1, 4):
            options = {"parallel": parallel, "draft_model": found / "draft", "draft_tokens": 4}
            with LLM(found / "target", "cuda", 192, **options) as llm:  # type: ignore[arg-type]
                got = llm.generate(SMALL_PROMPTS, params)
            drafted = sum(c.timings.drafted_tokens for c in got)
            assert sum(c.timings.accepted_tokens for c in got) > 0.6 * drafted > 50


def test_captured_steps_draft_what_eager_ones_do(files: tuple[Path, Path]) -> None:
    path, draft_file = files
    with LLM(path, "cuda", CTX, draft_model=draft_file, draft_tokens=4) as llm:
        drafts = llm.loaded.draft
        assert isinstance(drafts, EagleDrafts) and llm.runner.device_decoder is not None
        drafts._on_device = llm.runner.device_decoder.drafting = None  # the host asks for each draft
        check_captured_drafts(llm, drafts, cached=1)
