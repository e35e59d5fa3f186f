"""Drafts by a model's own layer on a GPU: captured steps draft what eager ones do, and texts stay as they are."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.loading import machine
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.draft_graphs import DraftGraphs
from quengine.speculative.draft_mtp import MtpDrafts
from tests.engine.speculative.test_cuda_speculation import (
    CTX,
    GREEDY,
    PENALIZED,
    PROMPTS,
    SAMPLED,
    check_captured_drafts,
    tokens,
)
from tests.engine.speculative.test_draft_mtp import certain_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a first run compiles the kernels
]


@pytest.fixture(scope="module", params=["qwen3.5-mtp-tiny", "qwen3.5moe-mtp-tiny"])
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("mtp") / "tiny.gguf", request.param)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalties"])
def test_texts_stay_as_they_are_but_for_near_ties(path: Path, params: SamplingParams) -> None:
    with LLM(path, "cuda", CTX, parallel=4, draft_mtp=0) as plain:
        expected = tokens(plain.generate(PROMPTS, params))
    for parallel in (1, 4):
        with LLM(path, "cuda", CTX, parallel=parallel, draft_mtp=3) as llm:
            got = llm.generate(PROMPTS, params)
            assert llm.runner.device_decoder is not None
            drafting = llm.runner.device_decoder.drafting
            assert isinstance(drafting, DraftGraphs) and (drafting._launched > 0) == (params is not PENALIZED)
        same = [ours == theirs for ours, theirs in zip(tokens(got), expected, strict=True)]
        # A sampled text parts where its random number falls between the sums of two tokens, which differ in last bits
        # from step to step; texts that are to be equal are those of `deterministic`, below.
        assert sum(same) >= len(PROMPTS) - (1 if params.greedy else 2), same
        assert sum(c.timings.drafted_tokens for c in got) > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalties"])
def test_drafts_are_made_by_default_and_plain_steps_are_those_of_a_model_without(
    path: Path, params: SamplingParams
) -> None:
    """But for the hidden rows that they keep, which takes one kernel."""
    with LLM(path, "cuda", CTX, parallel=4, draft_mtp=0) as plain:
        plain.warm_up()
        expected = tokens(plain.generate(PROMPTS, params))
        graphs = plain.runner.graphs
        assert isinstance(graphs, CudaGraphs) and plain.loaded.draft is None
        kernels = {key: step.kernels for key, step in graphs._steps.items() if key.phase == "decode"}
    with LLM(path, "cuda", CTX, parallel=4) as llm:
        llm.warm_up()
        got = llm.generate(PROMPTS, params)
        graphs, decoder = llm.runner.graphs, llm.runner.device_decoder
        assert isinstance(graphs, CudaGraphs) and decoder is not None
        ours = {key: step.kernels for key, step in graphs._steps.items() if key.phase == "decode"}
        assert isinstance(decoder.drafting, DraftGraphs) and llm.config.draft_on_device
        assert (decoder.drafting._launched > 0) == (params is not PENALIZED)
        assert not any(pool.spares for pool in llm.loaded.cache.pools)
    shared = kernels.keys() & ours.keys()
    assert len(shared) > 4 and {ours[key] - kernels[key] for key in shared} == {1}
    same = [ours == theirs for ours, theirs in zip(tokens(got), expected, strict=True)]
    assert sum(same) >= len(PROMPTS) - (1 if params.greedy else 2), same


@pytest.mark.parametrize("parallel", [1, 4])
def test_deterministic_texts_are_those_without_drafts_to_the_bit(path: Path, parallel: int) -> None:
    with LLM(path, "cuda", CTX, deterministic=True, parallel=4) as plain:
        expected = [tokens(plain.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED)]
    with LLM(path, "cuda", CTX, deterministic=True, parallel=parallel, draft_mtp=3) as llm:
        assert [tokens(llm.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED)] == expected


def test_a_layer_that_is_right_is_accepted(tmp_path: Path) -> None:
    model = write_synthetic(tmp_path / "m.gguf", replace(PRESETS["qwen3.5-mtp-tiny"], quant="F32"))
    path = certain_file(model, tmp_path / "certain.gguf")
    for params in (GREEDY, SAMPLED):
        for parallel in (1, 4):
            with LLM(path, "cuda", CTX, parallel=parallel, draft_mtp=4) as llm:
                got = llm.generate(PROMPTS, params)
            drafted = sum(c.timings.drafted_tokens for c in got)
            assert sum(c.timings.accepted_tokens for c in got) > 0.9 * drafted > 80


def test_captured_steps_draft_what_eager_ones_do(path: Path) -> None:
    with LLM(path, "cuda", CTX, draft_mtp=4) as llm:
        drafts = llm.loaded.draft
        assert isinstance(drafts, MtpDrafts)
        assert llm.runner.device_decoder is not None
        drafts._on_device = llm.runner.device_decoder.drafting = None  # as where the host samples
        drafts._on_device = None  # the host asks for each draft
        check_captured_drafts(llm, drafts, cached=0)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_steps_that_draft_on_the_device_accept_what_the_host_would(
    path: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right drafts and wrong ones, by a layer that is told the text: the tokens are those without drafts, in kernels
    whose bits are those of a row alone, but for the last ones of states."""
    with LLM(path, "cuda", CTX, deterministic=True) as plain:
        texts = [plain.generate([prompt], params)[0].tokens for prompt in PROMPTS]
    monkeypatch.setattr(machine, "may_draft_on_device", lambda _: True)
    with LLM(path, "cuda", CTX, deterministic=True, draft_mtp=3) as llm:
        assert llm.runner.device_decoder is not None
        drafting = llm.runner.device_decoder.drafting
        assert isinstance(drafting, DraftGraphs) and llm.speculation is not None
        llm.speculation.clock = lambda: 0.0
        right = torch.zeros_like(drafting._drafted.history)
        draft = drafting._draft

        def drafted(*args: object) -> None:
            draft(*args)  # type: ignore[arg-type]
            drafting._drafted.history.copy_(right)

        monkeypatch.setattr(drafting, "_draft", drafted)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            whole = torch.tensor([*prompt, *text], dtype=torch.int32)[: right.shape[1]]
            whole[len(prompt) + 4 :: 5] = 3
            right[:, : len(whole)] = whole.to(right.device)
            got = llm.generate([prompt], params)[0]
            assert got.tokens == text
            assert got.timings.drafted_tokens > got.timings.accepted_tokens > 0
