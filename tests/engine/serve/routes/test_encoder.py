"""The server in front of encoders, one with a trained head: vectors, ranked pairs, and what it does not do."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from quengine import LLM
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import serving
from tests.models.architectures.test_bert import write_bert
from tests.models.architectures.test_gemma_embedding import write_gemma

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


def test_every_api_cuts_a_projected_vector_to_its_first_dimensions(tmp_path: Path) -> None:
    """As Matryoshka models are made to be cut: the rest is again of unit length."""
    path = write_gemma(tmp_path / "model", dense=True, num_hidden_layers=2)
    with LLM(path, device="cpu", threads=1) as llm:
        (whole,) = llm.embed(QUERY)
    first = np.array(whole[:16]) / np.linalg.norm(whole[:16])

    def make_engine() -> LLMEngine:
        return LLMEngine(LLM(path, device="cpu", threads=1))

    with serving(make_engine, settings={"model_names": ("gemma",)}) as served, served.http() as client:
        openai = client.post("/v1/embeddings", json={"input": QUERY, "dimensions": 16})
        ollama = client.post("/api/embed", json={"model": "gemma", "input": [QUERY], "dimensions": 16})
        refused = client.post("/v1/embeddings", json={"input": QUERY, "dimensions": 65})
    assert openai.json()["data"][0]["embedding"] == pytest.approx(first, abs=1e-6)
    assert ollama.json()["embeddings"][0] == pytest.approx(first, abs=1e-6)
    assert refused.status_code == 400 and "must be at most 64" in refused.text
