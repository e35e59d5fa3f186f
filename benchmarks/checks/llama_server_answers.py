"""Sends the same requests to llama-server and to this server, and prints what a client of the first would miss.

    python -m benchmarks.checks.llama_server_answers http://127.0.0.1:8081 http://127.0.0.1:8080

Both serve the same model, greedily asked, so that texts may differ in rounding: statuses, types of content, keys of
answers with their types, and the order of events are compared. Differences that are meant are listed in
docs/llama-server-tests.md. Prints a line a difference and the count; exits with 1 if there were any.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

MESSAGES = [{"role": "user", "content": "Say hi"}]
_CITY = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": _CITY}}
]
TEXT = {"prompt": "Once upon a time", "n_predict": 6, "temperature": 0}
CHAT = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/completion": TEXT,
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "Say hi", "max_output_tokens": 6, "temperature": 0},
    "/tokenize": {"content": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": MESSAGES},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 3},
    "/v1/embeddings": {"input": "a"},
    "/embeddings": {"input": ["a", "b"]},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
}
"""What each route needs."""
GETS = ("/health", "/v1/models", "/props", "/slots", "/lora-adapters", "/nope", "/slots?fail_on_no_slot=1")
VALUES: dict[str, tuple[Any, ...]] = {
    "stream": (True,),
    "n_probs": (3, 50),
    "post_sampling_probs": (True,),
    "return_tokens": (True,),
    "return_progress": (True,),
    "timings_per_token": (True,),
    "id_slot": (0, -1),
    "n_keep": (5, -1),
    "n_indent": (2,),
    "t_max_predict_ms": (1000,),
    "samplers": (["top_k", "temperature"], "kt", []),
    "dry_multiplier": (0.5,),
    "xtc_probability": (0.5,),
    "mirostat": (1, 2),
    "dynatemp_range": (0.5,),
    "typical_p": (0.5,),
    "top_n_sigma": (1,),
    "min_keep": (0,),
    "seed": (42, -1),
    "ignore_eos": (True,),
    "logit_bias": ([[5, 1.0]], [[5, False]], {" the": -5}),
    "stop": (["there"], []),
    "verbose": (True,),
    "grammar": ('root ::= "yes" | "no"', "wrong("),
    "json_schema": ({"type": "boolean"}, {"type": "no"}),
    "response_fields": (["content", "timings/prompt_n"],),
    "lora": ([],),
    "n": (2, 0),
    "n_cmpl": (2,),
    "prompt": ([1, 2], ["a", "b"], ["a", 5], {"prompt_string": "a"}, 5, "a " * 9000),
    "logprobs": (True,),
    "top_logprobs": (2,),
    "response_format": ({"type": "json_object"},),
    "tools": (TOOLS,),
    "messages": (None, [{"role": "user"}]),
    "stream_options": ({"include_usage": True},),
    "content": (["a", 5], ""),
    "with_pieces": (True,),
    "add_special": (True,),
    "input": (["a"], [[1, 2]]),
}
"""Fields, each sent alone to every route, and once more in a stream."""


def requests() -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    yield from (("GET", path, None) for path in GETS)
    for path, body in BODIES.items():
        yield "POST", path, body
        for field, values in VALUES.items():
            for value in values:
                yield "POST", path, body | {field: value}
                if field != "stream":
                    yield "POST", path, body | {field: value, "stream": True}


def shape(value: Any, at: str = "") -> set[tuple[str, str]]:
    """The places of a JSON value and the kind of each."""
    if isinstance(value, dict):
        return {(at, "object")}.union(*(shape(each, f"{at}.{key}") for key, each in value.items()))
    if isinstance(value, list):
        return {(at, "array")}.union(*(shape(each, f"{at}[]") for each in value))
    kinds = {type(None): "null", bool: "boolean", int: "number", float: "number"}
    return {(at, kinds.get(type(value), "string"))}


def events(answer: httpx.Response) -> list[set[tuple[str, str]]]:
    """The shape of an answer, or of each event of a stream that differs from the one before."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [shape(answer.json())]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    shapes = [shape(None if line == "[DONE]" else json.loads(line)) for line in lines]
    return [each for each, _ in itertools.groupby(shapes)]


def missed(theirs: httpx.Response, ours: httpx.Response) -> list[str]:
    """What is in the first answer and not in the second."""
    if theirs.status_code >= 400 and ours.is_success:
        return []
    if theirs.status_code != ours.status_code:
        return [f"{theirs.status_code} -> {ours.status_code} {ours.text[:100]}"]
    kinds = [each.headers["content-type"].partition(";")[0] for each in (theirs, ours)]
    if kinds[0] != kinds[1]:
        return [f"{kinds[0]} -> {kinds[1]}"]
    first, second = events(theirs), events(ours)
    if len(first) != len(second):
        return [f"{len(first)} kinds of events one after the other -> {len(second)}"]
    lost = [(at, kind) for one, other in zip(first, second, strict=True) for at, kind in one - other]
    return [f"no {kind} at {at or 'the top'}" for at, kind in sorted(set(lost))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("theirs", help="address of llama-server")
    parser.add_argument("ours", help="address of this server")
    given = parser.parse_args()
    sent, differing = 0, 0
    with httpx.Client(timeout=120, headers={"Connection": "close"}) as client:
        for method, path, body in requests():
            answers = [client.request(method, url + path, json=body) for url in (given.theirs, given.ours)]
            lines = missed(answers[0], answers[1])
            sent, differing = sent + 1, differing + bool(lines)
            more = {key: each for key, each in (body or {}).items() if BODIES[path].get(key) != each}
            for line in lines:
                print(f"{method} {path} {json.dumps(more)[:60]}: {line}", flush=True)
    print(f"{sent} requests, {differing} answered otherwise")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
