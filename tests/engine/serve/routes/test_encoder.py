"""The server in front of an encoder with a trained head: vectors, ranked pairs, and what it does not do."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quengine import LLM
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import serving
from tests.models.architectures.test_bert import write_bert

QUERY, DOCUMENTS = "the cat", ["sat on the mat", "mat", "the the the"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("encoder") / "headed", headed=True)


@pytest.fixture(scope="module")
def client(path: Path) -> Iterator[httpx.Client]:
    def make_engine() -> LLMEngine:
        return LLMEngine(LLM(path, device="cpu", threads=1, parallel=2))

    with serving(make_engine, settings={"model_names": ("bert",)}) as served, served.http() as made:
        yield made


def test_pairs_are_ranked_by_the_trained_head(client: httpx.Client, path: Path) -> None:
    answer = client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rerank-method"] == answer.json()["method"] == "trained-head"
    with LLM(path, device="cpu", threads=1) as llm:
        expected = llm.rank(QUERY, DOCUMENTS)
    results = answer.json()["results"]
    assert {each["index"]: each["relevance_score"] for each in results} == pytest.approx(
        dict(enumerate(expected))
    )
    assert [each["relevance_score"] for each in results] == sorted(expected, reverse=True)


def test_a_pair_beyond_the_context_is_a_400(client: httpx.Client) -> None:
    long = "a " * 40
    answer = client.post("/v1/rerank", json={"query": long, "documents": ["mat", long]})
    assert answer.status_code == 400
    assert "documents[1]: with the query 83 tokens: the context holds 64" in answer.text


def test_texts_have_vectors_where_a_pooling_is_named(client: httpx.Client, path: Path) -> None:
    answer = client.post("/v1/embeddings", json={"input": QUERY, "pooling": "cls"})
    with LLM(path, device="cpu", threads=1) as llm:
        (expected,) = llm.embed(QUERY, "cls")
    assert answer.json()["data"][0]["embedding"] == pytest.approx(expected)
    refused = client.post("/v1/embeddings", json={"input": QUERY})
    assert refused.status_code == 400 and "to score pairs of texts" in refused.text


def test_nothing_is_generated(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": QUERY, "max_tokens": 2})
    assert answer.status_code == 400, answer.text
    assert "a bert model makes embeddings, and generates no text" in answer.text
