"""What the server answers to a fixed set of requests of every API, whole and as streams, over fake engines.

`benchmarks.checks.freeze` records it as its part `answers`. Ids, times and rates are left out of the record, and the
pieces of text that a stream has are joined: how many there are depends on how fast the client reads.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from quengine.request.sampling_params import SamplingParams
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine, ThinkingModel

_ID = re.compile(r"[0-9A-Za-z-]{16,}\Z")
"""The random end of an id."""
_IDS = frozenset(("id", "call_id", "item_id", "response_id"))
_UNSTEADY = re.compile(
    r"created|created_at|completed_at|started_at|modified_at|expires_at|last_used|sequence_number|timestamp"
    r"|.*_(ms|per_second|duration)|id_task|obfuscation"
)
"""Fields whose values no two servers have in common."""
_JOINED = frozenset(
    ("content", "text", "delta", "reasoning_content", "thinking", "partial_json", "response", "arguments")
)
_CALLS = frozenset(("tool_calls", "function", "function_call"))
"""The first piece of a call has its name too, and as much of its arguments as there was."""
_COUNTED = frozenset(("tokens", "tokens_predicted", "predicted_n"))

_SAID = {
    "speak": "<think>\nIt is clear.\n</think>\n\nHello there.",
    "call": '<think>\nA tool.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>',
}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
_FUNCTION = {"name": "add", "description": "Adds.", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _FUNCTION}
_LIVE = {
    "stream": True,
    "timings_per_token": True,
    "return_progress": True,
    "stream_options": {"include_usage": True},
}
_WEIGHED = {"logprobs": True, "top_logprobs": 2}


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_FAKE: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    *(("GET", path, None) for path in ("/health", "/v1/health", "/models", "/v1/models", "/v1/models/fake")),
    *(("GET", path, None) for path in ("/props", "/slots", "/lora-adapters", "/tools")),
    *(("GET", path, None) for path in ("/api/tags", "/api/ps", "/api/version", "/api/none", "/v1/none")),
    ("GET", "/v1/chat/completions", None),
    ("OPTIONS", "/v1/chat/completions", None),
    ("POST", "/v1/chat/completions", {"messages": _messages("hi"), "n": 2}),
    ("POST", "/v1/chat/completions", {"messages": _messages("hi"), **_WEIGHED}),
    ("POST", "/v1/chat/completions", {"messages": _messages("hi"), "stream": True, **_WEIGHED}),
    ("POST", "/v1/chat/completions", {"messages": _messages("hi"), "verbose": True, **_WEIGHED}),
    ("POST", "/v1/chat/completions", {"messages": _messages("hi"), "verbose": True, "stream": True}),
    ("POST", "/v1/chat/completions", {"messages": _messages("hi"), **_LIVE}),
    ("POST", "/v1/completions", {"prompt": "a", **_LIVE}),
    ("POST", "/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True, "stream": True}),
    ("POST", "/v1/completions", {"prompt": "a", "verbose": True, "stream": True}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "verbose": True}),
    ("POST", "/completion", {"prompt": "a", **_LIVE}),
    ("POST", "/v1/responses", {"input": "hi", **_LIVE}),
    ("POST", "/v1/chat/completions", {"messages": _messages("please fail")}),
    ("POST", "/v1/chat/completions", {"messages": _messages("please fail"), "stream": True}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/chat/completions", {"messages": _messages("hi"), "temperature": -1}),
    ("POST", "/v1/chat/completions/input_tokens", {"messages": _messages("hi")}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 1}),
    ("POST", "/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/completions", {"prompt": "a" * 9000}),
    ("POST", "/completion", {"prompt": "a", "n_probs": 2, "return_tokens": True}),
    ("POST", "/completion", {"prompt": "a", "stream": True}),
    ("POST", "/completion", {"prompt": 1.5}),
    ("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("POST", "/v1/responses", {"input": "hi"}),
    ("POST", "/v1/responses", {"input": "hi", "stream": True}),
    ("POST", "/v1/responses/input_tokens", {"input": "hi"}),
    ("GET", "/v1/responses/resp_none", None),
    ("POST", "/v1/messages", {"messages": _messages("hi"), "max_tokens": 4}),
    ("POST", "/v1/messages", {"messages": _messages("hi"), "max_tokens": 4, "stream": True}),
    ("POST", "/v1/messages", {"messages": _messages("hi"), "max_tokens": 0}),
    ("POST", "/v1/messages/count_tokens", {"messages": _messages("hi")}),
    ("POST", "/v1/embeddings", {"input": ["a", "b"]}),
    ("POST", "/embedding", {"content": "a"}),
    ("POST", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("POST", "/v2/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("POST", "/tokenize", {"content": "ab", "with_pieces": True}),
    ("POST", "/detokenize", {"tokens": [1, 2]}),
    ("POST", "/apply-template", {"messages": _messages("hi")}),
    ("POST", "/api/chat", {"messages": _messages("hi")}),
    ("POST", "/api/chat", {"messages": _messages("hi"), "stream": False}),
    ("POST", "/api/generate", {"prompt": "hi"}),
    ("POST", "/api/generate", {"prompt": 1}),
    ("POST", "/api/embed", {"input": ["a", "b"]}),
    ("POST", "/api/embeddings", {"prompt": "a"}),
    ("POST", "/api/show", {"model": "fake"}),
    ("POST", "/models/unload", {"model": "fake"}),
    ("POST", "/slots/0?action=none", {}),
)


def _spoken() -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Reasoning, text and a call, in every API that has conversations, whole and as a stream."""
    for text in _SAID:
        chat, tools = _messages(text), {"tools": [_TOOL]}
        for stream in (False, True):
            yield "POST", "/v1/chat/completions", {"messages": chat, "stream": stream, **tools}
            yield (
                "POST",
                "/v1/chat/completions",
                {"messages": chat, "stream": stream, "functions": [_FUNCTION]},
            )
            yield "POST", "/api/chat", {"messages": chat, "stream": stream, "think": True, **tools}
            item = {"type": "function", **_FUNCTION}
            yield "POST", "/v1/responses", {"input": text, "stream": stream, "tools": [item], "store": False}
            given = {"name": "add", "description": "Adds.", "input_schema": _PARAMETERS}
            body = {"messages": chat, "stream": stream, "tools": [given], "max_tokens": 400}
            yield "POST", "/v1/messages", body | {"thinking": {"type": "enabled", "budget_tokens": 300}}
            yield "POST", "/completion", {"prompt": text, "stream": stream}


def recorded() -> dict[str, Any]:
    """Status, media type and body of each answer, by request."""
    settings = {"defaults": SamplingParams(max_tokens=4, seed=1)}
    record: dict[str, Any] = {}
    with serving(lambda: FakeEngine(ctx_size=4096, step_s=0.001), settings=settings) as served:
        record |= _asked(served, _FAKE, "fake")
    settings = {"defaults": SamplingParams(seed=1)}
    with serving(lambda: SpeakingEngine(_SAID, ThinkingModel(4096)), settings=settings) as served:
        record |= _asked(served, _spoken(), "speaking")
    return record


def _asked(served: Served, requests: Any, engine: str) -> dict[str, Any]:
    record: dict[str, Any] = {}
    with served.http() as client:
        for method, path, body in requests:
            answer = client.request(method, path, json=body)
            kind = answer.headers.get("content-type", "")
            told = {"status": answer.status_code, "type": kind, "body": _steady(kind, answer.text)}
            name = f"{engine} {method} {path} {json.dumps(body)[:200]}"
            assert name not in record, f"two requests are called {name}"
            record[name] = told
    return record


def _steady(kind: str, text: str) -> str:
    """An answer's body without what differs between two runs."""
    if "event-stream" in kind:
        events = _joined([_event(part) for part in text.split("\n\n") if part])
    elif "ndjson" in kind:
        events = _joined([("", json.loads(line)) for line in text.splitlines()])
    else:
        events = [("", json.loads(text) if "json" in kind and text else text)]
    return "\n".join(f"{name}{json.dumps(_without(value))}" for name, value in events)


def _event(part: str) -> tuple[str, Any]:
    head, mark, value = part.rpartition("data: ")
    return (head, json.loads(value)) if mark and value.startswith("{") else (part, None)


def _without(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {each: _without(value[each], each) for each in value}
    if isinstance(value, list):
        return [_without(each) for each in value]
    if _UNSTEADY.fullmatch(key):
        return 0
    return _ID.sub("ID", value) if key in _IDS and isinstance(value, str) else value


def _joined(events: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The events, those that follow each other and differ in their text alone as one."""
    made: list[tuple[str, Any]] = []
    for name, value in events:
        if made and made[-1][0] == name and _fits(made[-1][1], value):
            made[-1] = name, _both(made[-1][1], value)
        else:
            made.append((name, value))
    return made


def _fits(one: Any, other: Any, key: str = "") -> bool:
    if _UNSTEADY.fullmatch(key) or key in _COUNTED or key in _IDS:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        same = {*one} >= {*other} > set() if key in _CALLS else list(one) == list(other)
        return same and all(_fits(one[each], other[each], each) for each in other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_fits(*each, key) for each in zip(one, other, strict=True))
    return isinstance(one, str) and isinstance(other, str) if key in _JOINED else one == other


def _both(one: Any, other: Any, key: str = "") -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {each: _both(one[each], other[each], each) for each in other}
    if isinstance(one, list) and key != "tokens":
        return [_both(*each, key) for each in zip(one, other, strict=True)]
    return one + other if key in _JOINED or key == "tokens" else other
