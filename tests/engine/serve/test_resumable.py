"""Streams that outlive their connection: read again from any byte, ended by DELETE, kept within bounds."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from quengine.serve import resumable
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import Served, serving

CHAT = "/v1/chat/completions"


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "seed": 1,
        "stream": True,
        **more,
    }


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(lambda: FakeEngine(step_s=0.005)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http() as made:
        yield made


def again(client: httpx.Client, name: str, at: int = 0) -> httpx.Response:
    return client.get("/v1/stream", params={"conv_id": name, "from": at})


def test_a_stream_is_read_again_from_any_byte_until_it_is_deleted(client: httpx.Client) -> None:
    name = "a chat::org/model:Q8_0"
    whole = client.post(CHAT, json=body(20), headers={"X-Conversation-Id": name}).text
    assert whole.endswith("data: [DONE]\n\n")
    replayed = again(client, name)
    assert replayed.text == whole and replayed.headers["content-type"].startswith("text/event-stream")
    assert again(client, name, 100).text == whole[100:]
    assert again(client, name, len(whole)).text == ""
    (found,) = client.post("/v1/streams/lookup", json={"conversation_ids": ["a chat", "other"]}).json()
    assert (found["conversation_id"], found["is_done"], found["total_bytes"]) == (name, True, len(whole))
    assert client.delete("/v1/stream", params={"conv_id": name}).status_code == 204
    assert again(client, name).status_code == 404
    assert client.delete("/v1/stream", params={"conv_id": name}).status_code == 204


def test_it_goes_on_without_its_connection_and_is_followed_to_its_end(
    client: httpx.Client, served: Served
) -> None:
    alone = client.post(CHAT, json=body(60)).text
    with client.stream("POST", CHAT, json=body(60), headers={"X-Conversation-Id": "left"}) as answer:
        next(answer.iter_lines())
    text = again(client, "left").text

    def words(stream: str) -> str:
        chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        return "".join(
            chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]
        )

    assert words(text) == words(alone) and text.endswith("data: [DONE]\n\n")
    assert served.server.worker.idle


def test_without_the_header_or_a_stream_a_client_that_leaves_ends_its_request(
    client: httpx.Client, served: Served
) -> None:
    for more, headers in (({}, {}), ({"stream": False}, {"X-Conversation-Id": "whole"})):
        with (
            pytest.raises(httpx.ReadTimeout),
            client.stream(
                "POST",
                CHAT,
                json=body(3000, **more),
                headers=headers,
                timeout=httpx.Timeout(60, read=0.3),
            ) as answer,
        ):
            next(answer.iter_lines())
            raise httpx.ReadTimeout("enough")
        assert served.wait_until(lambda: served.server.worker.idle)
    assert again(client, "whole").status_code == 404


def test_a_delete_ends_what_is_computed_and_so_does_another_stream_of_the_conversation(
    client: httpx.Client, served: Served
) -> None:
    for end in (
        lambda: client.delete("/v1/stream", params={"conv_id": "long"}),
        lambda: client.post(CHAT, json=body(1), headers={"X-Conversation-Id": "long"}),
    ):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.post, CHAT, json=body(3000), headers={"X-Conversation-Id": "long"})
            assert served.wait_until(lambda: served.server.worker.running == 1)
            assert served.wait_until(lambda: again_is_there(served, "long"))
            end()
            assert "[DONE]" not in running.result(120).text
        assert served.wait_until(lambda: served.server.worker.idle)


def again_is_there(served: Served, name: str) -> bool:
    stream = served.server.models.streams.get(name)
    return stream is not None and stream.head is not None


def test_a_request_that_fails_leaves_no_stream(client: httpx.Client) -> None:
    answer = client.post(CHAT, json={"stream": True}, headers={"X-Conversation-Id": "bad"})
    assert answer.status_code == 400
    assert again(client, "bad").status_code == 404
    deep = client.post(CHAT, content=b'{"stream": ' + b"[" * 5000, headers={"X-Conversation-Id": "bad"})
    assert deep.status_code == 400 and "more than 100 levels" in deep.json()["error"]["message"]
    long = client.post(CHAT, json=body(1), headers={"X-Conversation-Id": "x" * 600})
    assert long.status_code == 400


def test_requests_for_streams_are_checked(client: httpx.Client) -> None:
    client.post(CHAT, json=body(1), headers={"X-Conversation-Id": "short"})
    assert client.get("/v1/stream").status_code == client.delete("/v1/stream").status_code == 400
    for at in ("-1", "x", "1e3", "99999999"):
        answer = client.get("/v1/stream", params={"conv_id": "short", "from": at})
        assert answer.status_code == 400 and "from = " in answer.text


def test_streams_are_kept_within_bounds(
    client: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "MAX_STREAMS", 3)
    monkeypatch.setattr(resumable, "MAX_BYTES", 1000)
    for number in range(5):
        whole = client.post(CHAT, json=body(20), headers={"X-Conversation-Id": f"n{number}"}).text
    names = [f"n{number}" for number in range(5)]
    kept = client.post("/v1/streams/lookup", json={"conversation_ids": names}).json()
    assert [each["conversation_id"] for each in kept] == ["n2", "n3", "n4"]
    assert len(whole) > 1000 and again(client, "n4").status_code == 400
    assert again(client, "n4", len(whole) - 1000).text == whole[-1000:]
    monkeypatch.setattr(resumable, "KEPT_SECONDS", 0.0)
    assert served.wait_until(lambda: again(client, "n4", len(whole) - 1000).status_code == 404)
