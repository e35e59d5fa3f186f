"""On a GPU: a restored prefix and a shifted context give the tokens that they give by themselves, while captured steps
run ahead of the host."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.context.prefix_file import PrefixFiles
from quengine.context.saved_prefix import restore_prefix, save_prefix
from quengine.models.synthetic.synthetic import write_synthetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a first run compiles the kernels
]
CTX = 192
PROMPT = [(11 * n + 3) % 250 for n in range(150)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("context") / "tiny.gguf", "tiny")


@pytest.fixture(scope="module", params=["f16", "q8_0", "q4_0"])
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(path, "cuda", CTX, parallel=3, deterministic=True, cache_type=request.param) as loaded:
        yield loaded


def params(**values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, **values)


def test_a_shifted_context_gives_the_tokens_of_what_is_left(llm: LLM) -> None:
    keep = 40 + llm.tokenizer.add_bos
    shifted = llm.generate([PROMPT], params(max_tokens=100, context_shift=True, n_keep=40))[0]
    assert shifted.timings.shifts == 1
    first = llm.generate([PROMPT], params(max_tokens=CTX - 150))[0].tokens
    gone = (CTX - 1 - keep) // 2
    tokens = PROMPT + first
    second = llm.generate([tokens[:keep] + tokens[keep + gone :]], params(max_tokens=100 - len(first)))[
        0
    ].tokens
    assert shifted.tokens == first + second
    prompts = [PROMPT, PROMPT[:20], [9] * 190]
    together = llm.generate(prompts, params(max_tokens=200, context_shift=True))
    for prompt, each in zip(prompts, together, strict=True):
        assert each.tokens == llm.generate([prompt], params(max_tokens=200, context_shift=True))[0].tokens


def test_a_prefix_is_saved_and_restored_while_a_sequence_runs(llm: LLM, path: Path, tmp_path: Path) -> None:
    files = PrefixFiles(llm.loaded, llm.config.cache_type, deterministic=True)
    expected = llm.generate([PROMPT], params(max_tokens=20))[0].tokens
    alone = llm.generate([[9] * 40], params(max_tokens=60))[0].tokens
    with LLM(path, "cuda", CTX, parallel=3, deterministic=True, cache_type=llm.config.cache_type) as other:
        stream = other.stream([9] * 40, params(max_tokens=60))
        next(stream)
        files.write(tmp_path / "x", save_prefix(llm.scheduler, llm.model_config, PROMPT))
        saved, _ = PrefixFiles(other.loaded, other.config.cache_type, deterministic=True).read(tmp_path / "x")
        restore_prefix(other.scheduler, other.model_config, saved)
        restored = other.generate([PROMPT], params(max_tokens=20))[0]
        assert (restored.tokens, restored.timings.cached_tokens) == (expected, 128)
        assert stream.finish().tokens == alone
