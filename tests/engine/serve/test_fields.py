"""Fields of llama-server's and of other servers' requests: which are taken, ignored or refused, and what they do."""

import logging
from collections.abc import Iterator

import httpx
import pytest

from quengine.request.sampling_params import SamplingParams
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
    assert "3 unknown fields" in line and "other" in line and "\n" not in line


@pytest.mark.parametrize(
    "field", [{"mirostat": 2}, {"max_new_tokens": 5}, {"adaptive_target": 0.5}, {"regex": "a"}, {"n_cmpl": 2}]
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
