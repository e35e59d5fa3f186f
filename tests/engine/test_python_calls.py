"""What scripts call beside `generate`: scores, perplexity, log-probabilities with texts, logits processors, batches of
chats with tools and schemas, progress, and `close`."""

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from quengine import LLM, BatchProgress, ConstraintSpec, EngineError, SamplingParams
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.request.output import show_progress
from quengine.request.sequence import Sequence
from tests.tiny_models import write_tiny_chat

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calls") / "tiny.gguf"
    return write_tiny_chat(path, 2048)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="cpu", parallel=3) as loaded:
        yield loaded


def expected_logprobs(llm: LLM, ids: list[int]) -> NDArray[np.float64]:
    """[T - 1] of each token after the first, by `LLM.logits`."""
    logits = torch.log_softmax(llm.logits(ids).double(), -1)
    return logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def test_ids_are_decoded_to_the_text(llm: LLM) -> None:
    ids = llm.encode("the cat")
    assert llm.decode(ids) == llm.decode(np.array(ids)) == "the cat"
    end = llm.tokenizer.control_id("<|im_end|>")
    assert end is not None
    assert (llm.decode([*ids, end]), llm.decode([end], special=True)) == ("the cat", "<|im_end|>")
    with pytest.raises(EngineError, match="999999"):
        llm.decode([999999])


def test_log_probabilities_of_prompt_and_text_have_the_texts_of_their_tokens(llm: LLM) -> None:
    (completion,) = llm.generate(
        "the cat", SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    )
    assert completion.logprobs is not None and completion.prompt_logprobs is not None
    assert "".join(entry.text for entry in completion.logprobs) == completion.text
    assert [entry.top[0].token for entry in completion.logprobs] == completion.tokens
    assert all(entry.top[0].text == entry.text and len(entry.top) == 2 for entry in completion.logprobs)
    ids = llm.encode("the cat")
    assert [entry.token for entry in completion.prompt_logprobs] == ids[1:]
    assert "".join(entry.text for entry in completion.prompt_logprobs) == llm.decode(ids[1:])
    found = [entry.logprob for entry in completion.prompt_logprobs]
    np.testing.assert_allclose(found, expected_logprobs(llm, ids), atol=1e-4)
    assert llm.generate("the", GREEDY)[0].prompt_logprobs is None
    with pytest.raises(EngineError, match="prompt_logprobs = -1: must be a whole number"):
        SamplingParams(prompt_logprobs=-1)


def test_choices_are_scored_by_the_tokens_after_the_prompt(llm: LLM) -> None:
    prompt, choices = "the cat", [" sat", " on the mat", "s"]
    scores = llm.score(prompt, choices)
    assert [score.text for score in scores] == choices
    first = min(
        len(llm.encode(prompt + choice)) - len(score.tokens)
        for choice, score in zip(choices, scores, strict=True)
    )
    for choice, score in zip(choices, scores, strict=True):
        ids = llm.encode(prompt + choice)
        assert score.tokens == ids[first:]
        np.testing.assert_allclose(score.logprobs, expected_logprobs(llm, ids)[first - 1 :], atol=1e-4)
        assert math.isclose(score.logprob, sum(score.logprobs))
        assert math.isclose(score.mean_logprob, score.logprob / len(score.tokens))
    (likeliest,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    ids = llm.encode(prompt)
    (greedy,) = llm.score(ids, [likeliest.text])
    assert greedy.greedy == (greedy.tokens == likeliest.tokens[: len(greedy.tokens)])
    assert not all(score.greedy for score in scores)
    only = llm.encode("a")
    assert len(only) == 1  # a prompt that would take a decode step, which scores nothing
    (after,) = llm.score(only, ["b"])
    np.testing.assert_allclose(after.logprobs, expected_logprobs(llm, [*only, *after.tokens]), atol=1e-4)
    with pytest.raises(EngineError, match="the choice '' adds no token"):
        llm.score(prompt, ["a", ""])
    with pytest.raises(EngineError, match="the prompt is empty: the first token"):
        llm.score("", ["a"])
    assert not set(llm.encode("t")) & set(llm.encode("the"))
    with pytest.raises(EngineError, match="the prompt has no token that stays the same with every choice"):
        llm.score("t", ["he", "a"])


def test_perplexity_is_that_of_the_whole_text(llm: LLM, model: Path) -> None:
    text = "the cat sat on the mat. " * 4
    ids = llm.encode(text)
    found = llm.perplexity(text)
    expected = expected_logprobs(llm, ids)
    assert found.scored_tokens == len(ids) - 1
    assert math.isclose(found.perplexity.value, math.exp(-expected.mean()), rel_tol=1e-4)
    assert llm.perplexity(text, 16).chunks == len(ids) // 16
    with pytest.raises(EngineError, match="give at least two"):
        llm.perplexity("a")
    with LLM(model, device="cpu", ctx_size=16) as short:
        seen = list[int]()
        windows = short.perplexity(text, progress=lambda part: seen.append(part.chunks))
        assert windows.scored_tokens == len(ids) - 1 and seen == [*range(1, windows.total_chunks + 1)]
        nll = -expected_logprobs(llm, ids[:16]).sum() - sum(
            expected_logprobs(llm, ids[start : start + 16])[7:].sum() for start in range(8, len(ids) - 8, 8)
        )
        assert math.isclose(windows.nll.value, nll / (len(ids) - 1), rel_tol=1e-4)


def test_processors_change_the_logits_and_see_the_tokens(llm: LLM) -> None:
    seen = list[list[int]]()
    a, b = (llm.encode(letter)[0] for letter in "ab")

    def alternate(token_ids: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(token_ids)
        wanted = b if token_ids[-1] == a else a
        logits[np.arange(len(logits)) != wanted] = -np.inf
        return logits

    together = llm.generate(
        ["the", "cat"], [SamplingParams(temperature=0, max_tokens=5, logits_processors=(alternate,)), GREEDY]
    )
    assert together[0].text == "ababa"
    assert together[1].tokens == llm.generate("cat", GREEDY)[0].tokens
    assert seen[-1] == [*llm.encode("the"), a, b, a, b] and len(seen) == 5


def test_a_constraint_and_a_bias_hold_after_the_processors(llm: LLM) -> None:
    a, b = (llm.encode(letter)[0] for letter in "ab")

    def wants_a(_ids: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[a] = 1e6
        return logits

    digits = SamplingParams(
        max_tokens=4, logits_processors=(wants_a,), constraint=ConstraintSpec.regex("[0-9]{3}")
    )
    assert llm.generate("the", digits)[0].text.isdigit()
    biased = SamplingParams(temperature=0, max_tokens=2, logits_processors=(wants_a,), logit_bias={b: 1e9})
    assert llm.generate("the", biased)[0].text == "bb"


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (
            lambda _ids, logits: logits[:3],
            r"logits processor <lambda> returns float32 \[3\], no logits \[\d+\]",
        ),
        (lambda _ids, _logits: None, "logits processor <lambda> returns NoneType"),
        (lambda _ids, logits: [None, *logits[1:]], "logits processor <lambda> returns list, no logits"),
        (lambda _ids, logits: logits * np.nan, "returns NaN or infinity"),
        (
            lambda _ids, logits: logits - np.inf,
            "the logits processors, with logit_bias and the constraint, ban every",
        ),
    ],
)
def test_what_a_processor_may_not_return_fails_its_sequence_alone(
    llm: LLM, process: Any, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        llm.generate("the", SamplingParams(max_tokens=2, logits_processors=(process,)))
    assert llm.scheduler.cache_used == 0


def test_a_processors_own_error_is_raised(llm: LLM) -> None:
    def fails(_ids: list[int], _logits: NDArray[np.float32]) -> NDArray[np.float32]:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        llm.generate("the", SamplingParams(logits_processors=(fails,)))
    with pytest.raises(EngineError, match="must be functions of token ids and logits"):
        SamplingParams(logits_processors=(1,))  # type: ignore[arg-type]


def test_chats_are_answered_together_with_tools_and_schemas(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
    schema = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
    params = SamplingParams(max_tokens=60, seed=1, constraint=ConstraintSpec.json_schema(schema))
    answers = llm.chat_batch(conversations, params)
    assert all(json.loads(answer.text)["mood"] in ("good", "bad") for answer in answers)
    assert answers[1].text == llm.chat(conversations[1], params).text
    called = llm.chat_batch(
        conversations, SamplingParams(max_tokens=90, seed=2), tools=[TOOL], tool_choice="required"
    )
    assert [call.name for answer in called for call in answer.tool_calls][:2] == ["add", "add"]
    assert all(0 <= json.loads(answer.tool_calls[0].arguments)["a"] <= 9 for answer in called)
    assert len(llm.chat_batch(conversations, SamplingParams(max_tokens=2, n=2))) == 4
    for batch in (llm.generate, llm.chat_batch):
        with pytest.raises(EngineError, match="0 sampling parameters for 2 prompts"):
            batch(["a", "b"], [])  # type: ignore[operator]
    with pytest.raises(EngineError, match="1 sampling parameters for 2 prompts"):
        llm.chat_batch(conversations, [GREEDY])


def test_without_parameters_a_text_has_a_limit(llm: LLM) -> None:
    sequence = llm.stream("the").sequence
    assert (
        sequence.params.max_tokens == 256
        and llm.stream("the", SamplingParams()).sequence.params.max_tokens is None
    )


def test_progress_is_reported_as_completions_end(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    reports = list[BatchProgress]()
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 2, 4, 3, 1)]
    found = llm.generate(["a", "b", "c", "d", "e"], params, progress=reports.append)
    assert [len(each.tokens) for each in found] == [9, 2, 4, 3, 1]
    assert [each.done for each in reports] == sorted({each.done for each in reports})
    last = reports[-1]
    assert (last.done, last.total, last.tokens, last.seconds_left) == (5, 5, 19, 0.0) and len(reports) > 2
    llm.chat_batch([[{"role": "user", "content": "a"}]], GREEDY, progress=True)
    assert "1/1 done" in capsys.readouterr().err
    show_progress(BatchProgress(1, 4, 20, 2.0))
    assert "1/4 done, 10 tokens/s, 6 s left" in capsys.readouterr().err


def test_a_batch_that_another_thread_has_ended_does_not_wait_for_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_step, steps, reports = llm.step, list[int](), list[int]()
    others = llm.stream("the").sequence

    def step() -> list[tuple[Sequence, str]]:
        assert not steps, "a step of others alone"
        steps.append(1)
        while llm.scheduler.sequences:  # as another thread, between two steps of this one
            own_step()
        return [(others, "")]

    monkeypatch.setattr(llm, "step", step)
    llm.generate(["a", "b"], GREEDY, progress=lambda each: reports.append(each.done))
    assert reports == [2]


def test_a_closed_model_frees_its_memory_processes_and_threads(model: Path) -> None:
    other_threads = threading.active_count()
    children = {each.pid for each in psutil.Process().children(recursive=True)}
    llm = LLM(model, device="cpu", threads=1, draft_ngram=2)
    stream = llm.stream("the cat", GREEDY)
    text = "".join(stream)
    unfinished = llm.stream("the", GREEDY)
    next(unfinished)
    parts = [ref(llm.runner.decoder), ref(llm.loaded.cache), ref(llm.loaded.cache.layers[0])]
    llm.close()
    llm.close()
    assert not [part() for part in parts if part() is not None]
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= children
    assert threading.active_count() <= other_threads
    assert stream.completion.text == text and stream.completion.timings.gb_s > 0
    for use in (
        lambda: llm.generate("a"),
        lambda: next(unfinished),
        lambda: unfinished.completion,
        lambda: llm.with_images("a", [b""]),
        lambda: llm.embed("a"),
        lambda: llm.logits([1, 2]),
        lambda: llm.score("a", ["b"]),
        lambda: llm.perplexity("a b c"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.warm_up(),
    ):
        with pytest.raises(EngineError, match=r"^this LLM is closed: load the model again$"):
            use()


@pytest.mark.gpu
def test_on_a_gpu_processors_hold_and_close_frees_the_memory(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "tiny.gguf", "tiny")
    left = list[int]()

    def odd(_ids: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[::2] = -np.inf
        return logits

    for _ in range(2):  # what kernels share within a process is there after the first time
        with LLM(path, "cuda", 256, parallel=4, deterministic=True) as llm:
            prompts = [[n, n + 1, n + 2] for n in range(4)]
            alone = [llm.generate([prompt], GREEDY)[0].tokens for prompt in prompts]
            params = [GREEDY, GREEDY, replace(GREEDY, logits_processors=(odd,)), GREEDY]
            together = [each.tokens for each in llm.generate(prompts, params)]
            assert [together[n] for n in (0, 1, 3)] == [alone[n] for n in (0, 1, 3)]
            assert all(token % 2 for token in together[2])
            held = torch.cuda.memory_allocated()
        left.append(torch.cuda.memory_allocated())
    assert left[1] <= left[0] < held
