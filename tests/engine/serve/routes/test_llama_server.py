"""Forms of answers, errors and headers that llama-server's clients rely on."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quengine.errors import EngineError
from quengine.serve.routes.answers import FINGERPRINT
from quengine.serve.settings import ServerSettings
from tests.engine.serve.fake_engine import FakeEngine, FakeModel
from tests.engine.serve.serving import Served, serving

CHAT, TEXT = (
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    {"prompt": "hi", "max_tokens": 3},
)
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/completion", TEXT)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http() as made:
        yield made


@pytest.fixture(scope="module")
def bare() -> Iterator[httpx.Client]:
    """Of a server with keys, for pages of this machine, without the routes that can be switched off."""
    off = {"ui": False, "slots": False, "metrics": False}
    with serving(settings={**off, "cors_origins": ("localhost",)}) as running, running.http() as made:
        yield made


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = client.post(path, json=body | {"stream": True}).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path, body", PATHS[:2])
def test_answers_name_the_build(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert FINGERPRINT.startswith("b") and client.get("/props").json()["build_info"] == FINGERPRINT
    assert client.post(path, json=body).json()["system_fingerprint"] == FINGERPRINT
    assert {event["system_fingerprint"] for event in events(client, path, body)} == {FINGERPRINT}


def test_a_chat_begins_with_a_role_and_no_content(client: httpx.Client) -> None:
    first, *rest = [event["choices"][0]["delta"] for event in events(client, "/chat/completions", CHAT)]
    assert first == {"role": "assistant", "content": None}
    assert all(delta.get("content") != "" and "role" not in delta for delta in rest)


def test_a_prompt_that_does_not_fit_has_llama_servers_type_of_error(client: httpx.Client) -> None:
    error = client.post("/v1/completions", json={"prompt": "a" * 5000}).json()["error"]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert error["n_prompt_tokens"] > error["n_ctx"] > 0
    assert "exceeds the available context size" in error["message"] and "too large" in error["message"]


@pytest.mark.parametrize("path, body", [*PATHS, ("/v1/responses", {"input": "hi", "max_output_tokens": 3})])
def test_events_have_timings_where_they_are_wanted(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    wanted = body | {"timings_per_token": True, "return_progress": True}
    timed = [event for event in events(client, path, wanted) if "timings" in event]
    progress = [event for event in timed if "prompt_progress" in event]
    begin, prompt = progress[0]["timings"], progress[-1]
    assert (begin["prompt_n"], begin["predicted_n"], begin["predicted_ms"]) == (0, 0, 0.0)
    assert prompt["timings"]["prompt_n"] == prompt["prompt_progress"]["total"]
    counts = [event["timings"]["predicted_n"] for event in timed if "prompt_progress" not in event]
    assert counts == sorted(counts) and counts[-1] == 3
    assert all(value >= 0 for event in timed for value in event["timings"].values())
    silent = events(client, path, body | {"timings_per_token": True})
    assert not any("prompt_progress" in event for event in silent)


@pytest.mark.parametrize("path, body", [*PATHS, ("/v1/responses", {"input": "hi", "max_output_tokens": 3})])
def test_the_last_event_of_a_stream_has_timings(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    *others, last = events(client, path, body)
    assert last["timings"]["predicted_n"] == 3 and not any("timings" in each for each in others)
    if path == "/v1/completions":
        assert last["usage"]["completion_tokens"] == 3
    if path in ("/completion", "/v1/responses"):
        return
    *others, last = events(client, path, body | {"stream_options": {"include_usage": True}})
    assert last["timings"] and last["usage"] and not any("timings" in each for each in others)


def test_probabilities_name_the_ids_of_tokens(client: httpx.Client) -> None:
    chat = client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 2}).json()
    native = client.post("/completion", json=TEXT | {"n_probs": 2, "return_tokens": True}).json()
    for entries in (chat["choices"][0]["logprobs"]["content"], native["completion_probabilities"]):
        assert all(
            entry["id"] >= 0 and all(top["id"] >= 0 for top in entry["top_logprobs"]) for entry in entries
        )
    assert [each["id"] for each in native["completion_probabilities"]] == native["tokens"]
    many = client.post("/completion", json=TEXT | {"n_probs": 100}).json()["completion_probabilities"]
    assert len(many) == 3


@pytest.mark.parametrize("path, body", PATHS)
def test_the_number_of_completions_has_two_names(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json=body | {"n_cmpl": 2}).json()
    assert len(answer if path == "/completion" else answer["choices"]) == 2
    assert client.post(path, json=body | {"n_cmpl": 17}).status_code == 400


@pytest.mark.parametrize("limit", [-1, None, 5])
def test_no_limit_is_shown_as_minus_one(client: httpx.Client, limit: int | None) -> None:
    body = {"prompt": "hi", "stop": ["w"], "n_predict": limit}
    settings = client.post("/completion", json=body).json()["generation_settings"]
    assert settings["n_predict"] == settings["max_tokens"] == {None: 8}.get(limit, limit)  # the server's -n
    assert settings["min_keep"] == 0 and settings["lora"] == []


def test_properties_name_what_there_is(client: httpx.Client, bare: httpx.Client) -> None:
    shown, off = client.get("/props").json(), bare.get("/props").json()
    names = ("endpoint_slots", "endpoint_metrics", "ui")
    assert [shown[name] for name in names] == [True] * 3 and [off[name] for name in names] == [False] * 3
    assert not shown["endpoint_props"] and not shown["cors_proxy_enabled"]
    assert shown["eos_token"] == "" and shown["model_ftype"] == "" and not shown["modalities"]["video"]


def test_models_name_what_they_read_and_write(client: httpx.Client) -> None:
    (model,) = client.get("/models").json()["data"]
    assert model["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    assert model["meta"]["ftype"] == "" and model["meta"]["n_ctx"] > 0


def test_texts_and_ids_are_tokenized_together(client: httpx.Client) -> None:
    def tokens(content: object, **more: object) -> Any:
        return client.post("/tokenize", json={"content": content, **more})

    text = tokens("ab").json()["tokens"]
    assert tokens(["ab", 7, "ab"]).json()["tokens"] == [*text, 7, *text]
    assert tokens([7], with_pieces=True).json()["tokens"] == [{"id": 7, "piece": "w7 "}]
    assert tokens([]).json()["tokens"] == tokens("").json()["tokens"] == []
    for wrong in ([1.5], [-1], [10**9], [["a"]], [None], 5, {}):
        assert tokens(wrong).status_code == 400, wrong


def test_where_no_slot_is_free_slots_may_say_so_by_their_status() -> None:
    with (
        serving(lambda: FakeEngine(step_s=0.01), settings={"parallel": 2}) as served,
        served.http() as client,
    ):
        path = "/slots?fail_on_no_slot=1"
        assert client.get(path).json() == client.get("/slots").json()
        body = {"prompt": "hi", "n_predict": 1500, "n": 2, "stream": True}
        with client.stream("POST", "/completion", json=body) as answer:
            lines = answer.iter_lines()  # kept: a generator that goes closes the answer
            next(lines)
            assert served.wait_until(lambda: client.get(path).status_code == 503)
            assert client.get("/slots").status_code == 200
        assert served.wait_until(lambda: client.get(path).status_code == 200)


def test_a_body_that_is_packed_is_refused_as_such(client: httpx.Client) -> None:
    raw = gzip.compress(json.dumps(TEXT).encode())
    answer = client.post("/completion", content=raw, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and "gzip" in answer.json()["error"]["message"]
    assert client.post("/completion", json=TEXT, headers={"Content-Encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_prompts_are_counted_without_an_answer(client: httpx.Client, prefix: str) -> None:
    counted = client.post(f"{prefix}/chat/completions/input_tokens", json=CHAT).json()
    usage = client.post("/v1/chat/completions", json=CHAT).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}
    assert client.post(f"{prefix}/responses/input_tokens", json={"input": "hi"}).json() == counted


def test_biases_are_shown_as_llama_server_shows_them(client: httpx.Client) -> None:
    body = TEXT | {"logit_bias": [[5, 1.5], [6, False]]}
    settings = client.post("/completion", json=body).json()["generation_settings"]
    assert settings["logit_bias"] == [{"token": 5, "bias": 1.5}, {"token": 6, "bias": None}]
    settings = client.post("/completion", json=TEXT | {"ignore_eos": True}).json()["generation_settings"]
    banned = [{"token": token, "bias": None} for token in sorted(FakeModel(64).eos_ids)]
    assert settings["logit_bias"] == banned and (settings["ignore_eos"] or not banned)


def test_each_scored_token_has_an_event_of_its_own(client: httpx.Client) -> None:
    found = events(client, "/completion", {"prompt": "hi", "n_predict": 40, "n_probs": 2})
    counts = [len(event["completion_probabilities"]) for event in found if not event["stop"]]
    assert set(counts) == {1} and len(counts) == 40


def test_routes_can_be_switched_off(client: httpx.Client, bare: httpx.Client) -> None:
    for path, status in (("/", 404), ("/slots", 501), ("/metrics", 501)):
        assert client.get(path).status_code == 200
        assert bare.get(path).status_code == status


def test_names_of_headers_are_written_as_llama_server_writes_them(client: httpx.Client) -> None:
    names = [name for name, _ in client.get("/metrics").headers.raw]
    assert b"Process-Start-Time-Unix" in names and b"Content-Type" in names


def test_a_preflight_of_a_page_that_may_not_come_is_answered_without_leave(bare: httpx.Client) -> None:
    asked = {"Access-Control-Request-Method": "POST"}
    for origin, allowed in (("http://localhost:3000", True), ("http://localhost.evil.com", False)):
        answer = bare.options("/completions", headers={**asked, "Origin": origin})
        assert answer.status_code == 200
        assert answer.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)


def test_several_addresses_are_one_flag() -> None:
    settings = ServerSettings(("fake",), host="127.0.0.1, ::1")
    assert settings.hosts == ("127.0.0.1", "::1") and settings.loopback
    for host, error in (("127.0.0.1,0.0.0.0", "lets other machines in"), (",", "no address")):
        with pytest.raises(EngineError, match=error):
            ServerSettings(("fake",), host=host)
