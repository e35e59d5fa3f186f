"""Every field of every route with values that fit no wire, no tokenizer and no template: an answer, at once, always."""

import http.client
import itertools
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quengine.serve.processes.server_engine import ProcessEngine
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.hostile_bodies import BODIES, SHARED, Case, case, cases
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.test_openapi import OpenModel
from tests.engine.serve.test_streams import raw_completion, raw_connection
from tests.engine.serve.tool_model import HERMES
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

SECONDS = 120
"""An answer that takes longer does not come."""
ORDINARY = b'{"prompt": "an ordinary one", "max_tokens": 2, "ignore_eos": true}'
REACHED = [
    "max_tokens",
    "min_tokens",
    "response_fields",
    "return_progress",
    "n_predict",
    "max_output_tokens",
    "top_k",
    "repeat_last_n",
    "temperature",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_base",
    "dry_sequence_breakers",
    "mirostat_tau",
    "samplers",
    "seed",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "n_probs",
    "top_logprobs",
    "n",
    "prompt",
    "messages",
    "input",
    "tools",
    "tool_choice",
    "json_schema",
    "response_format",
    "text",
    "options",
    "format",
    "think",
    "pooling",
    "system",
    "stop_sequences",
    "output_config",
]
"""Fields whose values go further than the reader of requests: to the engine, a tokenizer, a template, a compiler."""
REQUESTS = {
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatRequest",
    "/v1/responses": "ResponseRequest",
    "/v1/messages": "MessagesRequest",
    "/completion": "NativeRequest",
}
GENERATING = tuple(REQUESTS)


def make_engine() -> FakeEngine:
    engine = FakeEngine(ctx_size=64, step_s=0.0)
    engine.model = OpenModel(64)
    return engine


class Client:
    """One connection, of which every answer has to come in time."""

    def __init__(self, served: Served) -> None:
        self._connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=SECONDS)

    def ask(self, method: str, path: str, raw: bytes = b"") -> tuple[int, bytes]:
        self._connection.request(method, path, raw, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def check(self, given: Case) -> None:
        """It is answered, not by an internal error, and in JSON that others can read."""
        try:
            status, answer = self.ask("POST", given.path, given.raw)
        except TimeoutError:
            pytest.fail(f"{given} is not answered")
        assert status < 500, (str(given), answer[:300])
        if status != 200:
            error = json.loads(answer)["error"]
            message = error if given.path.startswith("/api/") else error["message"]
            assert len(message) < 1000, str(given)
        elif given.path.startswith("/api/"):  # a line for each piece of a stream
            for line in answer.splitlines():
                json.loads(line, parse_constant=pytest.fail)
        elif b"data: " not in answer[:100]:
            json.loads(answer, parse_constant=pytest.fail)

    def check_server(self) -> None:
        assert self.ask("GET", "/health")[0] == 200
        status, answer = self.ask("POST", "/v1/completions", ORDINARY)
        assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 2


def check_all(served: Served, given: Iterator[Case]) -> None:
    """Each is answered, and after those of each field the server is well."""
    client, field = Client(served), ""
    for one in given:
        if one.field != field:
            client.check_server()
            field = one.field
        client.check(one)
    client.check_server()
    assert served.wait_until(lambda: served.server.worker.idle)


def check_all_while_busy(served: Served, given: Iterator[Case]) -> None:
    """As `check_all`; the server is checked after each ten."""
    client = Client(served)
    for number, one in enumerate(given):
        client.check(one)
        if number % 10 == 0:
            client.check_server()
    client.check_server()


@contextmanager
def busy(served: Served, streams: int) -> Iterator[None]:
    """Streams run until the block ends."""
    stop = threading.Event()

    def reads() -> None:
        while not stop.is_set():
            with raw_connection(served) as connection:
                connection.sendall(raw_completion("a", 60))
                while connection.recv(65536):
                    pass

    threads = [threading.Thread(target=reads) for _ in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(SECONDS)


@pytest.mark.parametrize("path", BODIES)
def test_an_idle_server_answers_whatever_a_field_holds(path: str) -> None:
    """Fields that are read in one function are given to one route."""
    without = () if path == "/v1/chat/completions" else SHARED
    with serving(make_engine) as served:
        check_all(served, cases([path], each=1, without=without))


def test_a_busy_server_answers_whatever_a_field_holds_and_its_streams_go_on() -> None:
    with serving(make_engine) as served:
        given = [one for one in cases(GENERATING, each=1, seed=1) if one.field in REACHED]
        reached = iter(random.Random(4).sample(given, 200))
        with busy(served, 4):
            check_all_while_busy(served, reached)
        assert served.wait_until(lambda: served.server.worker.idle)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=64, context=256)
    changes = {"tokenizer.chat_template": HERMES}
    return str(write_tiny(tmp_path_factory.mktemp("extreme") / "tiny.gguf", sizes=sizes, changes=changes))


@pytest.fixture(scope="module")
def real(tiny: str) -> Iterator[Served]:
    """A server with an engine in its own process, as `engine serve` has it."""
    options = {"device": "cpu", "threads": 1, "parallel": 4, "ctx_size": 64}
    with serving(lambda: ProcessEngine(tiny, options), settings={"model_names": ("tiny",)}) as served:
        yield served


def test_a_real_engine_answers_whatever_a_field_holds_idle_and_busy(real: Served) -> None:
    paths = (*GENERATING, "/api/chat", "/api/generate")
    given = [one for one in cases(paths, each=1, seed=2) if one.field in REACHED]
    chosen = iter(random.Random(3).sample(given, 200))
    check_all(real, itertools.islice(chosen, 140))
    with busy(real, 2):
        check_all_while_busy(real, chosen)
    assert real.wait_until(lambda: real.server.worker.idle)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "max_tokens", "18446744073709551616"),
        ("/v1/completions", "top_k", "18446744073709551616"),
        ("/v1/completions", "repeat_last_n", "18446744073709551616"),
        ("/completion", "n_predict", "18446744073709551616"),
        ("/v1/responses", "max_output_tokens", "18446744073709551616"),
        ("/v1/messages", "max_tokens", "18446744073709551616"),
    ],
)
def test_a_number_out_of_range_is_a_400_with_field_value_and_range(
    real: Served, path: str, field: str, value: str
) -> None:
    status, answer = Client(real).ask("POST", path, case(path, field, value).raw)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, field)
    assert value in error["message"] and "2147483647" in error["message"]
    Client(real).check_server()


def test_half_a_surrogate_pair_is_a_400_that_says_where(real: Served) -> None:
    status, answer = Client(real).ask("POST", "/v1/completions", b'{"prompt": "a", "stop": ["b", "\\ud800"]}')
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "stop[1]") and "surrogate" in error["message"]


@pytest.mark.parametrize("path", GENERATING)
def test_the_document_has_the_ranges_that_the_server_holds_to(real: Served, path: str) -> None:
    client = Client(real)
    given = json.loads(client.ask("GET", "/openapi.json")[1])["components"]["schemas"]
    limited = 0
    for field, schema in given[REQUESTS[path]]["properties"].items():
        for limit, beyond in (("minimum", -1), ("maximum", 1)):
            if limit in schema:
                limited += 1
                outside = schema[limit] + beyond
                status, answer = client.ask("POST", path, case(path, field, json.dumps(outside)).raw)
                assert status == 400 and json.loads(answer)["error"]["param"] == field, (
                    field,
                    outside,
                    answer,
                )
    assert limited >= 15
    assert given["Token"]["maximum"] + 1 == real.server.host.model.vocab_size
