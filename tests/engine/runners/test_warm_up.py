"""A warm-up changes no text, and on a GPU leaves nothing to be captured for ordinary requests."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM, EngineError, SamplingParams
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.runners.cuda_graphs import CudaGraphs
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(seed=3, max_tokens=12)
PROMPTS = [[7, 8, 9] * 9, list(range(20, 90)), [5], [9] * 40]


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_warmed_up_model_writes_the_same_text(tmp_path: Path, parallel: int) -> None:
    path = write_tiny(tmp_path / "m.gguf", sizes=ModelSizes(embedding=32, feed_forward=32, context=64))
    with LLM(path, "cpu", parallel=parallel) as llm:
        before = llm.generate(["the cat", "a"], GREEDY)
        llm.warm_up()
        llm.warm_up(SAMPLED)
        after = llm.generate(["the cat", "a"], GREEDY)
        assert [one.tokens for one in after] == [one.tokens for one in before]
        stream = llm.stream("the", GREEDY)
        next(stream)
        with pytest.raises(EngineError, match="under way"):
            llm.warm_up()
        stream.close()


@pytest.mark.gpu
@pytest.mark.timeout(600)  # a first run compiles the kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options",
    [{}, {"parallel": 8}, {"parallel": 4, "draft_ngram": 3}, {"parallel": 8, "deterministic": True}],
    ids=["alone", "many", "drafts", "deterministic"],
)
def test_ordinary_requests_find_their_steps_captured(options: dict[str, Any], tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "tiny.gguf", "tiny")
    with LLM(path, "cuda", 256, **options) as llm:
        llm.warm_up()
        graphs = llm.runner.graphs
        assert isinstance(graphs, CudaGraphs)
        before, texts = graphs.captured, list[list[int]]()
        phases = [key.phase for key in before]
        assert phases.count("prefill") >= 5 and phases.count("decode") >= 2
        for _ in range(2):
            texts = [llm.generate(prompt, GREEDY)[0].tokens for prompt in PROMPTS]
            for prompt in PROMPTS:
                llm.generate(prompt, SAMPLED)
        assert graphs.captured == before
    with LLM(path, "cuda", 256, **options) as llm:
        cold = [llm.generate(prompt, GREEDY)[0].tokens for prompt in PROMPTS]
    # An eager prompt's sums may be rounded in another order, but where kernels are fixed.
    same = sum(a == b for a, b in zip(texts, cold, strict=True))
    assert same == len(PROMPTS) if options.get("deterministic") else same >= len(PROMPTS) - 1


@pytest.mark.gpu
@pytest.mark.timeout(600)  # a first run compiles the kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(seed=3, max_tokens=5, ignore_eos=True)])
def test_a_warm_up_for_one_request_leaves_no_decode_step_to_be_captured(
    params: SamplingParams, tmp_path: Path
) -> None:
    with LLM(write_synthetic(tmp_path / "tiny.gguf", "tiny"), "cuda", 256) as llm:
        llm.warm_up(params)
        graphs = llm.runner.graphs
        assert isinstance(graphs, CudaGraphs)
        before = graphs.captured
        assert [(key.phase, key.rows) for key in before] == [("decode", 1)]
        llm.generate([7, 8, 9], params)
        assert graphs.captured == before
