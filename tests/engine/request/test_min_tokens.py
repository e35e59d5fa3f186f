"""min_tokens: no end token before so many tokens, with and without a constraint."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from quengine import LLM, SamplingParams
from quengine.runners.graph_keys import SamplingKind
from quengine.structured.constraint_spec import ConstraintSpec
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=128)
    path = write_tiny(tmp_path_factory.mktemp("least") / "tiny.gguf", kind="Q8_0", sizes=sizes)
    with LLM(path, device="cpu", parallel=2) as made:
        yield made


@pytest.fixture(scope="module")
def ending(llm: LLM) -> SamplingParams:
    """Parameters under which the end token is always the likeliest."""
    return SamplingParams(temperature=0, max_tokens=9, logit_bias=dict.fromkeys(llm.tokenizer.eos_ids, 1000))


@pytest.mark.parametrize("least", [0, 1, 5, 9, 20])
def test_a_text_has_at_least_so_many_tokens(llm: LLM, ending: SamplingParams, least: int) -> None:
    (completion,) = llm.generate(["the cat"], replace(ending, min_tokens=least))
    assert len(completion.tokens) == min(least, 9)
    assert not llm.tokenizer.eos_ids & set(completion.tokens)


def test_stop_tokens_wait_too(llm: LLM, ending: SamplingParams) -> None:
    plain = replace(ending, logit_bias={}, ignore_eos=True)
    (free,) = llm.generate(["the cat"], plain)
    stopped = replace(plain, stop_token_ids=(free.tokens[0],))
    (ended,) = llm.generate(["the cat"], stopped)
    (longer,) = llm.generate(["the cat"], replace(stopped, min_tokens=3))
    assert ended.tokens == [] and len(longer.tokens) >= 3


def test_a_constraint_still_holds(llm: LLM, ending: SamplingParams) -> None:
    spec = ConstraintSpec.regex("[ab]{2,9}")
    (completion,) = llm.generate(["the"], replace(ending, min_tokens=4, constraint=spec))
    assert set(completion.text) <= {"a", "b"} and len(completion.text) >= 4


def test_the_host_samples() -> None:
    assert SamplingKind.of(SamplingParams(min_tokens=1)) is None
