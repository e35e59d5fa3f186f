"""Per-layer embeddings on a GPU: captured steps read a row of host memory, and shared keys are those written."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.models.synthetic.synthetic import write_synthetic
from tests.transformers_models import nmse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a first run compiles the kernels
]

IDS = [(7 * i * i + 3 * i + 1) % 1000 for i in range(90)]
PROMPTS = [IDS[:70], IDS[10:30], IDS[40:45]]


@pytest.fixture(scope="module", params=["gemma-4-e-tiny", "gemma-3n-tiny"])
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("inputs") / "tiny.gguf", request.param)


@pytest.fixture(scope="module")
def cpu(path: Path) -> Iterator[LLM]:
    with LLM(path, "cpu", 2048) as llm:
        yield llm


def test_logits_are_the_cpus(path: Path, cpu: LLM) -> None:
    """Prompts, and token by token through captured steps. One wrong row makes a difference above 0.1."""
    with LLM(path, "cuda", 256) as llm:
        inputs = llm.runner.decoder.inputs
        assert inputs is not None and all(plane.is_pinned() for plane in inputs.table.parts[0].planes[:1])
        for decode in (False, True):
            ours, theirs = (each.logits(IDS, decode=decode).double() for each in (llm, cpu))
            assert nmse(ours, theirs) < 1e-3


def test_sequences_in_a_batch_have_their_own_rows(path: Path) -> None:
    params = SamplingParams(
        temperature=0, presence_penalty=100.0, max_tokens=40, ignore_eos=True
    )  # no token twice
    with LLM(path, "cuda", 256) as one, LLM(path, "cuda", 256, parallel=4) as several:
        alone, together = (
            [completion.tokens for completion in llm.generate(PROMPTS, params)] for llm in (one, several)
        )
    same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(alone, together, strict=True)]
    assert sum(count > 20 for count in same) >= 2, same


def test_a_long_prompt_computes_its_last_row_alone(path: Path, cpu: LLM) -> None:
    """Beyond captured prompts layers that write no keys compute one row."""
    long = [(7 * i * i + i) % 1000 for i in range(1500)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with LLM(path, "cuda", 2048) as llm:
        assert llm.generate(long, one)[0].tokens == cpu.generate(long, one)[0].tokens
