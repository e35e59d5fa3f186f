"""Limits, bodies, states, draining, and the routes that describe the server."""

import asyncio
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from quengine.errors import EngineError
from quengine.serve.server import bind
from quengine.serve.settings import Limits
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import held, serving
from tests.engine.serve.test_streams import raw_completion, raw_connection


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_limits_are_400_and_name_both_numbers_and_the_flag() -> None:
    limits = Limits(prompt=10, n=2, stops=1, biases=1)
    with serving(limits=limits) as served, served.http() as client:
        for body, flag in (
            ({"prompt": "x" * 11}, "11 tokens.*at most 10.*--max-prompt-tokens"),
            ({"prompt": "x", "n": 3}, "3 given.*at most 2.*--max-n"),
            ({"prompt": "x", "stop": ["a", "b"]}, "2 given.*at most 1.*--max-stops"),
            ({"prompt": "x", "logit_bias": {"1": 1, "2": 1}}, "2 given.*at most 1.*--max-logit-bias"),
        ):
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 400
            assert re.search(flag, error(answer)[1])


def test_a_body_over_the_limit_is_a_413_declared_or_not() -> None:
    with serving(limits=Limits(body=1000)) as served, served.http() as client:
        assert client.post("/tokenize", json={"content": "x" * 1001}).status_code == 413
        parts = (b"x" * 100 for _ in range(20))
        assert client.post("/tokenize", content=parts).status_code == 413
        closed = {"headers": {"Connection": "close"}}  # with 8 MB on their way
        assert client.post("/tokenize", content=b"x" * (8 << 20), **closed).status_code == 413
        assert client.post("/tokenize", json={"content": "x" * 900}).status_code == 200


def test_a_body_that_does_not_arrive_is_a_408() -> None:
    with serving(limits=Limits(read_s=0.2)) as served, raw_connection(served) as slow:
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in slow.recv(1000)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b'"x"',
        b"\xff\xfe",
        b'{"content": NaN}',
        b"[" * 100_000,
        b'{"content": 1}',
        b'{"content": "a", "x": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda raw: str(raw[:20]),
)
def test_a_body_that_is_no_request_is_a_400(raw: bytes) -> None:
    with serving() as served, served.http() as client:
        assert client.post("/tokenize", content=raw).status_code == 400


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    def slow_engine() -> FakeEngine:
        return FakeEngine(capacity=1, step_s=0.01)

    with serving(slow_engine, limits=Limits(queue=1)) as served, served.http() as client:
        worker = served.server.worker
        with raw_connection(served) as first, raw_connection(served) as second:
            first.sendall(raw_completion("a", 4000))
            assert served.wait_until(lambda: worker.running == 1)
            second.sendall(raw_completion("b", 4000))
            assert served.wait_until(lambda: worker.waiting == 1)
            answer = client.post("/v1/completions", json={"prompt": "c"})
            assert error(answer) == (429, "the queue is full: 1 wait, at most 1 may (--max-queue)")
            assert int(answer.headers["retry-after"]) >= 1
            assert client.post("/v1/completions", json={"prompt": "c", "n": 3}).status_code == 429
        assert served.wait_until(lambda: worker.idle)


def test_while_the_model_is_loaded_requests_are_a_503() -> None:
    loaded = threading.Event()

    def make_engine() -> FakeEngine:
        loaded.wait(240)
        return FakeEngine()

    with serving(make_engine, ready=False) as served, served.http() as client:
        for answer in (client.get("/health"), client.post("/v1/completions", json={"prompt": "a"})):
            assert error(answer) == (503, "the model is being loaded")
            assert answer.headers["retry-after"]
        loaded.set()
        assert served.wait_until(lambda: client.get("/health").status_code == 200)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error() -> None:
    def make_engine() -> FakeEngine:
        raise EngineError("no such model")

    with serving(make_engine, ready=False) as served:
        assert served.wait_until(lambda: served.server.should_exit)
        assert str(served.server.problem) == "no such model"


def test_draining_refuses_what_is_new_finishes_what_runs_and_then_stops() -> None:
    refused = threading.Event()
    with serving(lambda: held(FakeEngine(), refused)) as served, served.http() as client:
        with raw_connection(served) as running:
            running.sendall(raw_completion("a", 100))
            assert served.wait_until(lambda: served.server.worker.running == 1)
            served.server.drain()
            assert error(client.get("/health")) == (503, "the server is shutting down")
            assert client.post("/v1/completions", json={"prompt": "b"}).status_code == 503
            refused.set()
            received = b"".join(iter(lambda: running.recv(65536), b""))
        assert len(re.findall(rb"w\d+ ", received)) == 100 and b"[DONE]" in received
        assert served.wait_until(lambda: served.server.should_exit)


def test_a_request_whose_prompt_is_still_read_when_the_server_ends_is_answered() -> None:
    with serving() as served, served.http() as client, ThreadPoolExecutor(1) as asking:
        texts, read = served.server.host.text_pool, threading.Event()
        perform = texts.perform

        async def slow(*given: Any) -> Any:
            while not read.is_set():
                await asyncio.sleep(0.002)
            return await perform(*given)

        texts.perform = slow  # type: ignore[method-assign]
        answer = asking.submit(lambda: client.post("/completion", json={"prompt": "hi", "n_predict": 2}))
        assert served.wait_until(lambda: served.server.host.uses == 1)
        served.server.drain()
        with served.http() as other:
            new = other.post("/detokenize", json={"tokens": [1]})
        assert error(new) == (503, "the server is shutting down")
        read.set()
        assert answer.result(60).json()["tokens_predicted"] == 2
        assert served.wait_until(lambda: served.server.should_exit)


@pytest.mark.parametrize("closed", [False, True])
def test_a_request_whose_prompt_is_still_read_when_the_engine_has_ended_is_a_503(closed: bool) -> None:
    """`closed`: what reads prompts has ended too."""
    with serving() as served, served.http() as client, ThreadPoolExecutor(1) as asking:
        host, begun, read = served.server.host, threading.Event(), threading.Event()
        perform = host.text_pool.perform

        async def slow(*given: Any) -> Any:
            read_first = None if closed else await perform(*given)
            begun.set()
            while not read.is_set():
                await asyncio.sleep(0.002)
            return read_first or await perform(*given)

        host.text_pool.perform = slow  # type: ignore[method-assign]
        answer = asking.submit(lambda: client.post("/completion", json={"prompt": "hi", "n_predict": 2}))
        assert served.wait_until(begun.is_set)
        served.server.models.stop()
        assert served.wait_until(lambda: host.state == "absent")
        read.set()
        status, message = error(answer.result(60))
        assert (status, message) == (
            503,
            "the engine has stopped" if closed else "the server is shutting down",
        )


def test_a_drain_that_takes_too_long_ends_requests_with_an_error() -> None:
    limits = Limits(drain_s=0.2)
    with serving(lambda: FakeEngine(step_s=0.01), limits=limits) as served, raw_connection(served) as running:
        running.sendall(raw_completion("a", 4000))
        assert served.wait_until(lambda: served.server.worker.running == 1)
        served.server.drain()
        received = b"".join(iter(lambda: running.recv(65536), b""))
        assert b'{"error":{"message":"the server is shutting down"' in received


def test_native_completion_speaks_llama_servers_names() -> None:
    with serving() as served, served.http() as client:
        body = {"prompt": "abc", "n_predict": 4, "seed": 5, "n_probs": 2, "return_tokens": True}
        answer = client.post("/completion", json=body).json()
        assert answer["stop"] and answer["stop_type"] == "limit" and not answer["truncated"]
        assert (answer["tokens_evaluated"], answer["tokens_predicted"], answer["tokens_cached"]) == (3, 4, 6)
        assert answer["generation_settings"]["seed"] == 5
        assert [p["id"] for p in answer["completion_probabilities"]] == answer["tokens"]
        assert answer["timings"]["predicted_n"] == 4
        with client.stream("POST", "/completion", json=body | {"stream": True}) as stream:
            chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line]
        assert "".join(chunk["content"] for chunk in chunks) == answer["content"]
        assert [chunk["stop"] for chunk in chunks][-2:] == [False, True]
        full = client.post("/completion", json={"prompt": "x" * 4094, "n_predict": -1}).json()
        assert full["truncated"] and full["stop_type"] == "limit"


def test_text_goes_to_tokens_and_back() -> None:
    with serving() as served, served.http() as client:
        ids = client.post("/tokenize", json={"content": "hé"}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": ids}).json() == {"content": "hé"}
        pieces = client.post("/tokenize", json={"content": "hé", "with_pieces": True}).json()["tokens"]
        assert [p["piece"] for p in pieces] == ["h", [0xC3], [0xA9]]
        assert client.post("/detokenize", json={"tokens": [-1]}).status_code == 400
        messages = [{"role": "user", "content": "a\ud800"}]
        answer = client.post("/apply-template", content=json.dumps({"messages": messages}))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content"


def test_the_server_describes_itself() -> None:
    with serving(lambda: FakeEngine(step_s=0.01, capacity=2)) as served, served.http() as client:
        with raw_connection(served) as running:
            running.sendall(raw_completion("abc", 4000))
            assert served.wait_until(lambda: served.server.worker.stats.slots != ())
            slots = client.get("/slots").json()
            assert [slot["is_processing"] for slot in slots] == [True, False]
            assert slots[0]["n_prompt_tokens"] == 3
            assert "quengine_running 1.0" in client.get("/metrics").text
        assert served.wait_until(lambda: served.server.worker.idle)
        metrics = client.get("/metrics").text
        assert 'quengine_texts_total{reason="cancelled"} 1.0' in metrics
        assert 'quengine_http_requests_total{path="/slots",status="200"} 1.0' in metrics
        props = client.get("/props").json()
        assert props["total_slots"] == 2 and props["default_generation_settings"]["n_ctx"] == 4096


def test_unknown_paths_and_methods_have_errors_in_openais_shape() -> None:
    with serving() as served, served.http() as client:
        assert error(client.get("/nothing")) == (404, "there is no GET /nothing here")
        assert error(client.get("/v1/completions")) == (405, "there is no GET /v1/completions here")


def test_the_page_loads_nothing_from_elsewhere() -> None:
    with serving() as served, served.http() as client:
        answer = client.get("/")
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text and "https://" not in answer.text


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            EngineError, match=rf"on 127\.0\.0\.1 port {port}: Address already in use; .*--port"
        ):
            bind("127.0.0.1", port)
