"""Many streams at once, clients that leave, readers that sleep: every text is its own, and nothing is left behind."""

import asyncio
import json
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from quengine.serve.connections import Connection
from quengine.serve.processes import server_handle
from quengine.serve.processes.shared_engine import Event, Finished
from quengine.serve.routes import streaming
from quengine.serve.settings import Limits
from tests.engine.serve.fake_engine import FAILING_PROMPT, FakeEngine, FakeModel, expected_tokens
from tests.engine.serve.serving import Served, held, one_by_one, serving

MODEL = FakeModel(4096)


def expected(prompt: str, seed: int, count: int) -> str:
    return MODEL.decode(expected_tokens(MODEL.encode(prompt, True, True), seed, 0, count))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(lambda: FakeEngine(step_s=0.004, capacity=32), limits=Limits(write_s=2.0)) as running:
        yield running


def idle(served: Served) -> bool:
    worker = served.server.worker
    return worker.idle and not worker.stats.slots


async def one_stream(client: httpx.AsyncClient, number: int, rng: random.Random) -> str:
    """One request to its end, or left in the middle; returns which, having checked what came."""
    prompt, count = f"stream {number} {rng.random()}", rng.randrange(1, 120)
    leave_after = rng.randrange(0, 20) if rng.random() < 0.2 else None
    slow = rng.random() < 0.1
    body = {"prompt": prompt, "seed": number, "max_tokens": count, "stream": True}
    text, done = "", False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line:
                continue
            if line == "data: [DONE]":
                done = True
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if (
                leave_after is not None and text.count(" ") >= leave_after
            ):  # several tokens come at once to a slow reader
                break
            if slow:
                await asyncio.sleep(rng.random() * 0.02)
    whole = expected(prompt, number, count)
    if done or leave_after is None:
        assert (text, done) == (whole, True)
        return "whole"
    assert whole.startswith(text)
    return "left"


async def many_streams(url: str, streams: int, requests: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None)

    async def client_of(client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        for _ in range(requests):
            outcomes[await one_stream(client, number, rng)] += 1

    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(client_of(client, number) for number in range(streams)))
    return outcomes


def test_64_streams_with_cancels_and_slow_readers_lose_double_and_cross_nothing(served: Served) -> None:
    outcomes = asyncio.run(many_streams(served.url, 64, 3))
    assert outcomes["whole"] > 100 and outcomes["left"] > 15, outcomes
    assert served.wait_until(lambda: idle(served)), served.server.worker.stats


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/completion", "/v1/responses", "/v1/messages"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(served: Served, path: str, stream: bool) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "stream": stream}
    keys = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
    keep = keys.get(path, "prompt")
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    request = {keep: body[keep], limit: 4000, "stream": stream}
    with served.http(headers={"connection": "close"}) as client:
        raw = client.build_request("POST", path, json=request)
        with raw_connection(served) as connection:
            connection.sendall(raw_bytes(raw))
            assert served.wait_until(lambda: served.server.worker.running == 1)
    assert served.wait_until(lambda: idle(served))


def test_a_client_that_leaves_while_it_waits_or_is_prefilled_leaves_nothing() -> None:
    goes_on = threading.Event()
    requests = [raw_completion(f"{i} " + "x" * 3000, 900) for i in range(40)]
    with serving(lambda: held(FakeEngine(capacity=32), goes_on)) as served:
        connections = [raw_connection(served) for _ in requests]
        for connection, request in zip(connections, requests, strict=True):
            connection.sendall(request)
        worker = served.server.worker
        assert served.wait_until(lambda: worker.running + worker.waiting == 40)
        for connection in connections:
            connection.close()
        assert served.wait_until(lambda: not worker.waiting)
        goes_on.set()
        assert served.wait_until(lambda: idle(served))


def test_a_reader_that_sleeps_is_cut_off_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """With log-probabilities, 4000 tokens are some megabytes: more than all buffers on the way hold."""
    with serving(lambda: FakeEngine(step_s=0.0005), limits=Limits(write_s=0.5)) as served:
        with raw_connection(served, receive_buffer=4096) as sleeper:
            sleeper.sendall(raw_completion("sleepy", 4000, logprobs=20))
            assert sleeper.recv(1) == b"H"
            with served.http() as client:
                answer = client.post("/v1/completions", json={"prompt": "awake", "seed": 1, "max_tokens": 5})
            assert answer.json()["choices"][0]["text"] == expected("awake", 1, 5)
            assert served.wait_until(lambda: not served.server.server_state.connections)
        # The connection is closed before the line is written.
        assert served.wait_until(lambda: "a write was not taken within 0.5 s" in caplog.text)
        assert served.wait_until(lambda: idle(served))
    assert "ASGI callable" not in caplog.text


def test_a_failed_engine_fails_what_runs_is_replaced_and_serves_again() -> None:
    made: list[FakeEngine] = []

    def make_engine() -> FakeEngine:
        made.append(FakeEngine(step_s=0.01))
        return made[-1]

    with serving(make_engine) as served, served.http() as client:
        with raw_connection(served) as running:
            running.sendall(raw_completion("innocent", 4000))
            assert served.wait_until(lambda: served.server.worker.stats.slots != ())
            crash = client.post("/v1/completions", json={"prompt": "please crash"})
            assert crash.status_code == 500 and "the device is gone" in crash.json()["error"]["message"]
            received = b"".join(iter(lambda: running.recv(65536), b""))
        assert b'data: {"error":{"message":"the engine failed' in received
        assert served.wait_until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
        assert len(made) == 2


def test_an_answer_that_is_complete_does_not_depend_on_its_engine() -> None:
    """The engine is gone before the end of an answer, which has come from it, is written."""

    class Gone(FakeEngine):
        def step(self) -> list[Event]:
            events = super().step()
            if any(isinstance(event, Finished) for event in events):
                worker.engine = None
            return events

    engine = Gone(step_s=0.0)
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "verbose": True}
    requests = (
        ("/completion", {"prompt": "a", "n_probs": 2, "n_predict": 3}, '"stop":true'),
        ("/v1/chat/completions", {**chat, "max_tokens": 3}, "__verbose"),
        ("/v1/completions", {"prompt": "a", "verbose": True, "max_tokens": 3}, "__verbose"),
        ("/api/chat", {**chat, "options": {"num_predict": 3}}, '"done":true'),
    )
    with serving(lambda: engine) as served, served.http() as client:
        worker = served.server.worker
        for path, body, end in requests:
            for stream in (False, True):
                assert served.wait_until(lambda: worker.idle)
                worker.engine = engine
                answer = client.post(path, json={**body, "stream": stream})
                assert answer.status_code == 200 and end in answer.text and "error" not in answer.text
        worker.engine = engine


def test_an_engine_that_fails_again_and_again_ends_the_server() -> None:
    with serving(FakeEngine) as served, served.http() as client:
        for _ in range(3):
            served.wait_until(lambda: served.server.host.state == "ready")
            client.post("/v1/completions", json={"prompt": "please crash"})
        assert served.wait_until(lambda: served.server.problem is not None)
        assert "3 times in a row" in str(served.server.problem)


@pytest.mark.parametrize("failing", [1, 2])
def test_an_engine_that_cannot_be_started_again_at_once_is_tried_until_losses_and_failures_are_three(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quengine.serve.processes.server_thread.RESTART_SECONDS", 0.01)
    attempts: list[int] = []

    def make_engine() -> FakeEngine:
        attempts.append(len(attempts))
        if 1 <= attempts[-1] <= failing:
            raise RuntimeError("the device is still gone")
        return FakeEngine()

    with serving(make_engine) as served, served.http() as client:
        client.post("/v1/completions", json={"prompt": "please crash"})
        if failing == 1:
            assert served.wait_until(lambda: client.get("/health").status_code == 200)
            assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
        else:
            assert served.wait_until(lambda: served.server.problem is not None)
            assert "still gone" in str(served.server.problem)
    assert len(attempts) == 3


def raw_connection(served: Served, receive_buffer: int | None = None) -> socket.socket:
    host, _, port = served.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(120)
    connection.connect((host, int(port)))
    return connection


def raw_completion(prompt: str, max_tokens: int, **more: object) -> bytes:
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, **more}
    return raw_bytes(httpx.Request("POST", "http://localhost/v1/completions", json=body))


def raw_bytes(request: httpx.Request) -> bytes:
    path = request.url.raw_path
    headers = b"".join(b"%b: %b\r\n" % pair for pair in request.headers.raw)
    close = b"" if b"connection" in dict(request.headers.raw) else b"Connection: close\r\n"
    return b"POST %b HTTP/1.1\r\n" % path + headers + close + b"\r\n" + request.content


STREAMED = (
    ("/v1/completions", {"prompt": "hi", "max_tokens": 40}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 9, "n": 3, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 9, "logprobs": 2, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 9}),
    ("/completion", {"prompt": "hi", "n_predict": 9, "n_probs": 1, "return_tokens": True}),
    ("/api/generate", {"prompt": "hi", "raw": True, "options": {"num_predict": 9, "seed": 5}}),
)
_VARIES = re.compile(
    rb'("(?:id|item_id|created|created_at|completed_at|id_slot|\w+_(?:ms|s|second|duration))":)("[^"]*"|[\d.]+)'
)


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=str)
def test_what_is_written_directly_has_the_same_bytes(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    def answer(version: bytes) -> bytes:
        with raw_connection(served) as connection:
            sent = json.dumps({"stream": True, "seed": 5, **body}).encode()
            head = b"POST %b HTTP/%b\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % (path.encode(), version, len(sent)) + sent)
            received = b""
            while part := connection.recv(1 << 16):
                received += part
        head_of_answer, _, rest = received.partition(b"\r\n\r\n")
        assert b" 200 " in head_of_answer
        assert (b"chunked" in head_of_answer.lower()) == (version == b"1.1")
        return _VARIES.sub(rb"\1X", unchunked(rest) if version == b"1.1" else rest)

    engine = served.server.worker.engine
    assert engine is not None
    monkeypatch.setattr(engine, "step", engine.step)
    one_by_one(engine, served.server)
    written = count_writes(monkeypatch)
    direct = answer(b"1.1")
    assert len(written) > 2
    assert answer(b"1.0") == direct and len(written) > 4
    written.clear()
    monkeypatch.setattr(Connection, "writable", False)
    assert answer(b"1.1") == direct and not written


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The parts that are written directly from now on."""
    written: list[bytes] = []
    write_part = Connection.write_part

    def counting(connection: Connection, part: bytes) -> None:
        written.append(part)
        write_part(connection, part)

    monkeypatch.setattr(Connection, "write_part", counting)
    return written


def unchunked(body: bytes) -> bytes:
    """The body of an answer in chunks, whole to its end."""
    joined = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        joined, end, body = joined + body[:count], body[count : count + 2], body[count + 2 :]
        assert end == b"\r\n"
        if not count:
            assert not body
            return joined


def test_an_answer_that_cannot_be_written_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    write_part = Connection.write_part

    def failing(connection: Connection, part: bytes) -> None:
        if (b"x-broken", b"1") in connection.scope["headers"]:
            raise ValueError("no form for this")
        write_part(connection, part)

    monkeypatch.setattr(Connection, "write_part", failing)
    with serving(lambda: FakeEngine(step_s=0.004)) as served, served.http() as http:
        body = {"prompt": "hi", "seed": 1, "max_tokens": 30, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as whole:
            lines = whole.iter_lines()
            next(lines)
            with raw_connection(served) as broken:
                sent = json.dumps(body).encode()
                broken.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Broken: 1\r\nContent-Length: %d\r\n\r\n"
                    % len(sent)
                    + sent
                )
                answer = b""
                while part := broken.recv(1 << 16):
                    answer += part
            assert not answer.endswith(b"0\r\n\r\n")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert served.wait_until(lambda: idle(served))


STREAMED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 800}], "max_tokens": 4},
    "/v1/completions": {"prompt": "x" * 800, "max_tokens": 4},
    "/completion": {"prompt": "x" * 800, "n_predict": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "x" * 800}], "max_tokens": 4},
    "/v1/responses": {"input": "x" * 800, "max_output_tokens": 4},
}
_DRAWN = re.compile(
    rb'"(id|[a-z_]*_id|created(_at)?|completed_at|id_slot|[a-z_]+_(ms|second))":("[^"]*"|[0-9.e+-]+)'
)


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_that_waits_long_for_its_first_token_begins_with_comments(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = STREAMED[path] | {"seed": 3, "stream": True}
    goes_on = threading.Event()
    goes_on.set()
    monkeypatch.setattr(server_handle, "joined", list)  # a busy machine has none of the chunks joined either
    with (
        serving(lambda: held(FakeEngine(step_s=0.01, chunk=200), goes_on)) as served,
        served.http() as client,
    ):

        def late(path: str, body: dict[str, object]) -> bytes:
            """A stream whose first token comes behind two comments."""
            goes_on.clear()
            received = b""
            with client.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                for part in answer.iter_bytes():
                    received += part
                    if received.count(b":\n\n") >= 2:
                        goes_on.set()
            return received

        plain = client.post(path, json=body).content
        monkeypatch.setattr(streaming, "COMMENT_SECONDS", 0.04)
        rest = late(path, body).lstrip(b":\n")
        assert _DRAWN.sub(b"", rest) == _DRAWN.sub(b"", plain)
        failing = late("/completion", STREAMED["/completion"] | body | {"prompt": "x" * 800 + FAILING_PROMPT})
        *_, last = failing.decode().removesuffix("\n\n").split("\n\n")
        assert "not finite" in json.loads(last.removeprefix("data: "))["error"]["message"]
        goes_on.clear()
        with client.stream("POST", path, json=body) as leaving:
            assert next(leaving.iter_bytes()).startswith(b":\n\n")
        goes_on.set()
        assert served.wait_until(lambda: idle(served))
        lines = client.post("/api/generate", json={"prompt": "x" * 800, "options": {"num_predict": 2}}).text
        assert all(json.loads(line) for line in lines.splitlines())
