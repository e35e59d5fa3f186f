"""Batches of more inputs than the queue has room for: they wait in their request, and hold up nobody else's."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from quengine.serve.settings import Limits
from tests.engine.serve.fake_engine import FIRST_BYTE, FakeEngine, expected_embedding
from tests.engine.serve.serving import serving
from tests.engine.serve.test_streams import raw_connection

MANY = 1000
TEXTS = [f"text {number}" for number in range(MANY)]
SMALL = Limits(queue=2)


def quick_engine() -> FakeEngine:
    return FakeEngine(capacity=4, step_s=0)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(quick_engine, limits=SMALL) as served, served.http() as made:
        yield made


def post(client: httpx.Client, path: str, **body: object) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text[:300]
    return answer.json()


def vector(text: str) -> list[float]:
    return list(expected_embedding([FIRST_BYTE + byte for byte in text.encode()], "mean"))


def test_a_thousand_texts_are_embedded_in_order(client: httpx.Client) -> None:
    expected = [pytest.approx(vector(text)) for text in TEXTS]
    openais = post(client, "/v1/embeddings", input=TEXTS)
    assert [entry["embedding"] for entry in openais["data"]] == expected
    assert openais["usage"]["prompt_tokens"] == sum(map(len, TEXTS))
    natives = post(client, "/embeddings", input=TEXTS)
    assert [entry["embedding"] for entry in natives] == [[each] for each in expected]
    ollamas = post(client, "/api/embed", model="fake", input=TEXTS)
    assert ollamas["embeddings"] == expected and ollamas["prompt_eval_count"] == sum(map(len, TEXTS))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_a_thousand_documents_are_ranked(client: httpx.Client, path: str) -> None:
    results = post(client, path, query=TEXTS[7], documents=TEXTS)["results"]
    assert sorted(entry["index"] for entry in results) == list(range(MANY))
    assert results[0]["relevance_score"] == pytest.approx(1.0)


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_hundreds_of_prompts_are_completed(client: httpx.Client, path: str) -> None:
    prompts = TEXTS[:200]
    alone = post(client, path, prompt=prompts[150], max_tokens=2, seed=1)
    answers = post(client, path, prompt=prompts, max_tokens=2, seed=1)
    texts = (
        [entry["text"] for entry in answers["choices"]] if path[1] == "v" else [e["content"] for e in answers]
    )
    one = alone["choices"][0]["text"] if path[1] == "v" else alone["content"]
    assert len(texts) == 200 and texts[150] == one


def test_hundreds_of_prompts_are_streamed(client: httpx.Client) -> None:
    body = {"prompt": TEXTS[:200], "max_tokens": 2, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    ended = [c["index"] for line in lines for c in json.loads(line)["choices"] if c["finish_reason"]]
    assert sorted(ended) == list(range(200))


def test_more_inputs_than_the_limit_are_a_400() -> None:
    with serving(limits=Limits(inputs=3)) as served, served.http() as client:
        for path, body in (
            ("/v1/embeddings", {"input": TEXTS[:4]}),
            ("/v1/completions", {"prompt": TEXTS[:4]}),
            ("/rerank", {"query": "a", "documents": TEXTS[:3]}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert "4 inputs in one request, this server takes at most 3 (--max-inputs)" in answer.text


def test_a_batch_holds_up_no_other_request() -> None:
    engine = FakeEngine(capacity=2, step_s=0.05)
    with (
        serving(lambda: engine, limits=SMALL) as served,
        served.http() as client,
        ThreadPoolExecutor() as threads,
    ):
        worker = served.server.worker
        batch = threads.submit(post, client, "/v1/embeddings", input=TEXTS)
        assert served.wait_until(lambda: worker.running == 2)
        with served.http() as other:
            for _ in range(5):
                post(other, "/v1/completions", prompt="a", max_tokens=1)
        assert not batch.done()
        engine._step_s = 0.0
        assert len(batch.result()["data"]) == MANY


def test_a_batch_whose_client_leaves_is_cancelled() -> None:
    added = 0

    class Counting(FakeEngine):
        def add(self, request: Any) -> None:
            nonlocal added
            added += 1
            super().add(request)

    with serving(lambda: Counting(capacity=2, step_s=0.05), limits=SMALL) as served:
        worker = served.server.worker
        body = json.dumps({"input": TEXTS}).encode()
        head = (
            f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        with raw_connection(served) as leaving:
            leaving.sendall(head + body)
            assert served.wait_until(lambda: worker.running == 2)
        assert served.wait_until(lambda: worker.idle)
        assert 0 < added < MANY
        with served.http() as client:
            post(client, "/v1/embeddings", input="a")
