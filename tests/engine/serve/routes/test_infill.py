"""The gap between two texts: /infill and `suffix`, with and without fill-in-the-middle tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from quengine import LLM
from quengine.models.tokenizer import Tokenizer
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve import fake_engine
from tests.engine.serve.fake_engine import FIM
from tests.engine.serve.serving import serving
from tests.gguf_builder import ModelSizes, bpe_vocabulary
from tests.tiny_models import write_tiny

PRE, SUF, MID = (f"w{token} " for token in FIM.values())
BODY = {"input_prefix": "ab", "prompt": "cd", "input_suffix": "ef", "n_predict": 3, "seed": 1}


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with serving() as served, served.http() as made:
        yield made


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_texts_stand_between_the_marks(client: httpx.Client) -> None:
    answer = post(client, "/infill", BODY)
    assert answer["prompt"] == f"{PRE}abcd{SUF}ef{MID}" and answer["tokens_predicted"] == 3
    assert post(client, "/infill", {})["prompt"] == f"{PRE}{SUF}{MID}"
    streamed = client.post("/infill", json=BODY | {"stream": True})
    assert streamed.status_code == 200 and '"stop":true' in streamed.text


def test_other_files_come_first(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    body = BODY | {"input_extra": [{"filename": "a.h", "text": "int a;"}, {"text": "int b;"}]}
    snippet = "\n\n--- snippet ---\n\n"
    end = f"{PRE}abcd{SUF}ef{MID}"
    assert post(client, "/infill", body)["prompt"] == f"{snippet}int a;{snippet}int b;{end}"
    monkeypatch.setattr(fake_engine, "FIM", FIM | {"fim_rep": 4, "fim_sep": 5})
    assert post(client, "/infill", body)["prompt"] == (
        f"w4 myproject\nw5 a.h\nint a;w5 tmp\nint b;w5 filename\n{end}"
    )


@pytest.mark.parametrize("extra", [{}, {"filename": "a"}, {"text": 1}, {"filename": 1, "text": "a"}, "a", 1])
def test_a_file_without_text_is_a_400(client: httpx.Client, extra: object) -> None:
    answer = client.post("/infill", json=BODY | {"input_extra": [extra]})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("input_extra[0]")


def test_what_editors_send_is_taken(client: httpx.Client) -> None:
    """llama.vim's and llama.vscode's requests: one for a completion, one that only computes what surrounds it."""
    body = BODY | {
        "id_slot": 0,
        "stop": [],
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.9,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "input_extra": [],
        "response_fields": ["content", "timings/prompt_n", "tokens_cached", "truncated"],
    }
    answer = post(client, "/infill", body)
    assert answer.keys() == set(body["response_fields"])
    settings = post(client, "/infill", body | {"response_fields": []})["generation_settings"]
    assert settings["samplers"] == body["samplers"]
    assert (settings["n_indent"], settings["t_max_predict_ms"]) == (4, 1000)
    ring = {"n_predict": 0, "samplers": [], "t_max_predict_ms": 1, "response_fields": [""]}
    assert post(client, "/infill", body | ring) == {}


def test_a_suffix_is_what_follows_the_gap(client: httpx.Client) -> None:
    body = {"prompt": "abcd", "suffix": "ef", "max_tokens": 3, "seed": 1}
    assert (
        post(client, "/v1/completions", body)["choices"][0]["text"]
        == post(client, "/infill", BODY)["content"]
    )
    plain = {"prompt": "abcd", "max_tokens": 3, "seed": 1}
    answers = [post(client, "/v1/completions", plain | more)["choices"] for more in ({}, {"suffix": ""})]
    assert answers[0] == answers[1]
    for more in ({"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"echo": True}, {"suffix": 1}):
        assert client.post("/v1/completions", json=body | more).status_code == 400, more


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_suffix_is_the_same(client: httpx.Client, stream: bool) -> None:
    options = {"num_predict": 3, "seed": 1}
    with ollama.Client(str(client.base_url)) as other:
        answer = other.generate("fake", "abcd", "ef", options=options, stream=stream)
        text = "".join(part.response for part in answer) if stream else answer.response
        assert text == post(client, "/infill", BODY)["content"]
        assert "insert" in (other.show("fake").capabilities or ())
        plain = [other.generate("fake", "abcd", suffix, options=options).response for suffix in ("", None)]
        assert plain[0] == plain[1] != text


def test_a_model_without_the_tokens_says_which(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "FIM", {"fim_pre": 1})
    answer = client.post("/infill", json=BODY)
    assert answer.status_code == 501 and answer.json()["error"]["type"] == "not_supported_error"
    assert "no suffix and no middle token" in answer.json()["error"]["message"]
    answer = client.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    with ollama.Client(str(client.base_url)) as other:
        with pytest.raises(ollama.ResponseError, match="fake does not support insert") as caught:
            other.generate("fake", "a", "b")
        assert caught.value.status_code == 400
        assert "insert" not in (other.show("fake").capabilities or ())


def test_the_marks_are_found_by_their_texts_or_by_the_files_ids(tmp_path: Path) -> None:
    words = bpe_vocabulary(
        special=("<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<other>")
    )
    count = len(words["tokenizer.ggml.tokens"])
    sizes = ModelSizes(embedding=64, feed_forward=128, context=64)
    path = write_tiny(tmp_path / "m.gguf", vocabulary=words, sizes=sizes)
    found = Tokenizer.from_gguf(path)
    roles = ("fim_pre", "fim_suf", "fim_mid", "fim_rep")
    assert [found.fim_id(role) for role in roles] == [count - 4, count - 3, count - 2, None]
    named = write_tiny(
        tmp_path / "n.gguf", vocabulary=words | {"tokenizer.ggml.fim_mid_token_id": count - 1}, sizes=sizes
    )
    assert Tokenizer.from_gguf(named).fim_id("fim_mid") == count - 1
    with serving(lambda: LLMEngine(LLM(path, device="cpu"))) as served, served.http() as client:
        answer = post(client, "/infill", BODY | {"input_prefix": "<fim_suffix>", "prompt": ""})
        assert answer["prompt"] == "<fim_prefix><fim_suffix><fim_suffix>ef<fim_middle>"
        assert answer["tokens_evaluated"] > 6  # a text that spells a mark is a text
