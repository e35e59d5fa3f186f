"""A model with LoRA adapters that processes share: the tokens of one process, whatever adapters its sequences have."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quengine import LLM, SamplingParams
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from tests.gguf_builder import ModelSizes
from tests.models.adapters import random_adapters, write_adapter
from tests.tiny_models import write_tiny

PROMPTS = ["the cat", "in the beginning of", "a"]
LORA: list[dict[int, float] | None] = [{0: 1.0}, {1: -0.5}, {}]
STEMS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
CASES = {
    "tensors": ("llama", {}),
    "layers": ("llama", {"split": "layer"}),
    "norms of results": ("gemma2", {}),
}


def tokens(llm: LLM, scales: list[dict[int, float] | None]) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, lora=lora) for lora in scales]
    return [answer.tokens for answer in llm.generate(PROMPTS, params)]


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Path, tuple[str, ...], dict[str, str]]]:
    architecture, options = CASES[request.param]
    sizes = ModelSizes(architecture, context=128, feed_forward=160, head_dim=32)
    path = write_tiny(tmp_path / "m.gguf", architecture, "Q8_0", sizes=sizes)
    tensors = GGUFCheckpoint(path).tensors
    adapters = random_adapters(tensors, STEMS, (4, 3))
    lora = [write_adapter(tmp_path / f"{n}.gguf", architecture, adapters, n, 4.0) for n in range(2)]
    yield path, tuple(map(str, lora)), options


def test_ranks_give_the_tokens_of_one_process(case: tuple[Path, tuple[str, ...], dict[str, str]]) -> None:
    path, lora, options = case
    given = {"device": "cpu", "threads": 2, "parallel": 3, "lora": lora}
    with LLM(path, **given) as one:
        wanted, plain = tokens(one, LORA), tokens(one, [{}] * 3)
    assert wanted[0] != plain[0] and wanted[2] == plain[2]
    with LLM(path, **given, tensor_parallel=2, **options) as shared:
        assert tokens(shared, LORA) == wanted
