"""Long prompts: refused by their bytes, tokenized beside the server, bounded in time and memory; on every route."""

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from quengine.models.hub.hub import resolve_model
from quengine.serve.processes.server_text import LONG_BYTES, SHORT_BYTES, _TextProcess
from quengine.serve.processes.shared_model import ServedModel, TextSide
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.test_streams import raw_bytes, raw_connection
from tests.llama_cpp_vocab import LlamaCppVocab

CONTEXT = 16384
MEGABYTES = 4_000_000
CHAT = "/v1/chat/completions"


class RealText(FakeEngine):
    """The fake engine with the vocabulary and the chat template of SmolLM2."""

    def __init__(self, ctx_size: int = CONTEXT) -> None:
        super().__init__(ctx_size, chunk=ctx_size)
        text = TextSide.of_file(resolve_model("smollm2-135m"))
        self.model: Any = ServedModel(text, ctx_size, (), "cpu", "f16")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(RealText) as running:
        yield running


@pytest.fixture(scope="module")
def peer() -> Iterator[LlamaCppVocab]:
    with LlamaCppVocab(resolve_model("smollm2-135m")) as vocab:
        yield vocab


def process_of(served: Served, very_long: bool) -> _TextProcess:
    pool = served.server.host.text_pool
    process = (pool._very_long if very_long else pool._long)._process
    assert process is not None
    return process


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    known = ["the", "Müller", "1234", "日本", "   ", "\n\n", "don't", "<|im_start|>", "🙂", "x" * 30]
    return " ".join(rng.choice(known) for _ in range(count))


def body_of(path: str, text: str) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    key = {"/v1/responses": "input", "/v1/embeddings": "input", CHAT: "messages"}.get(path, "prompt")
    return {key: messages if path == CHAT else text}


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/v1/embeddings", "/v1/responses", CHAT])
def test_a_prompt_of_megabytes_is_refused_by_its_bytes(served: Served, path: str) -> None:
    with served.http() as client:
        answer = client.post(path, json=body_of(path, "1" * MEGABYTES))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert (
        f"the prompt has {MEGABYTES // 1_000_000}0" in error["message"]
        and "81 or fewer a token" in error["message"]
    )
    assert error["n_ctx"] == CONTEXT and CONTEXT <= error["n_prompt_tokens"] <= MEGABYTES // 80 + 10


def test_openais_client_reads_that_as_the_context_that_is_full(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="4000001 bytes") as refused:
        served.openai().completions.create(model="fake", prompt=["1", 1, "1" * MEGABYTES])  # type: ignore[list-item]
    assert refused.value.code == "context_length_exceeded"


def test_a_million_prompts_are_refused_before_any_is_tokenized(served: Served) -> None:
    with served.http() as client:
        answer = client.post("/v1/completions", json={"prompt": ["1"] * 500_000})
    assert answer.status_code == 400 and "500000 inputs in one request" in answer.text


@pytest.mark.parametrize("count", [10, 4000, 80_000], ids=["short", "long", "very long"])
def test_ids_are_llama_cpps_however_long_the_text(served: Served, peer: LlamaCppVocab, count: int) -> None:
    text = words(count, count)
    assert (count > 10) == (len(text) > SHORT_BYTES) and (count > 10_000) == (len(text) > LONG_BYTES)
    with served.http() as client:
        answer = client.post("/tokenize", json={"content": text, "parse_special": False})
        assert answer.json()["tokens"] == peer.encode(text, special=False)
        pieces = client.post("/tokenize", json={"content": text[:20_000], "with_pieces": True}).json()[
            "tokens"
        ]
        back = b"".join(
            bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces
        )
        assert back == text[:20_000].encode()


def test_a_long_chat_is_the_prompt_that_a_short_one_is(served: Served, peer: LlamaCppVocab) -> None:
    messages = [{"role": "user", "content": words(4000, 1)}]
    with served.http() as client:
        rendered = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
        usage = client.post(CHAT, json={"messages": messages, "max_tokens": 1}).json()["usage"]
    before, content, after = rendered.partition(messages[0]["content"])
    expected = peer.encode(before, special=True) + peer.encode(content) + peer.encode(after, special=True)
    assert usage["prompt_tokens"] == len(expected)


def test_surrogates_in_a_long_text_do_no_harm(served: Served) -> None:
    text = "\ud800" + "a " * SHORT_BYTES
    with served.http() as client:
        for path in ("/v1/completions", CHAT):
            answer = client.post(path, content=json.dumps(body_of(path, text) | {"max_tokens": 1}))
            assert answer.status_code in (200, 400), answer.text


def test_while_a_long_prompt_is_tokenized_everything_else_goes_on(served: Served) -> None:
    """The process is stopped, so that its prompt takes as long as it likes."""
    with served.http() as client:
        big = {"content": "word " * LONG_BYTES}
        expected = client.post("/tokenize", json=big).json()
        process = process_of(served, very_long=True)
        answers: list[httpx.Response] = []
        os.kill(process.pid, signal.SIGSTOP)
        try:
            asking = threading.Thread(
                target=lambda: answers.append(httpx.post(f"{served.url}/tokenize", json=big, timeout=120))
            )
            asking.start()
            lane = served.server.host.text_pool._very_long
            assert served.wait_until(lane._turn.locked)
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "short"}).status_code == 200
            assert client.post(CHAT, json=body_of(CHAT, "short")).status_code == 200
            long = client.post("/v1/completions", json={"prompt": "word " * 4000, "max_tokens": 1})
            assert long.json()["usage"]["prompt_tokens"] > 4000 - 2
            assert not answers
        finally:
            os.kill(process.pid, signal.SIGCONT)
        asking.join(120)
        assert answers[0].json() == expected


def test_a_process_that_is_late_or_ends_fails_its_own_request_and_the_next_is_served() -> None:
    body = {"content": "word " * 4000}
    with serving(RealText) as served, served.http() as client:
        pool = served.server.host.text_pool

        def stopped() -> _TextProcess:
            assert client.post("/tokenize", json=body).status_code == 200
            process = process_of(served, very_long=False)
            os.kill(process.pid, signal.SIGSTOP)
            return process

        stopped()
        pool._seconds = 0.3
        late = client.post("/tokenize", json=body)
        assert late.status_code == 400 and "takes more than 0.3 s to tokenize" in late.text

        pool._seconds = 60
        process = stopped()

        def asked_for() -> bool:
            """The loop that answers the second has given the first to the process."""
            return pool._long._turn.locked() and client.get("/health").status_code == 200

        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(client.post, "/tokenize", json=body)
            assert served.wait_until(asked_for)
            for number in (signal.SIGABRT, signal.SIGCONT):  # as a library that is refused memory ends it
                os.kill(process.pid, number)
            failed = asked.result()
        assert failed.status_code == 400 and "MiB of memory to tokenize" in failed.text

        process = stopped()
        with raw_connection(served) as leaving:
            leaving.sendall(raw_bytes(httpx.Request("POST", "http://localhost/tokenize", json=body)))
            assert served.wait_until(asked_for)
        assert served.wait_until(lambda: process.code is not None), "its client has left"
        assert client.post("/tokenize", json=body).status_code == 200


def test_the_processes_end_with_the_server() -> None:
    with serving(RealText) as served, served.http() as client:
        assert client.post("/tokenize", json={"content": "word " * 4000}).status_code == 200
        process = process_of(served, very_long=False)
    assert process.code is not None
