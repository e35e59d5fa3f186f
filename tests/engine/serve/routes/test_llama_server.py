"""Forms of answers, errors and headers that llama-server's clients rely on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quengine.errors import EngineError
from quengine.serve.routes.answers import FINGERPRINT
from quengine.serve.settings import ServerSettings
from tests.engine.serve.fake_engine import FakeModel
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
