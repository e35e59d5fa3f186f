"""Documents ranked by the cosine of embeddings, in both forms, and an answer that says how."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.serve.fake_engine import FIRST_BYTE, expected_embedding
from tests.engine.serve.serving import serving

DOCUMENTS = ["a machine", "machine learning is", "Paris", "learning"]
QUERY = "machine learning is"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as served, served.http() as made:
        yield made


def vector(text: str) -> tuple[float, ...]:
    return expected_embedding([FIRST_BYTE + byte for byte in text.encode()], "mean")


def cosines() -> list[float]:
    return [sum(a * b for a, b in zip(vector(QUERY), vector(text), strict=True)) for text in DOCUMENTS]


def post(client: httpx.Client, path: str, **body: object) -> Any:
    answer = client.post(path, json={"query": QUERY, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rerank-method"] == "embedding-cosine"
    return answer.json()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/reranking", "/v1/reranking"])
def test_documents_are_scored_by_cosine_best_first(client: httpx.Client, path: str) -> None:
    answer = post(client, path, documents=DOCUMENTS)
    assert answer["method"] == "embedding-cosine" and answer["object"] == "list"
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert [scores[index] for index in range(4)] == pytest.approx(cosines())
    assert answer["results"][0] == {"index": 1, "relevance_score": pytest.approx(1.0)}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    count = len(QUERY) * len(DOCUMENTS) + sum(map(len, DOCUMENTS))  # of pairs, as llama-server counts
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_the_second_version_is_coheres(client: httpx.Client) -> None:
    body = {
        "documents": [{"text": DOCUMENTS[0], "id": 7}, *DOCUMENTS[1:]],
        "top_n": 2,
        "max_tokens_per_doc": None,
    }
    answer = post(client, "/v2/rerank", **body, model="rerank-v3.5", return_documents=True)
    assert answer["id"] and answer["meta"]["api_version"] == {"version": "2"}
    assert answer["results"][0]["index"] == 1 and len(answer["results"]) == 2
    plain = post(client, "/rerank", documents=DOCUMENTS)
    assert post(client, "/rerank", documents=[{"text": each} for each in DOCUMENTS]) == plain


def test_texts_are_answered_in_the_other_form(client: httpx.Client) -> None:
    answer = post(client, "/rerank", texts=DOCUMENTS, return_text=True)
    assert answer[0] == {"index": 1, "score": pytest.approx(1.0), "text": DOCUMENTS[1]}
    assert len(answer) == 4 and "text" not in post(client, "/rerank", texts=DOCUMENTS)[0]


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (2, 2), (4, 4), (99, 4), (2**40, 4), (None, 4)])
def test_top_n_is_how_many(client: httpx.Client, top_n: int | None, count: int) -> None:
    answer = post(client, "/rerank", documents=DOCUMENTS, top_n=top_n, return_documents=True)
    assert len(answer["results"]) == count
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[1]}
    assert len(post(client, "/rerank", texts=DOCUMENTS, top_n=top_n)) == count


@pytest.mark.parametrize(
    "body",
    [
        {"documents": []},
        {"documents": None},
        {"documents": 123},
        {"documents": [1, 2]},
        {"documents": [{"text": ""}]},
        {"documents": [{"title": "a"}]},
        {"documents": ["a", ""]},
        {"documents": ["a"], "texts": ["a"]},
        {"documents": ["a"], "top_n": 0},
        {"documents": ["a"], "query": ""},
        {"documents": ["a"], "query": None},
        {"documents": ["a" * 5000]},
        {"documents": ["a"] * 5000},
    ],
)
def test_what_cannot_be_ranked_is_a_400(client: httpx.Client, body: dict[str, object]) -> None:
    assert client.post("/rerank", json={"query": "a", **body}).status_code == 400
