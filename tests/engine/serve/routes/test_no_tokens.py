"""A limit of 0 tokens: the prompt is computed, and the answer has no text, as llama-server has it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.tool_model import serving_tools
from tests.tiny_models import write_tiny

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ROUTES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "hi", "max_tokens": 0}),
    ("/v1/completions", {"prompt": ["hi", "there"], "max_tokens": 0, "n": 2, "logprobs": 1}),
    ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": 0, "logprobs": True}),
    ("/v1/chat/completions", {"messages": HI, "n_predict": 0, "tools": TOOLS}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 0, "tools": TOOLS, "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 0, "response_format": {"type": "json_object"}}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 0}),
    ("/completion", {"prompt": "hi", "n_predict": 0, "n_probs": 1}),
    ("/completion", {"prompt": "hi", "max_tokens": 0, "return_progress": True, "timings_per_token": True}),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tools(tmp_path_factory.mktemp("none")) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http() as made:
        yield made


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=str)
def test_every_route_answers_without_text(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    given = answer.json()
    for choice in given.get("choices", ()):
        assert choice["finish_reason"] == "length"
        assert not (choice.get("text") or choice.get("message", {}).get("content"))
        assert not choice.get("message", {}).get("tool_calls")
    if path == "/completion":
        assert (given["content"], given["tokens_predicted"], given["stop_type"]) == ("", 0, "limit")
        assert given["tokens_evaluated"] > 0 and given["timings"]["predicted_n"] == 0
    elif path == "/v1/responses":
        assert given["incomplete_details"] == {"reason": "max_output_tokens"}
        assert given["usage"]["output_tokens"] == 0 < given["usage"]["input_tokens"]
    else:
        assert given["usage"]["completion_tokens"] == 0 < given["usage"]["prompt_tokens"]
    streamed = client.post(path, json=body | {"stream": True})
    assert streamed.status_code == 200
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert events and not any("error" in event and event["error"] for event in events)


def test_the_servers_own_limit_may_be_0(served: Served) -> None:
    del served
    with serving(settings={"defaults": SamplingParams(max_tokens=0)}) as running, running.http() as http:
        for path, body in (("/v1/completions", {"prompt": "hi"}), ("/completion", {"prompt": "hi"})):
            given = http.post(path, json=body).json()
            assert given.get("content", "") == "" and given.get("usage", {}).get("completion_tokens", 0) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_scored_without_a_token_behind_it(tmp_path: Any, stream: bool) -> None:
    path, ids = write_tiny(tmp_path / "tiny.gguf"), [7, 20, 33, 1, 7]
    with LLM(path, device="cpu") as llm:
        rows = torch.log_softmax(llm.logits(ids)[:-1], -1)
        expected = [row[token].item() for row, token in zip(rows, ids[1:], strict=True)]
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    with serving(lambda: LLMEngine(LLM(path, device="cpu"))) as served, served.http() as client:
        answer = client.post("/v1/completions", json=body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in (events if stream else [answer.json()])]
        (scores,) = (choice["logprobs"]["token_logprobs"] for choice in choices if choice["logprobs"])
        assert scores[0] is None and scores[1:] == pytest.approx(expected, abs=1e-4)
        assert choices[-1]["finish_reason"] == "length"
