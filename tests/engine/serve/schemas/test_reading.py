"""Bodies become the structs of their routes; an error names the field, the value and what is allowed."""

import json
from typing import Any

import pytest

from quengine.serve.apis.llama.requests import TokenizeRequest
from quengine.serve.apis.openai.schemas import ResponseRequest
from quengine.serve.schemas.canonical import ChatRequest, EmbeddingRequest
from quengine.serve.schemas.errors import ApiError
from quengine.serve.schemas.fields import Body
from quengine.serve.schemas.messages import Message
from quengine.serve.schemas.reading import read_body, read_part
from quengine.serve.schemas.response_items import InputItem
from tests.engine.serve.serving import TABLE

MESSAGES = [{"role": "user", "content": "a"}]


def chat(**fields: Any) -> ChatRequest:
    return read_body(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


@pytest.mark.parametrize(
    ("field", "value", "message", "code"),
    [
        ("temperature", -1, "temperature = -1: must be a number from 0 to 1000000", "invalid_value"),
        ("temperature", "hot", 'temperature = "hot": must be a number from 0 to 1000000', "invalid_value"),
        ("temperature", True, "temperature = true: must be a number from 0 to 1000000", "invalid_value"),
        ("top_k", 1.5, "top_k = 1.5: must be a whole number from -1 to 2147483647", "invalid_value"),
        ("repeat_penalty", 0, "repeat_penalty = 0: must be a number above 0 and at most 1000000", None),
        ("stream", "yes", 'stream = "yes": must be true or false', "invalid_value"),
        (
            "stop",
            5,
            "stop = 5: must be a string or an array of strings",
            "invalid_value",
        ),
        ("tools", 3, "tools = 3: must be an array of at most 128 items", "invalid_value"),
        ("tfs_z", 2, "tfs_z is not supported; only 1 is accepted", "unsupported"),
        ("priority", False, "priority is not supported; only 0 is accepted", "unsupported"),
        ("mirostat", 3, "mirostat = 3: must be a whole number from 0 to 2", None),
        ("mirostat", True, "mirostat = true: must be a whole number from 0 to 2", None),
        ("xtc_probability", 1.5, "xtc_probability = 1.5: must be a number from 0 to 1", None),
        ("dry_base", 0.5, "dry_base = 0.5: must be a number from 1 to 1000000", None),
        (
            "dry_sequence_breakers",
            [],
            "dry_sequence_breakers = []: must be an array of at least one string",
            None,
        ),
        ("top_n_sigma", -2, "top_n_sigma = -2: must be a number from -1 to 1000000", None),
        (
            "samplers",
            "kq",
            'samplers = "kq": must be a string of the letters edskypmxti, or an array of names',
            None,
        ),
        (
            "samplers",
            3,
            "samplers = 3: must be a string of the letters edskypmxti, or an array of names",
            None,
        ),
        ("use_beam_search", 0, "use_beam_search is not supported; only false is accepted", "unsupported"),
        (
            "no_repeat_ngram_size",
            2,
            "no_repeat_ngram_size is not supported; only 0 is accepted",
            "unsupported",
        ),
        ("max_length", 5, "max_length is not supported", "unsupported"),
        ("enable_thinking", 1, "enable_thinking = 1: must be true or false", "invalid_value"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_rule(
    field: str, value: Any, message: str, code: str | None
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**{field: value})
    error = caught.value
    assert error.status == 400 and error.message.startswith(message)
    assert code is None or error.code == code
    assert error.param is not None and error.param.startswith(field[:3])


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (list[Message], [{"role": "x", "content": ""}], 'f[0].role = "x": must be system, developer, user,'),
        (list[Message], [{"role": "user"}], "f[0].content is missing"),
        (list[Message], [{"role": "assistant"}], "f[0]: content is missing"),
        (list[Message], [{"role": "user", "content": 5}], "f[0].content = 5: must be a string or an array"),
        (
            list[Message],
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "f[0].content[0]: image_url is missing",
        ),
        (
            list[Message],
            [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
            "f[0].tool_calls[0].function.name = 1: must be a string",
        ),
        (list[Message], ["a"], 'f[0] = "a": must be an object'),
        (
            list[InputItem],
            [{"type": "web_search_call"}],
            'f[0].type = "web_search_call": must be message, reasoning, function_call, function_call_output, custom_',
        ),
    ],
)
def test_a_wrong_part_is_named_by_its_place(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_part(kind, value, "f")
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (EmbeddingRequest, {}, "input must be a string, token ids, or an array of these"),
        (EmbeddingRequest, {"input": None}, "input must be a string, token ids, or an array of these"),
        (
            EmbeddingRequest,
            {"input": "a", "pooling": "max"},
            'pooling = "max": must be mean or cls or last or none',
        ),
        (ResponseRequest, {"input": []}, "input = []: must be a string or an array of at least one item"),
        (
            ResponseRequest,
            {"input": "a", "text": {"verbosity": "x"}},
            'text.verbosity = "x": must be high, low or medium',
        ),
        (TokenizeRequest, {"content": 1}, "content = 1: must be a string"),
    ],
)
def test_what_is_required_or_nested_is_named_too(kind: type[Body], body: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_body(kind, json.dumps(body).encode())
    assert caught.value.message.startswith(message)


def test_a_field_that_no_struct_has_is_passed_over_and_named() -> None:
    names: list[str] = []
    fields = {"nothing": 1, "a`b\n - at `$.c`": {"x": []}, "text": {"z": 1}, "also": None}
    raw = json.dumps({"input": "a", **fields}).encode()
    assert read_body(ResponseRequest, raw, names) == ResponseRequest(input="a")
    assert sorted(names) == ["a`b\n - at `$.c`", "nothing", "text.z"]


def test_null_is_absent_and_a_whole_number_may_be_written_with_a_fraction() -> None:
    nulls = dict.fromkeys((*ChatRequest.__struct_fields__, "nothing"))
    read = chat(**{**nulls, "messages": MESSAGES, "top_k": 1.0, "stream_options": {"nothing": None}})
    assert (read.top_k, read.n, read.temperature, read.stream) == (1, 1, None, False)
    assert not read.stream_options.include_usage
    assert read == chat(top_k=1)


def test_every_value_that_switches_a_sampler_off_is_taken() -> None:
    off = {
        "mirostat": 0.0,
        "samplers": [],
        "use_beam_search": False,
        "tfs_z": 1,
        "bad_words": [],
        "modalities": ["text"],
    }
    chat(**off)


def test_no_two_bodies_share_a_name() -> None:
    bodies = dict.fromkeys(route.request for route in TABLE if isinstance(route.request, type))
    assert len({kind.__name__ for kind in bodies}) == len(bodies) == len(set(bodies))
