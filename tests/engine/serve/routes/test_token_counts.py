"""The token that ends a text was generated: usage of every API, metrics, the log and reports count it, as llama-server,
OpenAI and vLLM do."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quengine import LLM, SamplingParams
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import Served, serving
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

HI = [{"role": "user", "content": "hi"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "the cat"}),
    ("/v1/completions", {"prompt": "the cat"}),
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ("/api/chat", {"messages": HI}),
    ("/api/generate", {"prompt": "hi"}),
]
COUNTS = ("tokens_predicted", "completion_tokens", "output_tokens", "eval_count")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    return write_tiny(tmp_path_factory.mktemp("counts") / "tiny.gguf", kind="Q8_0", sizes=sizes)


@pytest.fixture(scope="module")
def end(path: Path) -> int:
    with LLM(path, device="cpu") as llm:
        return min(llm.tokenizer.eos_ids)


@pytest.fixture(scope="module", params=[0, 2])
def served(request: pytest.FixtureRequest, path: Path, end: int) -> Iterator[tuple[Served, int]]:
    """A server of a model that ends each text behind so many tokens, and how many it generates."""
    defaults = SamplingParams(max_tokens=9, min_tokens=request.param, logit_bias={end: 1e6})
    settings: dict[str, object] = {"model_names": ("tiny",), "defaults": defaults}
    with serving(lambda: LLMEngine(LLM(path, device="cpu")), settings=settings) as running:
        yield running, request.param + 1


def counted(answer: Any) -> Iterator[int]:
    """Every count of generated tokens in an answer."""
    if isinstance(answer, dict):
        yield from (answer[name] for name in COUNTS if name in answer)
        for each in answer.values():
            yield from counted(each)


@pytest.mark.parametrize(("route", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_the_end_token_is_counted_once(
    served: tuple[Served, int], route: str, body: dict[str, Any], stream: bool
) -> None:
    server, generated = served
    asked = body | {"model": "tiny", "stream": stream, "stream_options": {"include_usage": True}}
    with server.http() as http:
        answer = http.post(route, json=asked)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")] if stream else [answer.json()]
    assert max(count for event in events for count in counted(event)) == generated
    for event in events:
        if "timings" in event:
            assert event["timings"]["predicted_n"] == generated


def test_metrics_and_the_log_count_it_too(
    served: tuple[Served, int], caplog: pytest.LogCaptureFixture
) -> None:
    server, generated = served

    def total() -> dict[str, float]:
        with server.http() as http:
            lines = http.get("/metrics").text.splitlines()
        names = ("quengine_generated_tokens_total", "llamacpp:tokens_predicted_total")
        return {name: float(line.split()[-1]) for line in lines for name in names if line.startswith(name)}

    before = total()
    with caplog.at_level(logging.INFO, "quengine.serve.access"), server.http() as http:
        answer = http.post("/completion", json={"prompt": "the cat"}).json()
    assert {name: count - before[name] for name, count in total().items()} == dict.fromkeys(before, generated)
    assert answer["tokens_cached"] == answer["tokens_evaluated"] + generated - 1
    assert server.wait_until(lambda: f"completion {generated} tokens" in caplog.text)


def test_a_report_counts_it_and_the_list_of_tokens_does_not(path: Path, end: int) -> None:
    with LLM(path, device="cpu") as llm:
        (answer,) = llm.generate("the cat", SamplingParams(max_tokens=9, logit_bias={end: 1e6}))
        assert (answer.tokens, answer.timings.generated_tokens, answer.timings.end_tokens) == ([], 1, 1)
        (cut,) = llm.generate("the cat", SamplingParams(max_tokens=3, ignore_eos=True))
        assert (len(cut.tokens), cut.timings.generated_tokens, cut.timings.end_tokens) == (3, 3, 0)
