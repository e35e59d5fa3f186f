"""The access log, and what the log says of errors, as clients cause them."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quengine.serve.settings import Limits
from tests.engine.serve.fake_engine import FAILING_PROMPT, FakeEngine
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.test_streams import raw_completion, raw_connection


class _FaultyModel(type(FakeEngine().model)):  # type: ignore[misc]
    def render_chat(self, *_: Any) -> str:
        try:
            return {}["secret"]  # type: ignore[no-any-return]
        except KeyError as error:
            raise RuntimeError("the table is gone") from error


class _Faulty(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.model = _FaultyModel(4096)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def lines(caplog: pytest.LogCaptureFixture, served: Served, count: int) -> list[str]:
    """Lines of requests, once so many are there: they are written after the answer."""

    def found() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "quengine.serve.access"]

    assert served.wait_until(lambda: len(found()) >= count), found()
    return found()


def test_each_request_is_a_line_with_the_tokens_that_its_usage_says(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    client = served.openai()
    usage = client.completions.create(model="fake", prompt="four", max_tokens=7, n=2).usage
    assert usage is not None
    chunks = list(client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=5,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    streamed = chunks[-1].usage
    assert streamed is not None
    whole, stream = lines(caplog, served, 2)
    form = (
        r'[0-9-]+ [0-9:]+ 127\.0\.0\.1:\d+ "POST (\S+)" (\d+) \d+\.\d+ s, '
        r"prompt (\d+) tokens \(0 cached\), completion (\d+) tokens"
    )
    assert re.fullmatch(form, whole) and re.fullmatch(form, stream), (whole, stream)
    assert re.fullmatch(form, whole).groups() == (  # type: ignore[union-attr]
        "/v1/completions", "200", str(usage.prompt_tokens), str(usage.completion_tokens),
    )  # fmt: skip
    assert re.fullmatch(form, stream).groups()[1:] == (  # type: ignore[union-attr]
        "200", str(streamed.prompt_tokens), str(streamed.completion_tokens),
    )  # fmt: skip


def test_what_went_wrong_is_in_the_line(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.http() as client:
        client.post("/v1/completions", json={"prompt": "a", "tfs_z": 0.5})
        client.get("/%1b[31mred%0aGET /fake")
    wrong, strange = lines(caplog, served, 2)
    assert '"POST /v1/completions" 400 ' in wrong and "error: tfs_z is not supported" in wrong
    assert '"GET /%1b[31mred%0aGET%20/fake" 404 ' in strange
    assert strange.isprintable()


def test_a_client_that_leaves_is_a_line_too(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with raw_connection(served) as leaving:
        leaving.sendall(raw_completion("abc", 4000))
        leaving.recv(1000)
    (line,) = lines(caplog, served, 1)
    assert " 499 " in line and "prompt 3 tokens" in line and "the client has gone" in line


def test_paths_that_machines_poll_are_logged_with_v_only(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with served.http() as client:
        client.get("/health")
        client.get("/metrics")
        client.get("/props")
    (line,) = lines(caplog, served, 1)
    assert '"GET /props" 200' in line


def test_the_access_log_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    with serving(settings={"access_log": False}) as served, served.http() as client:
        assert client.get("/props").status_code == 200
        assert client.post("/tokenize", json={}).status_code == 400
    assert not [r for r in caplog.records if r.name == "quengine.serve.access"]


def test_a_fault_of_ours_has_its_cause_in_the_log_and_not_in_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(_Faulty) as served, served.http() as client:
        body = {"messages": [{"role": "user", "content": "a"}]}
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error: RuntimeError"
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.exc_info is not None and isinstance(record.exc_info[1], RuntimeError)
    assert isinstance(record.exc_info[1].__cause__, KeyError)


def test_a_request_that_fails_is_a_line_of_its_own(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.http() as client:
        answer = client.post("/v1/completions", json={"prompt": FAILING_PROMPT})
    assert answer.status_code == 500
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "logits are not finite" in record.getMessage()
    (line,) = lines(caplog, served, 1)
    assert " 500 " in line and "logits are not finite" in line


def test_a_slow_body_does_not_hide_its_request(caplog: pytest.LogCaptureFixture) -> None:
    with serving(limits=Limits(read_s=0.2)) as served, raw_connection(served) as slow:
        slow.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            + json.dumps("").encode()
        )
        assert b" 408 " in slow.recv(1000)
        (line,) = lines(caplog, served, 1)
    assert " 408 " in line and "--read-timeout" in line
