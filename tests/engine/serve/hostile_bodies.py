"""Request bodies with one field of an extreme value, as raw JSON: what JSON can write and a server may not expect.

`cases` gives all of them for every field that the OpenAPI document names, and for the parts inside some fields.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quengine.serve.routes.openapi import document
from quengine.serve.schemas.fields import Body, Sampling
from quengine.serve.settings import ServerSettings
from tests.engine.serve.serving import TABLE

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/completion": {"prompt": "a", "n_predict": 3},
    "/v1/embeddings": {"input": "a"},
    "/embeddings": {"input": "a"},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 3},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 3}},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {},
    "/api/pull": {},
    "/api/copy": {},
}
"""What a route needs, and as few tokens as can be."""

KINDS: dict[str, tuple[str, ...]] = {
    "large integer": (
        "18446744073709551616",
        "2147483648",
        "9007199254740992",
        "9223372036854775808",
        "18446744073709551615",
        "9223372036854775807",
        "2147483647",
        "1" + 40 * "0",
        "1" + 4000 * "0",
    ),
    "negative integer": ("-1", "-2", "-2147483649", "-9223372036854775808", "-9223372036854775809"),
    "float": ("1e308", "-1e308", "1e-320", "0.5", "-0.0", "1.0", "9007199254740993.0"),
    "not finite": ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"),
    "half a surrogate pair": (
        '"\\ud800"',
        '["\\ud800"]',
        '{"a": "\\udfff"}',
        '{"\\ud800": 1}',
        '["a", "\\udc00"]',
    ),
    "string": ('""', '"\\u0000"', '"7"', '"' + 50_000 * "x" + '"', '"\\ud83d\\ude00"', '"\u202e"'),
    "boolean or null": ("true", "false", "null", "[null]", "[true]"),
    "nested": (
        90 * "[" + 90 * "]",
        5000 * "[" + 5000 * "]",
        80 * '{"a":' + "1" + 80 * "}",
        3000 * '{"a":' + "1" + 3000 * "}",
    ),
    "array": (
        "[]",
        "[18446744073709551616]",
        "[[1, 1e308]]",
        "[-1]",
        "[1.5]",
        "[[18446744073709551616, 1]]",
        '[["a", 1]]',
    ),
    "object": (
        "{}",
        '{"type": 18446744073709551616}',
        '{"1": 1e308}',
        '{"schema": 123}',
        '{"18446744073709551616": 1}',
    ),
}
"""JSON texts by kind of value."""

_CALL = '[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [%s]}]'
_FUNCTION = '{"type": "function", "function": {"name": "f", "parameters": %s}}'
INSIDE: dict[str, tuple[str, ...]] = {
    "messages": (
        '[{"role": %s, "content": "a"}]',
        '[{"role": "user", "content": %s}]',
        '[{"role": "user", "content": [{"type": "text", "text": %s}]}]',
        '[{"role": "user", "content": "a", "name": %s}]',
        '[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": %s}]}]',
        '[{"role": "tool", "content": "a", "tool_name": %s}]',
        '[{"role": "user", "content": "a", "images": %s}]',
        _CALL.replace("%s", '{"function": {"name": "f", "arguments": {"a": %s}}}'),
        _CALL.replace("%s", '{"id": %s, "function": {"name": "f"}}'),
        _CALL.replace("%s", '{"function": {"name": "f", "arguments": %s}}'),
    ),
    "input": (
        '[{"role": "user", "content": %s}]',
        '[{"type": "function_call", "call_id": %s, "name": "f", "arguments": "{}"}]',
        '[{"type": %s}, {"role": "user", "content": "a"}]',
        '[{"type": "reasoning", "encrypted_content": %s}, {"role": "assistant", "content": "a"}]',
        '[{"type": "local_shell_call", "call_id": "a", "action": {"command": %s}}]',
        '[{"type": "custom_tool_call", "call_id": "a", "name": "f", "input": %s}]',
        '[{"type": "item_reference", "id": %s}]',
    ),
    "prompt": (
        "[%s]",
        "[[%s]]",
        '["a", %s]',
        '{"prompt_string": %s}',
        '{"content": [{"type": "text", "text": %s}]}',
        '{"prompt_string": "a", "multimodal_data": %s}',
    ),
    "response_fields": ("[%s]",),
    "documents": ("[%s]",),
    "texts": ("[%s]",),
    "input_extra": ("[%s]", '[{"text": %s}]', '[{"text": "a", "filename": %s}]'),
    "stop": ("[%s]",),
    "options": (
        '{"num_predict": %s}',
        *(
            f'{{"num_predict": 3, "{name}": %s}}'
            for name in ("num_ctx", "temperature", "top_k", "repeat_last_n", "seed", "stop", "min_p")
        ),
    ),
    "format": ('{"type": %s}', '{"type": "integer", "maximum": %s}'),
    "logit_bias": ('{"1": %s}', "[[1, %s]]", "[[%s, 1]]"),
    "response_format": (
        '{"type": %s}',
        '{"type": "json_object", "schema": %s}',
        '{"type": "json_schema", "json_schema": {"schema": %s}}',
    ),
    "json_schema": (
        '{"type": %s}',
        '{"type": "integer", "maximum": %s}',
        '{"enum": [%s]}',
        '{"maxLength": %s, "type": "string"}',
    ),
    "text": ('{"format": %s}', '{"format": {"type": "json_schema", "schema": %s}}'),
    "tools": (
        "[%s]",
        '[{"type": "custom", "name": "f", "format": {"type": "grammar", "definition": %s}}]',
        '[{"type": "function", "function": {"name": %s}}]',
        f"[{_FUNCTION}]",
        '[{"name": "f", "input_schema": %s}]',
    ),
    "tool_choice": (
        '{"type": "function", "function": %s}',
        '{"type": "function", "name": %s}',
        '{"type": "allowed_tools", "mode": "auto", "tools": %s}',
    ),
    "system": ('[{"type": "text", "text": %s}]',),
    "stop_sequences": ("[%s]",),
    "thinking": ('{"type": %s}', '{"type": "enabled", "budget_tokens": %s}'),
    "output_config": ('{"effort": %s}', '{"format": {"type": "json_schema", "schema": %s}}'),
    "metadata": ('{"a": %s}',),
    "include": ("[%s]",),
    "reasoning": ('{"effort": %s}', '{"summary": %s}'),
    "stream_options": ('{"include_usage": %s}',),
    "chat_template_kwargs": (
        '{"tools": %s}',
        '{"messages": %s}',
        '{"add_generation_prompt": %s}',
        '{"bos_token": %s}',
    ),
}
"""Values of fields with a place inside them for an extreme one."""


@dataclass(frozen=True)
class Case:
    """A body and what is extreme in it."""

    path: str
    field: str
    value: str
    raw: bytes

    def __str__(self) -> str:
        return f"{self.path} {self.field} = {self.value[:60]}"


SHARED = Sampling.__struct_fields__[len(Body.__struct_fields__) :]
"""Fields that every text route reads in one function."""


def fields_of(path: str) -> list[str]:
    """The fields of a route's body, by the document."""
    given = document(TABLE, ServerSettings(("fake",)))
    body = given["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = given["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    return list(schema["properties"])


def cases(
    paths: Sequence[str], each: int | None = None, seed: int = 0, without: Sequence[str] = ()
) -> Iterator[Case]:
    """Every field of these routes, but `without`, with every value, or `each` of each kind, drawn by `seed`."""
    rng = random.Random(seed)
    for path in paths:
        for field in (name for name in fields_of(path) if name not in without):
            for kind in KINDS.values():
                for value in kind if each is None else rng.sample(kind, each):
                    places = ("%s", *INSIDE.get(field, ()))
                    for place in places if each is None else {"%s", rng.choice(places)}:
                        yield case(path, field, place.replace("%s", value))


def case(path: str, field: str, value: str) -> Case:
    members = {key: json.dumps(part) for key, part in BODIES[path].items()} | {field: value}
    text = ", ".join(f"{json.dumps(key)}: {part}" for key, part in members.items())
    return Case(path, field, value, f"{{{text}}}".encode())
