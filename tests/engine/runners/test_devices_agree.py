"""The CPU and the GPU give the same text: greedy, and sampled with the same seed.

The two sides' logits differ by a little, so a choice that lies on an edge may fall to either. Therefore the GPU's text
is fed to the CPU, which must choose the same token after nearly each beginning of it; a wrong random number,
penalty, filter or position changes every third choice or more (64 of 192).
"""

from pathlib import Path

import pytest

from quengine import LLM, SamplingParams
from quengine.models.synthetic.synthetic import SyntheticModel, write_synthetic
from quengine.sampler import Sampler

pytestmark = pytest.mark.gpu

MODEL = SyntheticModel(
    "synthetic agreement",
    vocab_size=2048,
    context_length=512,
    embedding_length=256,
    block_count=4,
    feed_forward_length=512,
    head_count=4,
    head_count_kv=2,
    head_dim=64,
    rope_freq_base=1e4,
)
PROMPTS = [list(range(start, start + 20)) for start in (5, 100, 900)]
TOKENS = 64
EDGES = 16
"""Choices of the 192 that may fall the other way. A model of random weights leaves hundreds of tokens about as likely
as each other, so that many choices lie on an edge: among all candidates, logits that differ by an NMSE of 1e-8 move 4,
and by 1e-6, as a prompt's kernels may, 9."""

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, seed=0, max_tokens=TOKENS, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, seed=1, max_tokens=TOKENS, ignore_eos=True),
    "few candidates": SamplingParams(
        temperature=1.2, top_k=100, top_p=0.9, min_p=0.01, seed=2**63 + 5, max_tokens=TOKENS, ignore_eos=True
    ),
    "penalties and bias": SamplingParams(
        temperature=0.8,
        repeat_penalty=1.3,
        presence_penalty=0.2,
        logit_bias={7: 2.0, 11: -3.0},
        seed=3,
        max_tokens=TOKENS,
        ignore_eos=True,
    ),
    "all candidates": SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=4, max_tokens=TOKENS, ignore_eos=True
    ),
}
"""Each takes a captured step of its own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("agree") / "model.gguf", MODEL)


@pytest.fixture(scope="module")
def texts(model: Path) -> dict[str, list[list[int]]]:
    """By settings: the tokens that the GPU puts after each prompt."""
    with LLM(model, "cuda", 256) as llm:
        return {
            name: [completion.tokens for completion in llm.generate(PROMPTS, params)]
            for name, params in SETTINGS.items()
        }


@pytest.fixture(scope="module")
def cpu(model: Path) -> LLM:
    return LLM(model, "cpu", 256)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_cpu_chooses_the_gpus_tokens(name: str, texts: dict[str, list[list[int]]], cpu: LLM) -> None:
    differing = []
    for prompt, tokens in zip(PROMPTS, texts[name], strict=True):
        assert len(tokens) == TOKENS
        ids = prompt + tokens
        logits = cpu.logits(ids)
        sampler = Sampler(SETTINGS[name], MODEL.vocab_size)
        for at in range(len(prompt), len(ids)):
            chosen = sampler.sample(logits[at - 1], ids[:at], at).token
            differing += [(at, chosen, ids[at])] if chosen != ids[at] else []
    assert len(differing) <= EDGES, differing


def test_other_settings_give_other_texts(texts: dict[str, list[list[int]]]) -> None:
    assert len({str(tokens) for tokens in texts.values()}) == len(SETTINGS)
    assert len({str(tokens) for tokens in texts["greedy"]}) == len(PROMPTS)
