"""POST /predict, Vertex AI's form of requests of other routes, and the variables by which it names paths and a port."""

import pytest

from quengine.errors import EngineError
from quengine.serve.predict import VertexPaths
from tests.engine.serve.serving import KEY, serving

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def test_each_instance_is_answered_as_its_route_does() -> None:
    with serving() as served, served.http() as client:
        asked = [
            {"@requestFormat": "chatCompletions", **CHAT, "stream": True},
            {"@requestFormat": "/v1/completions", "prompt": "hi", "max_tokens": 3, "seed": 5},
            {"@requestFormat": "tokenize", "content": "ab"},
            {"@requestFormat": "messages", **CHAT},
        ]
        chat, text, tokens, message = client.post("/predict", json={"instances": asked}).json()["predictions"]
        direct = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, "seed": 5}).json()
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["content"]
    assert text["choices"] == direct["choices"] and len(tokens["tokens"]) == 2
    assert message["type"] == "message"


def test_an_instance_that_fails_has_its_error_among_the_answers() -> None:
    wrong = [
        {"@requestFormat": "chatCompletions", "messages": 5},
        {"@requestFormat": "predict", "instances": []},
        {"@requestFormat": "/tools"},
        {},
        {"@requestFormat": "completions", "prompt": "please fail", "max_tokens": 2},
        {"@requestFormat": "completions", "prompt": "hi", "max_tokens": 2},
    ]
    with serving() as served, served.http() as client:
        answers = client.post("/predict", json={"instances": wrong}).json()["predictions"]
        assert client.post("/predict", json={}).status_code == 400
        assert client.post("/predict", json={"instances": [{}] * 129}).status_code == 400
        assert client.post("/predict", json={"instances": []}).json() == {"predictions": []}
    messages = [each["error"]["message"] for each in answers[:5]]
    assert messages[0].startswith("messages = 5") and all(
        "no route is called that" in m for m in messages[1:4]
    )
    assert "logits are not finite" in messages[4] and answers[5]["choices"][0]["text"]


def test_vertex_ai_names_the_paths_and_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VertexPaths.of_environment() == VertexPaths()
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v1/endpoints/7:predict")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "v1/alive")
    monkeypatch.setenv("AIP_HTTP_PORT", "8090")
    assert VertexPaths.of_environment().port == 8090
    with serving(settings={"api_keys": (KEY,)}) as served, served.http() as client:
        instances = {"instances": [{"@requestFormat": "tokenize", "content": "ab"}]}
        assert client.get("/v1/alive").json() == {"status": "ok"}
        assert client.post("/v1/endpoints/7:predict", json=instances).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = client.post("/v1/endpoints/7:predict", json=instances, headers=headers)
    assert len(answer.json()["predictions"][0]["tokens"]) == 2


@pytest.mark.parametrize("name, value", [("AIP_HTTP_PORT", "http"), ("AIP_PREDICT_ROUTE", "/v1/completions")])
def test_values_of_vertex_ai_that_cannot_be(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=value), serving():
        pass
