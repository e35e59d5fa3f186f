"""Fields of llama-server's and of other servers' requests: which are taken, ignored or refused, and what they do."""

import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quengine.request.sampling_params import SamplingParams
from tests.engine.serve.fake_engine import FIRST_BYTE
from tests.engine.serve.serving import Served, serving

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http() as made:
        yield made


def metric(client: httpx.Client, name: str) -> float:
    values = [line.split()[1] for line in client.get("/metrics").text.splitlines() if line.split()[0] == name]
    return float(values[0])


def test_unknown_fields_are_ignored_counted_and_named_with_v(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "quengine.serve")
    before = metric(client, "quengine_ignored_fields_total")
    plain = client.post("/completion", json={"prompt": "a", "seed": 1}).json()
    given = client.post(
        "/completion", json={"prompt": "a", "seed": 1, "no\nsuch": 1, "other": [2], "speculative.n_max": 3}
    )
    assert given.status_code == 200 and given.json()["content"] == plain["content"]
    assert metric(client, "quengine_ignored_fields_total") == before + 3
    (line,) = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert "(3)" in line and "other" in line and "\n" not in line


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "user", "content": None}, ""),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No."),
        ({"role": "assistant", "refusal": "No."}, "No."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "reasoning_content": "Hm."}, ""),
        ({"role": "tool", "tool_call_id": "a", "content": None}, ""),
    ],
)
def test_messages_without_text_and_refusals(client: httpx.Client, message: dict[str, Any], text: str) -> None:
    body = {"messages": [*MESSAGES, message, *MESSAGES]}
    prompt = client.post("/apply-template", json=body).json()["prompt"]
    assert prompt == f"user: hi\n{message['role']}: {text}\nuser: hi"


def test_empty_stop_strings_are_passed_over(client: httpx.Client) -> None:
    asked = {"prompt": "a", "seed": 1, "n_predict": 4}
    plain = client.post("/completion", json=asked).json()
    given = client.post("/completion", json=asked | {"stop": ["", "\0"]}).json()
    assert given["content"] == plain["content"] and given["generation_settings"]["stop"] == ["\0"]
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "a"}),
        ("/api/generate", {"prompt": "a", "options": {"stop": ""}}),
        ("/completion", {"prompt": "a"}),
    ):
        assert client.post(path, json=body | {"stop": ""}).status_code == 200, path


def test_a_function_s_result_and_a_conversation_without_messages(client: httpx.Client) -> None:
    body = {"messages": [*MESSAGES, {"role": "function", "name": "f", "content": "3"}]}
    assert client.post("/apply-template", json=body).json()["prompt"] == "user: hi\nfunction: 3"
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert client.post("/apply-template", json={"messages": []}).json()["prompt"] == ""
    nothing = client.post("/v1/chat/completions", json={"messages": []})
    assert nothing.status_code == 400 and "the prompt has no tokens" in nothing.text


@pytest.mark.parametrize(
    "field",
    [
        {"stream_options": {"include_usage": True}},
        {"reasoning_effort": "medium"},
        {"reasoning": {"effort": "low"}},
        {"verbosity": "low"},
    ],
    ids=str,
)
def test_what_has_no_effect_here_is_counted_and_not_refused(
    client: httpx.Client, field: dict[str, Any]
) -> None:
    before = metric(client, "quengine_ignored_fields_total")
    body = {"messages": MESSAGES, "seed": 1, "max_tokens": 4}
    plain = client.post("/v1/chat/completions", json=body).json()
    given = client.post("/v1/chat/completions", json=body | field)
    assert given.status_code == 200, given.text
    assert given.json()["choices"] == plain["choices"]
    assert metric(client, "quengine_ignored_fields_total") == before + 1


@pytest.mark.parametrize("think", [True, "medium", "max"])
def test_thinking_at_a_model_without_it_is_counted_and_not_refused(client: httpx.Client, think: Any) -> None:
    before = metric(client, "quengine_ignored_fields_total")
    body = {"model": "fake", "messages": MESSAGES, "stream": False, "think": think}
    assert client.post("/api/chat", json=body).status_code == 200
    assert metric(client, "quengine_ignored_fields_total") == before + 1


def test_what_sillytavern_sends_of_samplers_is_taken(client: httpx.Client) -> None:
    body = {
        "prompt": "a",
        "max_new_tokens": 3,
        "adaptive_target": -0.01,
        "adaptive_decay": 0.9,
        "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "min_p", "temperature", "adaptive_p"],
    }
    answer = client.post("/completion", json=body).json()
    assert answer["tokens_predicted"] == 3
    assert answer["generation_settings"]["samplers"] == body["samplers"][:-1]
    assert client.post("/completion", json=body | {"max_tokens": 2}).json()["tokens_predicted"] == 2
    assert client.post("/completion", json=body | {"samplers": "edkta"}).status_code == 200
    on = client.post("/completion", json=body | {"adaptive_target": 0.5})
    assert on.status_code == 400 and "there is no sampler adaptive_p" in on.text


@pytest.mark.parametrize(
    "field",
    [{"tfs_z": 0.5}, {"max_length": 5}, {"regex": "a"}, {"min_keep": 2}],
)
def test_known_fields_that_would_change_the_text_are_refused(
    client: httpx.Client, field: dict[str, object]
) -> None:
    for path, body in (("/completion", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = client.post(path, json=body | field)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported", answer.text


def test_any_model_name_is_taken_and_the_answer_has_the_servers(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, "model": "gpt-4o"})
    assert answer.status_code == 200 and answer.json()["model"] == "fake"
    assert client.post("/tokenize", json={"content": "a", "model": "x" * 1000}).status_code == 200
    assert client.post("/v1/completions", json={"prompt": "a", "model": 3}).status_code == 400


def test_a_strict_server_takes_its_own_names_only() -> None:
    settings = {"model_names": ("one", "two"), "strict_model": True}
    with serving(settings=settings) as served, served.http() as client:
        for name, status in (("one", 200), ("two", 200), ("", 200), (None, 200), ("three", 404)):
            answer = client.post("/v1/completions", json={"prompt": "a", "model": name})
            assert answer.status_code == status, name
            if status == 404:
                assert answer.json()["error"]["code"] == "model_not_found"
        document = client.get("/openapi.json").json()
        assert document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == [
            None, "one", "two", "",
        ]  # fmt: skip


def test_the_servers_seed_holds_where_a_request_gives_none() -> None:
    settings = {"defaults": SamplingParams(max_tokens=3, seed=77)}
    with serving(settings=settings) as served, served.http() as client:

        def seed(**fields: object) -> int:
            answer = client.post("/v1/completions", json={"prompt": "a", **fields}).json()
            return int(answer["seed"])

        assert (seed(), seed(), seed(seed=5)) == (77, 77, 5)
        assert len({seed(seed=-1) for _ in range(3)}) > 1
        assert client.get("/props").json()["default_generation_settings"]["params"]["seed"] == 77


def content(client: httpx.Client, **fields: object) -> str:
    answer = client.post("/completion", json={"seed": 1, "n_predict": 3, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["content"])


def test_a_prompt_may_be_an_object_or_mix_text_with_tokens(client: httpx.Client) -> None:
    plain = content(client, prompt="abc")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]
    a, c = FIRST_BYTE + ord("a"), FIRST_BYTE + ord("c")
    for prompt in (
        {"prompt_string": "abc"},
        {"content": parts},
        [a, "b", c],
        {"prompt_string": "abc", "multimodal_data": []},
    ):
        assert content(client, prompt=prompt) == plain, prompt
    several = client.post(
        "/completion",
        json={"prompt": [[a, "bc"], {"prompt_string": "abc"}, "abc"], "seed": 1, "n_predict": 3},
    )
    assert [each["content"] for each in several.json()] == [plain] * 3


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"prompt_string": 1},
        {"content": "abc"},
        {"content": []},
        {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"prompt_string": "a", "multimodal_data": "AAAA"},
        [1, {"prompt_string": "a"}],
    ],
)
def test_an_object_that_is_no_text_is_a_400(client: httpx.Client, prompt: object) -> None:
    for path in ("/completion", "/v1/completions"):
        answer = client.post(path, json={"prompt": prompt})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("prompt"), answer.text


def test_a_bias_may_be_of_a_text_in_both_forms(client: httpx.Client) -> None:
    a, b = FIRST_BYTE + ord("a"), FIRST_BYTE + ord("b")
    for biases in ({"ab": -5, "7": 1}, [["ab", -5], [7, 1]]):
        answer = client.post("/completion", json={"prompt": "a", "logit_bias": biases}).json()
        shown = {each["token"]: each["bias"] for each in answer["generation_settings"]["logit_bias"]}
        assert shown == {a: -5.0, b: -5.0, 7: 1.0}
    for biases in ({"9" * 12: 1}, {"99999": 1}, {"a": "b"}, {"a": True}, [["a"]], {"a" * 9000: 1}):
        assert client.post("/completion", json={"prompt": "a", "logit_bias": biases}).status_code == 400, (
            biases
        )


def test_min_tokens_is_a_count(client: httpx.Client) -> None:
    for least in (0, 4, 4.0, 2**31 - 1, None):
        assert client.post("/v1/completions", json={"prompt": "a", "min_tokens": least}).status_code == 200
    for wrong in (-1, 1.5, "3", 2**31, True):
        answer = client.post("/v1/completions", json={"prompt": "a", "min_tokens": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "min_tokens", answer.text


def test_response_fields_chooses_fields_of_the_native_answer(client: httpx.Client) -> None:
    fields = ["content", "generation_settings/n_predict", "prompt", "no/such", "timings/x/y", "prompt/x", ""]
    body = {"prompt": "abc", "n_predict": 3, "response_fields": fields}
    answer = client.post("/completion", json=body).json()
    assert answer.keys() == {"content", "generation_settings/n_predict", "prompt"}
    assert (answer["generation_settings/n_predict"], answer["prompt"]) == (3, "abc")
    *_, last = events(client.post("/completion", json=body | {"stream": True}).text)
    assert last == {**answer, "content": ""}
    assert len(client.post("/completion", json=body | {"response_fields": []}).json()) > 10
    assert client.post("/completion", json=body | {"response_fields": [1]}).status_code == 400


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def streamed_text(found: list[dict[str, Any]]) -> str:
    """Of all events; how many there are follows from how fast they are read."""
    parts = [(event.get("choices") or [event])[0] for event in found]
    return "".join(
        p.get("content") or p.get("text") or p.get("delta", {}).get("content") or "" for p in parts
    )


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_how_much_of_the_prompt_is_processed(client: httpx.Client, path: str) -> None:
    text = "x" * 600
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    plain = (
        {**body, "stream": True, "seed": 1, "max_tokens": 3, "logprobs": True}
        if "chat" in path
        else {**body, "stream": True, "seed": 1, "max_tokens": 3}
    )
    found = events(client.post(path, json=plain | {"return_progress": True}).text)
    reports = [event["prompt_progress"] for event in found if "prompt_progress" in event]
    assert [report["processed"] for report in reports] == [0, 256, 512, reports[0]["total"]]
    assert {report["cache"] for report in reports} == {0} and all(
        report["time_ms"] >= 0 for report in reports
    )
    others = [event for event in found if "prompt_progress" not in event]
    without = events(client.post(path, json=plain).text)
    assert streamed_text(others) == streamed_text(without) != ""
    assert not any("prompt_progress" in event for event in without)
    whole = client.post(path, json={**plain, "stream": False, "return_progress": True})
    assert whole.status_code == 200 and "prompt_progress" not in whole.json()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_verbose_adds_the_native_answer(client: httpx.Client, path: str) -> None:
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "user: hi"}
    body |= {"seed": 1, "max_tokens": 3}
    answer = client.post(path, json=body | {"verbose": True}).json()
    native = client.post(
        "/completion", json={"prompt": "user: hi", "seed": 1, "n_predict": 3, "return_tokens": True}
    ).json()
    for key in ("prompt", "content", "tokens", "stop_type", "tokens_evaluated"):
        assert answer["__verbose"][key] == native[key], key
    assert len(client.post(path, json=body | {"verbose": True, "n": 2}).json()["__verbose"]) == 2
    assert "__verbose" not in client.post(path, json=body | {"verbose": False}).json()
    *_, last = events(client.post(path, json=body | {"verbose": True, "stream": True}).text)
    assert last["__verbose"]["prompt"] == "user: hi"


SAMPLED = {"id", "token", "bytes", "prob", "top_probs"}


def test_probabilities_after_the_samplers_have_llama_servers_names(client: httpx.Client) -> None:
    asked = {"prompt": "a", "n_probs": 2, "n_predict": 2, "seed": 1, "post_sampling_probs": True}
    (first, _) = client.post("/completion", json=asked).json()["completion_probabilities"]
    assert first.keys() == SAMPLED and first["prob"] == pytest.approx(math.exp(-0.5))
    assert [each.keys() for each in first["top_probs"]] == 2 * [SAMPLED - {"top_probs"}]
    stream = events(client.post("/completion", json=asked | {"stream": True}).text)
    assert stream[0]["completion_probabilities"][0] == first
    body = {"max_tokens": 2, "post_sampling_probs": True}
    chat = body | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    for stream in (False, True):
        answer = client.post("/v1/chat/completions", json=chat | {"stream": stream})
        answers = events(answer.text) if stream else [answer.json()]
        scored = [each["choices"][0]["logprobs"] for each in answers if each["choices"][0]["logprobs"]]
        assert scored[0]["content"][0].keys() == SAMPLED
    for asked in ({}, {"stream": True}, {"echo": True}, {"echo": True, "stream": True}):
        answer = client.post("/v1/completions", json=body | {"prompt": "a", "logprobs": 1} | asked)
        answers = events(answer.text) if "stream" in asked else [answer.json()]
        scored = [each["choices"][0]["logprobs"] for each in answers if each["choices"][0]["logprobs"]]
        assert [token.keys() for each in scored for token in each["content"]] == 2 * [SAMPLED], asked
        assert "".join(each["choices"][0]["text"] for each in answers).startswith(
            "a" if "echo" in asked else ""
        )


def test_settings_of_the_samplers_are_read_and_told(client: httpx.Client) -> None:
    given = {
        "dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["\n", "é"], "xtc_probability": 0.5, "xtc_threshold": 0.2, "mirostat": 2,
        "mirostat_tau": 4.0, "mirostat_eta": 0.2, "dynatemp_range": 0.5, "dynatemp_exponent": 1.5,
        "top_n_sigma": 1.0, "typical_p": 0.9, "samplers": ["top_k", "temperature"],
    }  # fmt: skip
    answer = client.post("/completion", json={"prompt": "a", "n_predict": 1, **given}).json()
    told = answer["generation_settings"]
    assert {name: told[name] for name in given} == given and told["post_sampling_probs"] is False
    answer = client.post("/completion", json={"prompt": "a", "n_predict": 1, "samplers": "kt"}).json()
    assert answer["generation_settings"]["samplers"] == ["top_k", "temperature"]
    for passed in (["tfs_z", "top_k"], ["adaptive_p", "top_k"], "ak"):
        answer = client.post("/completion", json={"prompt": "a", "n_predict": 1, "samplers": passed}).json()
        assert answer["generation_settings"]["samplers"] == ["top_k"], passed
    for wrong in (["tfs"], ["top_k", 3], "kq", 5, ["top_k"] * 33, "k" * 33):
        error = client.post("/completion", json={"prompt": "a", "samplers": wrong})
        assert error.status_code == 400 and "samplers" in error.json()["error"]["message"], wrong
