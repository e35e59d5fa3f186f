"""Context shift: the text is that of an explicit run over the tokens that are left."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quengine import LLM, EngineError, SamplingParams
from quengine.context.context_shift import ContextShift
from quengine.request.output import Completion
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

CTX, COUNT = 96, 120
PROMPT = [(7 * n + 3) % 250 for n in range(70)]
SHIFTED = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, context_shift=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=64, heads=2, kv_heads=1, head_dim=32, context=CTX)
    return write_tiny(tmp_path_factory.mktemp("shift") / "tiny.gguf", kind="Q8_0", sizes=sizes)


@pytest.fixture(scope="module", params=["f16", "q8_0"])
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(path, device="cpu", parallel=3, cache_type=request.param) as loaded:
        yield loaded


def changed(**values: object) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "context_shift": True}
    return SamplingParams(**(given | values))  # type: ignore[arg-type]


def by_hand(llm: LLM, prompt: list[int], params: SamplingParams, keep: int, discard: int = 0) -> list[int]:
    """The tokens of runs without a shift, each over what llama-server's rule leaves of the one before."""
    tokens, generated = list(prompt), list[int]()
    while params.max_tokens is not None and (left := params.max_tokens - len(generated)):
        count = min(left, CTX - len(tokens))
        plain = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        new = llm.generate([tokens], plain)[0].tokens
        tokens, generated = tokens + new, generated + new
        kept = min(keep, CTX - 4)
        gone = discard or (CTX - 1 - kept) // 2
        tokens = tokens[:kept] + tokens[kept + gone :]
    return generated


def finished(llm: LLM, prompt: list[int], params: SamplingParams) -> Completion:
    return llm.generate([prompt], params)[0]


@pytest.mark.parametrize(("n_keep", "n_discard"), [(0, 0), (40, 0), (-1, 0), (5, 60), (10_000, 0), (33, 1)])
def test_the_text_is_that_of_the_tokens_that_are_left(llm: LLM, n_keep: int, n_discard: int) -> None:
    params = changed(
        n_keep=n_keep, n_discard=n_discard, max_tokens=60 if n_keep > CTX or n_discard == 1 else COUNT
    )
    completion = finished(llm, PROMPT, params)
    keep = len(PROMPT) if n_keep < 0 else n_keep + llm.tokenizer.add_bos
    assert completion.tokens == by_hand(llm, PROMPT, params, keep, n_discard)
    timings = completion.timings
    assert completion.finish_reason == "length" and timings.generated_tokens == params.max_tokens
    assert timings.shifts > 0 and timings.prompt_tokens == completion.prompt_tokens == len(PROMPT)


def test_without_it_a_full_context_ends_the_text(llm: LLM) -> None:
    completion = finished(llm, PROMPT, changed(context_shift=False))
    assert len(completion.tokens) == CTX - len(PROMPT) and completion.finish_reason == "length"
    assert completion.timings.shifts == 0


def test_a_prompt_that_does_not_fit_is_refused_with_it_too(llm: LLM) -> None:
    with pytest.raises(EngineError, match=f"{CTX} tokens and the context holds {CTX}"):
        finished(llm, [5] * CTX, SHIFTED)


def test_sequences_beside_each_other_shift_alone_and_free_everything(llm: LLM) -> None:
    prompts = [PROMPT, PROMPT[:20], PROMPT[10:60], [9] * 95]
    alone = [finished(llm, prompt, SHIFTED).tokens for prompt in prompts]
    assert [each.tokens for each in llm.generate(prompts, SHIFTED)] == alone
    assert llm.scheduler.cache_used == 0


def test_penalties_and_stop_strings_go_on(llm: LLM) -> None:
    sampled = {"frequency_penalty": 0.5, "repeat_last_n": -1, "temperature": 1.0, "seed": 3}
    text = finished(llm, PROMPT, changed(**sampled)).text
    stopped = finished(llm, PROMPT, changed(**sampled, stop=(text[-4:],)))
    assert stopped.finish_reason == "stop" and stopped.timings.shifts and text.startswith(stopped.text)


def test_random_numbers_do_not_come_again(llm: LLM) -> None:
    stream = llm.stream(PROMPT, changed(temperature=1.0, seed=3))
    shifts = stream.finish().timings.shifts
    assert shifts and stream.sequence.sampler.stream == shifts << 16


def test_what_is_discarded_is_llama_servers_rule() -> None:
    for keep, discard, tokens, gone in (
        (0, 0, 100, range(49)),
        (10, 0, 100, range(10, 54)),
        (1000, 1000, 100, range(96, 98)),
        (3, 0, 4, range(1)),
        (0, 0, 2, range(0)),
    ):
        assert ContextShift(keep, discard).discarded(tokens) == gone
    assert ContextShift.of(SamplingParams(n_keep=4), 5, bos=True) is None


@pytest.mark.parametrize("options", [{"deterministic": True}, {"draft_ngram": 3}, {"draft_model": ""}])
def test_other_ways_of_running_give_the_same_tokens(path: Path, llm: LLM, options: dict[str, object]) -> None:
    if "draft_model" in options:
        options = {"draft_model": path, "draft_tokens": 3}
    with LLM(path, device="cpu", cache_type=llm.config.cache_type, **options) as other:  # type: ignore[arg-type]
        assert finished(other, PROMPT, SHIFTED).tokens == finished(llm, PROMPT, SHIFTED).tokens
