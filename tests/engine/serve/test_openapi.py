"""The server's OpenAPI document: in step with the routes and with what they read, and held to by schemathesis.

schemathesis makes requests of the document, right and wrong ones, sends them to a server with the fake engine, and
compares statuses, media types, headers and bodies with it. What a schema cannot say is listed in `UNSAID`.
"""

import copy
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from zlib import crc32

import jsonschema
import pytest
import requests
from hypothesis import HealthCheck, settings

from quengine.request.sampling_params import SamplingParams
from quengine.serve import http
from quengine.serve.http import EVENTS
from quengine.serve.routes.openapi import document
from quengine.serve.schemas.fields import Body, Sampling
from quengine.serve.settings import ServerSettings
from quengine.structured.answer_format import TextFormat
from quengine.structured.calls.format import GENERIC_FORM, CallFormat
from tests.engine.serve.fake_engine import FakeEngine, FakeModel
from tests.engine.serve.serving import TABLE, Served, serving

SETTINGS = ServerSettings(("fake",))
DOCUMENT = document(TABLE, SETTINGS, FakeModel.vocab_size)
SCHEMAS = DOCUMENT["components"]["schemas"]
OPERATIONS = {(route.method, path.replace(":path", "")): route for route in TABLE for path in route.paths}
TWINS = {
    path: route.paths[0]
    for route in TABLE
    if route.method == "POST"
    for path in route.paths[1:]
    if path != "/v2/rerank"  # its answers have more
}
"""Paths of a route but its first."""
SAME_BODY = (*TWINS, *(path for path in TWINS.values() if path.endswith("/input_tokens")))
"""Paths that read what another path reads: they get fewer requests."""
UNSAID = re.compile(
    "only one of them can hold|too small a number for a schema|requires a call"  # two fields
    "|top_logprobs needs"
    "|no tool is named|there are no tools|two functions are named|no call before it has this id"
    "|no tool_use before it has this id|input holds nothing|must have a call_id or an id"
    "|tokens and the context holds|the prompt has no tokens|inputs in one request"  # lengths and sums
    "|must be a token id from|it is no JSON|are more than the .* that are accepted"  # what a value means
    "|dimensions = .*: must be at most|pooling none gives a row|task .*: this model has no adapter"
    "|suffix needs a prompt that is one text"
    "|no JSON object|grammar, line|JSON schema: must be|is no keyword"
    "|filename: it has more than"
    "|in a message of the assistant's|the last message must be the assistant's"
    "|a raw prompt has none|no model is fetched|keep_alive"
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/completion": {"prompt": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": "a"},
    "/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"prompt": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {},
    "/api/pull": {"model": "fake"},
    "/api/create": {"model": "other", "from": "fake"},
}
WITHOUT_EFFECT = ("verbosity",)
"""Fields that are read, and counted as ignored where their value asks for what is not done here."""
REFUSED = ("/api/pull", "/api/create", "/api/delete", "/api/copy", "/models/load", "/models/unload")
"""What is not done here; a pull, but of the model that is served; loading it, as it is there."""


class OpenModel(FakeModel):
    """Takes constraints, tools and a reasoning effort, so that requests with them come through; holds to none."""

    answer_format = TextFormat(CallFormat(GENERIC_FORM))

    def prepare(self, params: SamplingParams) -> None:
        del params


def make_engine() -> FakeEngine:
    engine = FakeEngine(ctx_size=64, step_s=0.0)
    engine.model = OpenModel(64)
    engine.model.template = "{{ reasoning_effort }}"
    return engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    given = {"defaults": SamplingParams(max_tokens=3), "slot_save_path": tmp_path_factory.mktemp("slots")}
    with serving(make_engine, settings=given) as running:
        yield running


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.trust_env = False  # to look for proxies takes as long as a request
        yield made


@pytest.fixture(scope="module")
def statuses() -> Iterator[Counter[tuple[str, int]]]:
    """Answers to right requests, by operation and status. Most must have been 200 where there were many."""
    counts: Counter[tuple[str, int]] = Counter()
    yield counts
    for label, status in counts:
        if status == 400 and label.partition(" ")[2] not in (*SAME_BODY, *REFUSED):
            right, refused = counts[label, 200], counts[label, 400]
            assert right > 2 * refused or right + refused < MANY, label


MANY = 20
SAMPLED = 5
"""Of the requests that cover a schema one in so many is sent; `benchmarks.checks.fuzz_openapi` sends all."""
_SHARING = (
    "CompletionRequest",
    "NativeRequest",
    "InfillRequest",
    "ResponseRequest",
    "MessagesRequest",
    "CountTokensRequest",
    "OllamaOptions",
)


@cache
def driven(shared_fields: bool, coverage: bool) -> Any:
    """The document as schemathesis drives it. Fields that every text route reads in one function are driven on one.

    schemathesis is imported by who runs this, not by all that collect tests: it takes a second.
    """
    import schemathesis
    from schemathesis.checks import load_all_checks

    load_all_checks()
    given = copy.deepcopy(DOCUMENT)
    for name in () if shared_fields else _SHARING:
        for key in Sampling.__struct_fields__[len(Body.__struct_fields__) :]:
            del given["components"]["schemas"][name]["properties"][key]
    if coverage:  # with no messages the fake engine has no prompt, and all else would be looked at in none
        given["components"]["schemas"]["ChatRequest"]["properties"]["messages"]["minItems"] = 1
    # What covers a schema has its examples; to make a request of them alone takes as long as all others.
    phases = {"coverage": {"enabled": coverage}, "examples": {"enabled": not coverage}}
    config = {"generation": {"deterministic": True}, "phases": phases}
    return schemathesis.openapi.from_dict(given, config=schemathesis.Config.from_dict(config))


bounded = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


# Not schemathesis's `parametrize`, which makes all requests where tests are collected, in each of pytest's processes.
@pytest.mark.parametrize(("method", "path"), [each for each in OPERATIONS if each != ("POST", "/props")])
def test_answers_are_as_documented(
    method: str, path: str, served: Served, session: requests.Session, statuses: Counter[tuple[str, int]]
) -> None:
    from schemathesis.generation.meta import TestPhase

    def send(case: Any) -> None:
        given = (case.path_parameters, case.query, case.headers, case.body)
        if case.meta.phase.name is not TestPhase.COVERAGE or crc32(repr(given).encode()) % SAMPLED == 0:
            hold_to_document(case, served, session, statuses)

    twin = path in SAME_BODY
    drive(driven(shared_fields=twin, coverage=not twin).include(method=method, path=path), send, bounded)


def drive(schema: Any, send: Callable[[Any], None], given: settings) -> None:
    """Send the requests that schemathesis makes for the operations of a schema."""
    from schemathesis.pytest.lazy import get_all_tests

    for made in get_all_tests(schema=schema, test_func=send, settings=given, given_kwargs={}):
        _, test = made.ok()
        test()


def hold_to_document(
    case: Any, served: Served, session: requests.Session, statuses: Counter[tuple[str, int]]
) -> None:
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    answer = case.call(base_url=served.url, session=session, timeout=120)
    assert answer.status_code < 500, answer.text
    if case.meta.generation.mode.value == "positive":
        message = error_of(answer)["message"] if answer.status_code == 400 else ""
        if "this model has no projector" in message:  # most schemas of contents have images
            return
        statuses[case.operation.label, answer.status_code] += 1
        if answer.status_code == 400:
            assert case.path in REFUSED or UNSAID.search(message), (case.body, message)
    excluded = [positive_data_acceptance]
    if '"done_reason":"load"' in answer.text:  # to an empty request, of which nothing else is looked at
        excluded.append(negative_data_rejection)
    case.validate_response(answer, excluded_checks=excluded)


def error_of(answer: Any) -> dict[str, Any]:
    """The error of an answer; of Ollama's shape its message alone."""
    error = answer.json()["error"]
    return {"message": error} if isinstance(error, str) else error


def check_events(path: str, text: str) -> None:
    """Each event's JSON is of the schema that the document names for the stream."""
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"][EVENTS]
    end, data = content["schema"]["properties"]["data"]["anyOf"]
    with_parts = {**data["contentSchema"], "components": {"schemas": SCHEMAS}}
    validator = jsonschema.Draft202012Validator(with_parts)
    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert events
    for event in events:
        if event != end["const"]:
            validator.validate(json.loads(event))


@pytest.mark.parametrize("path", [path for path in BODIES if OPERATIONS["POST", path].event])
def test_every_event_of_a_stream_is_as_documented(served: Served, path: str) -> None:
    more: dict[str, Any] = {"stream": True}
    if path == "/v1/chat/completions":
        more |= {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}, "n": 2}
    elif path == "/v1/completions":
        more |= {"logprobs": 2, "echo": True, "stream_options": {"include_usage": True}}
    elif path == "/completion":
        more |= {"n_probs": 2, "return_tokens": True}
    with served.http() as client:
        answer = client.post(path, json=BODIES[path] | more)
    assert answer.status_code == 200, answer.text
    check_events(path, answer.text)


def test_the_document_names_every_route_and_no_other() -> None:
    documented = {(m.upper(), path) for path, methods in DOCUMENT["paths"].items() for m in methods}
    assert documented == set(OPERATIONS) and len(documented) == sum(len(route.paths) for route in TABLE)
    assert all(route.summary.endswith(".") for route in TABLE)
    assert all(bool(route.answers) != isinstance(route.answer, str) for route in TABLE)


def test_the_document_names_every_field_that_a_route_reads_and_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[type[Body]] = []
    read_body = http.read_body

    ignored: list[str] = []

    def noting(kind: type[Body], raw: bytes, names: list[str]) -> Body:
        read.append(kind)
        made = read_body(kind, raw, names)
        ignored.extend(names)
        return made

    monkeypatch.setattr(http, "read_body", noting)
    with served.http() as client:
        for path, body in BODIES.items():
            read.clear()
            answer = client.post(path, json=body)
            status = 403 if path == "/api/create" else 200  # refused here, after it has been read
            assert answer.status_code == status, answer.text
            reference = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            name = reference["schema"]["$ref"].rpartition("/")[2]
            assert [kind.__name__ for kind in read] == [name]
            (kind,) = read
            assert SCHEMAS[name]["properties"].keys() == set(kind.__struct_encode_fields__), path
            for field in SCHEMAS[name]["properties"]:
                ignored.clear()
                client.post(path, json={**body, field: {"?": 1}})
                assert (field in ignored) == (field in WITHOUT_EFFECT), (path, field)
            answer = client.post(path, json={**body, "no_such_field": 1})
            assert answer.status_code == status and "no_such_field" in ignored


def test_the_schemas_are_schemas_and_every_reference_is_there() -> None:
    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema, name
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT))
    assert set(references) <= SCHEMAS.keys()
    ids = [o["operationId"] for methods in DOCUMENT["paths"].values() for o in methods.values()]
    assert len(ids) == len(set(ids))


def test_a_process_that_has_built_the_document_ends_without_a_collection() -> None:
    """In which msgspec crashes."""
    code = """
import atexit, gc
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 10_000))
from quengine.serve.routes.openapi import document
from quengine.serve.settings import ServerSettings
from quengine.serve.table import ROUTES
print(len(document(ROUTES, ServerSettings(("fake",)))["paths"]) > 40)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n") == ["True", "frozen: True", ""]


def test_keys_are_in_the_document_where_they_are_needed() -> None:
    assert "securitySchemes" not in DOCUMENT["components"]
    keyed = document(TABLE, ServerSettings(("fake",), api_keys=("k",)))
    assert set(keyed["components"]["securitySchemes"]) == {"bearer", "header"}
    for path, methods in keyed["paths"].items():
        for operation in methods.values():
            open_to_all = path in ("/", "/health", "/v1/health", "/page/{name}")
            assert ("security" in operation, "401" in operation["responses"]) == (not open_to_all,) * 2, path


def test_the_served_document_has_the_servers_limits_and_names(served: Served) -> None:
    with served.http() as client:
        given = client.get("/openapi.json").json()
    assert given["openapi"] == "3.1.0"
    assert given == DOCUMENT
    n = given["components"]["schemas"]["ChatRequest"]["properties"]["n"]
    assert n["maximum"] == served.server.settings.limits.n
