"""The CPU and the GPU give the same text: greedy, and sampled with the same seed."""

from pathlib import Path

import pytest

from quengine import LLM, SamplingParams
from quengine.models.synthetic import SyntheticModel, write_synthetic

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
TOKENS = 48

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
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
"""Each takes a captured step of its own; the last is sampled on the host on both."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[list[int]]]]:
    """By device and settings: the tokens that follow each prompt."""
    model = write_synthetic(tmp_path_factory.mktemp("agree") / "model.gguf", MODEL)
    return {device: _generated(model, device) for device in ("cpu", "cuda")}


def _generated(model: Path, device: str) -> dict[str, list[list[int]]]:
    with LLM(model, device, 256) as llm:
        return {
            name: [completion.tokens for completion in llm.generate(PROMPTS, params)]
            for name, params in SETTINGS.items()
        }


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_seed_gives_the_same_tokens(name: str, texts: dict[str, dict[str, list[list[int]]]]) -> None:
    assert all(len(tokens) == TOKENS for tokens in texts["cpu"][name])
    assert texts["cuda"][name] == texts["cpu"][name]


def test_other_settings_give_other_tokens(texts: dict[str, dict[str, list[list[int]]]]) -> None:
    assert len({str(tokens) for tokens in texts["cuda"].values()}) == len(SETTINGS)
