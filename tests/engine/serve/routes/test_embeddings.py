"""Vectors of texts in OpenAI's and llama-server's forms: what may be given, and the values that come back."""

import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quengine.serve.routes import vectors as embeddings
from tests.engine.serve.fake_engine import EMBEDDING, FIRST_BYTE, FakeModel, expected_embedding
from tests.engine.serve.serving import serving

IDS = [FIRST_BYTE + byte for byte in b"abc"]
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as served, served.http() as made:
        yield made


def post(client: httpx.Client, path: str, **body: object) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "given",
    ["abc", IDS, [IDS[0], "bc"], {"prompt_string": "abc"}, {"content": PARTS}, [IDS], [{"content": PARTS}]],
)
def test_a_text_may_be_given_as_ids_parts_or_a_mix(client: httpx.Client, given: object) -> None:
    expected = list(expected_embedding(IDS, "mean"))
    (entry,) = post(client, "/v1/embeddings", input=given)["data"]
    assert entry["embedding"] == pytest.approx(expected)
    for path, key in (("/embeddings", "input"), ("/embedding", "content")):
        (entry,) = post(client, path, **{key: given})
        assert entry["embedding"] == [pytest.approx(expected)] and entry["index"] == 0


def test_several_texts_of_different_forms(client: httpx.Client) -> None:
    answer = post(client, "/v1/embeddings", input=["abc", IDS, {"prompt_string": "abc"}])
    first, *others = [entry["embedding"] for entry in answer["data"]]
    assert others == [first, first] and answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


def test_dimensions_are_the_first_values_of_unit_length(client: httpx.Client) -> None:
    whole = post(client, "/v1/embeddings", input="abc")["data"][0]["embedding"]
    short = post(client, "/v1/embeddings", input="abc", dimensions=3)["data"][0]["embedding"]
    length = math.hypot(*whole[:3])
    assert short == pytest.approx([value / length for value in whole[:3]])
    packed = post(client, "/v1/embeddings", input="abc", dimensions=3, encoding_format="base64")
    assert struct.unpack("<3f", base64.b64decode(packed["data"][0]["embedding"])) == pytest.approx(short)
    assert post(client, "/v1/embeddings", input="abc", dimensions=EMBEDDING)["data"][0]["embedding"] == whole
    for wrong in (0, -1, EMBEDDING + 1, 2**40, 1.5, "3"):
        answer = client.post("/v1/embeddings", json={"input": "abc", "dimensions": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "dimensions", wrong


def test_without_pooling_each_token_has_a_row(client: httpx.Client) -> None:
    (entry,) = post(client, "/embeddings", input="abc", pooling="none")
    assert entry["embedding"] == [[float(token + each) for each in range(EMBEDDING)] for token in IDS]
    answer = client.post("/v1/embeddings", json={"input": "abc", "pooling": "none"})
    assert answer.status_code == 400 and "POST /embeddings" in answer.json()["error"]["message"]


def test_rows_without_pooling_have_a_limit(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 5 * EMBEDDING)
    assert len(post(client, "/embeddings", input="abcde", pooling="none")[0]["embedding"]) == 5
    answer = client.post("/embeddings", json={"input": ["abc", "def"], "pooling": "none"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "over_limit"


def test_the_servers_pooling_may_be_none() -> None:
    with serving(settings={"pooling": "none"}) as served, served.http() as client:
        assert len(post(client, "/embeddings", input="abc")[0]["embedding"]) == 3
        assert client.post("/v1/embeddings", json={"input": "abc"}).status_code == 400
        assert client.post("/v1/embeddings", json={"input": "abc", "pooling": "last"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": None},
        {"input": "a", "content": "a"},
        {"input": []},
        {"content": {"content": "abc"}},
        {"input": "a", "embd_normalize": -1},
        {"input": "a", "dimensions": 3},
        {"input": "a", "encoding_format": "base64"},
    ],
)
def test_what_the_native_form_does_not_have_is_a_400(client: httpx.Client, body: dict[str, object]) -> None:
    assert client.post("/embeddings", json=body).status_code == 400


def test_without_a_pooling_it_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a text, though not ids, ends with the token that its file asks for."""
    monkeypatch.setattr(FakeModel, "pooling", "last")
    monkeypatch.setattr(FakeModel, "end_of_text", 7)
    with serving() as served, served.http() as client:
        for given, ids in (
            ("abc", [*IDS, 7]),
            ([*IDS, "c"], [*IDS, IDS[2], 7]),
            (IDS, IDS),
            ([*IDS, 7], [*IDS, 7]),
        ):
            (entry,) = post(client, "/v1/embeddings", input=given)["data"]
            assert entry["embedding"] == pytest.approx(list(expected_embedding(ids, "last"))), given
        (entry,) = post(client, "/embeddings", input=IDS, pooling="mean")
        assert entry["embedding"] == [pytest.approx(list(expected_embedding(IDS, "mean")))]
        monkeypatch.setattr(FakeModel, "pooling", "rank")
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400 and "made for 'rank'" in answer.json()["error"]["message"]
