"""Tool calls: every format read from a stream, however it is cut; constraints that the parser reads back; requests."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine import LLM, SamplingParams
from quengine.errors import EngineError
from quengine.models.tokenizer import Tokenizer
from quengine.request.text_stream import TextStream
from quengine.structured.calls.format import GENERIC_FORM, CallFormat
from quengine.structured.calls.named import LLAMA_FORM, NAMED_FORMS, template_form
from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.tool_calls import CallDelta, Delta, TextDelta, ToolUse, collect
from tests.gguf_builder import GGUFBuilder, ModelSizes, bpe_vocabulary
from tests.tiny_models import write_tiny

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
FORMS = {
    "hermes": GENERIC_FORM,
    "mistral": NAMED_FORMS["[TOOL_CALLS]"],
    "mistral-named": NAMED_FORMS["[CALL_ID]"],
    "llama3": LLAMA_FORM,
}
CONTROLS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|endoftext|>")
PARIS = '{"city": "Pa\\"}ris", "list": [1, {"a": "]"}]}'

# format, text, what is said, what is called
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "just text", "just text", []),
    ("hermes", "", "", []),
    ("hermes", " \n ", " \n ", []),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "", [("weather", PARIS)]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n'
        '<tool_call>\n{"name": "now"}\n</tool_call>\n',
        "Let me see.",
        [("f", '{"a": 1}'), ("now", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"id": [1], "name": "f", "arguments": {}}</tool_call> ok', " ok", [("f", "{}")]),
    ("hermes", "a <tool_call> is a tag, <tool_", "a <tool_call> is a tag, <tool_", []),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>', '<tool_call>{"nam": 1}</tool_call>', []),
    ("hermes", "x < y <tool_cal> z", "x < y <tool_cal> z", []),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}}</tool_call>', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_c', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": 3, "arg": 1}</tool_call>', '<tool_call>{"name": 3, "arg": 1}</tool_call>', []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]', "", [("weather", PARIS)]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}, {"name": "g", "arguments": {"a": 1}}]',
        "",
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "see [TOOL] [1]", "see [TOOL] [1]", []),
    ("mistral-named", f"[TOOL_CALLS]weather[ARGS]{PARIS}", "", [("weather", PARIS)]),
    (
        "mistral-named",
        'ok [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "ok",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral-named", "[TOOL_CALLS]a b[ARGS]{}", "[TOOL_CALLS]a b[ARGS]{}", []),
    ("llama3", f'{{"name": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
    ("llama3", '\n{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    (
        "llama3",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "other", "arguments": {"a": 1}}',
        "",
        [("now", "{}"), ("other", '{"a": 1}')],
    ),
    ("llama3", '{"name": "Alice", "parameters": {}}', '{"name": "Alice", "parameters": {}}', []),
    ("llama3", '{"name": "now"}', '{"name": "now"}', []),
    ("llama3", ' {"answer": [1, 2]} and more', ' {"answer": [1, 2]} and more', []),
    ("llama3", 'a {"name": "now", "parameters": {}}', 'a {"name": "now", "parameters": {}}', []),
    (
        "llama3",
        '<|python_tag|>brave_search.call(query="a, \\"b\\" (c)", n=3)',
        "",
        [("brave_search", '{"query": "a, \\"b\\" (c)", "n": 3}')],
    ),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
]  # fmt: skip


def vocabulary(path: Path) -> Tokenizer:
    metadata = bpe_vocabulary(special=CONTROLS)
    metadata["tokenizer.ggml.eos_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 1
    return Tokenizer.from_gguf(GGUFBuilder().kvs({"general.architecture": "llama", **metadata}).write(path))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return vocabulary(tmp_path_factory.mktemp("tools") / "vocab.gguf")


def refuses(*_: Any) -> str:
    """A template that cannot be rendered."""
    raise EngineError("no")


def parsed(name: str, pieces: list[str], tools: Any = TOOLS) -> list[Delta]:
    parser = CallFormat(FORMS[name]).parser(ToolUse.from_openai(tools))
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return deltas + parser.finish()


def outcome(deltas: list[Delta]) -> tuple[str, list[tuple[str, str]]]:
    text, calls = collect(deltas)
    return text, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("name", "text", "said", "called"), CASES)
def test_calls_and_text_are_told_apart(
    name: str, text: str, said: str, called: list[tuple[str, str]]
) -> None:
    assert outcome(parsed(name, [text])) == (said, called)
    assert outcome(parsed(name, list(text))) == (said, called)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(case=st.sampled_from(CASES), data=st.data())
def test_any_split_of_a_stream_gives_the_same(
    case: tuple[str, str, str, list[tuple[str, str]]], data: st.DataObject
) -> None:
    name, text, said, called = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert outcome(parsed(name, pieces)) == (said, called)


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "now"', '"arguments": ', "{}",
    '"parameters": ', "{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "now", "a", ";", "(", ")", ".call(", "=", "1",
)  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(FORMS)), parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14))
def test_garbage_gives_the_same_in_one_piece_and_in_characters(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    whole = outcome(parsed(name, [text]))
    assert outcome(parsed(name, list(text))) == whole
    said, called = whole
    if not called:
        assert said == text, "text without a call comes back as it was"


def test_a_name_and_arguments_go_out_as_they_come() -> None:
    parser = CallFormat(FORMS["hermes"]).parser(ToolUse.from_openai(TOOLS), new_id=lambda: "call_1")
    steps = [
        parser.push(p)
        for p in ('ok <tool_call>{"name": "f", "argu', 'ments": {"a"', ": 1", "}", "}</tool_call>")
    ]
    assert steps == [
        [TextDelta("ok")],
        [CallDelta(0, '{"a"', "call_1", "f")],
        [CallDelta(0, ": 1")],
        [CallDelta(0, "}")],
        [],
    ]
    first, second = (d.as_openai() for d in (steps[1][0], steps[2][0]) if isinstance(d, CallDelta))
    assert first == {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a"'},
    }
    assert second == {"index": 0, "function": {"arguments": ": 1"}}


def test_text_is_not_held_longer_than_it_may_become_a_tag() -> None:
    parser = CallFormat(FORMS["hermes"]).parser(ToolUse.from_openai(TOOLS))
    assert [parser.push(p) for p in ("a <", "b", " <tool", "s>")] == [
        [TextDelta("a")],
        [TextDelta(" <b")],
        [],
        [TextDelta(" <tools>")],
    ]


def test_code_is_a_call_where_there_is_a_tool_for_it() -> None:
    tools = [{"type": "function", "function": {"name": "code_interpreter"}}]
    deltas = parsed("llama3", ["<|python_tag|>pri", 'nt("a")\n'], tools)
    assert outcome(deltas) == ("", [("code_interpreter", json.dumps({"code": 'print("a")\n'}))])


def test_ids_are_those_that_the_template_wants() -> None:
    _, calls = collect(parsed("mistral", ['[TOOL_CALLS][{"name": "f"}, {"name": "g"}]']))
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in calls) and calls[0].id != calls[1].id
    _, calls = collect(parsed("mistral-named", ["[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}"]))
    assert calls[0].id == "abcdefghi"
    _, calls = collect(parsed("hermes", ['<tool_call>{"name": "f"}</tool_call>']))
    assert calls[0].id.startswith("call_")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}", "mistral-named"),
        ('<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>', "hermes"),
        ("<tool_call>\\n<function=example>\\n<parameter=a>", None),
        ("{{- '<|python_tag|>' + tool_call.name + '.call(' }}", "llama3"),
        ('{{ \'<|start_header_id|>\' }} {"name": function name, "parameters": dictionary}', "llama3"),
        ("{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% endfor %}", None),
    ],
)
def test_the_format_is_read_off_the_template(template: str, name: str | None, tokenizer: Tokenizer) -> None:
    found = template_form(template, refuses)
    expected = FORMS[name or "hermes"]
    assert (found.open, found.head, found.middle) == (expected.open, expected.head, expected.middle)
    assert (found.tail, found.close, found.python_tag) == (expected.tail, expected.close, expected.python_tag)
    controls = {tokenizer.token_text(i) for i in CallFormat(found, tokenizer).marker_ids}
    assert controls == {each for each in CONTROLS if any(each in text for text in expected.texts())}


TEMPLATES = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral-named": "[TOOL_CALLS][ARGS]",
    "mistral-named with ids": "[TOOL_CALLS][CALL_ID][ARGS]",
    "llama3": "<|python_tag|>",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_valid_whatever_the_model_chooses(
    tokenizer: Tokenizer, template: str, choice: Any, parallel: bool
) -> None:
    tool_format = CallFormat(template_form(template, refuses), tokenizer)
    other = {"type": "function", "function": {"name": "stop", "parameters": WEATHER}}
    use = ToolUse.from_openai([TOOLS[0], other], choice, parallel)
    spec = tool_format.constraint(use)
    assert spec is not None
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    names = set()
    for seed in range(12):
        constraint, rng, parser = compiler.compile(spec), random.Random(seed), tool_format.parser(use)
        deltas: list[Delta] = []
        stream = TextStream(tokenizer.token_bytes)
        for _ in range(2000):
            token = (
                rng.choice(np.flatnonzero(constraint.allowed()).tolist()) if not constraint.finished else None
            )
            if token is None or token in tokenizer.eos_ids:
                break
            assert not tokenizer.is_control(token) or token in tool_format.marker_ids
            deltas += parser.push(stream.push(token))
            constraint.advance(token)
        else:
            pytest.fail("the walk does not end")
        text, calls = collect(deltas + parser.finish())
        assert text == "" and calls and (len(calls) == 1 or use.parallel)
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), WEATHER)
            names.add(call.name)
    assert names == ({"weather"} if use.named else {"weather", "stop"})


def test_only_a_required_call_is_a_constraint() -> None:
    tool_format = CallFormat(FORMS["hermes"])
    assert tool_format.constraint(ToolUse.from_openai(TOOLS)) is None
    assert tool_format.constraint(ToolUse.from_openai(TOOLS, "none")) is None


def allowed_tools(*tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_a_request_is_read_as_openai_has_it() -> None:
    auto = ToolUse.from_openai(TOOLS)
    assert (auto.choice, [t.name for t in auto.callable], auto.described) == (
        "auto",
        ["weather", "now"],
        TOOLS,
    )
    assert ToolUse.from_openai(None) == ToolUse.from_openai([], "auto") == ToolUse()
    none = ToolUse.from_openai(TOOLS, "none")
    assert (none.callable, none.described) == ((), None)
    named = ToolUse.from_openai(TOOLS, {"type": "function", "name": "now"}, True)
    assert (named.choice, [t.name for t in named.callable], named.parallel) == ("required", ["now"], False)
    flat = ToolUse.from_openai(
        [{"type": "function", "name": "now", "description": "d"}], parallel_tool_calls=False
    )
    assert flat.described == [{"type": "function", "function": {"name": "now", "description": "d"}}]
    assert not flat.parallel
    choice = allowed_tools({"type": "function", "function": {"name": "now"}}, mode="required")
    allowed = ToolUse.from_openai(TOOLS, choice)
    assert (allowed.choice, [t.name for t in allowed.callable]) == ("required", ["now"])
    assert allowed.described == TOOLS and allowed.parallel


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("x",), "tools: must be a list"),
        (([{}],), r"tools\[0\]: must be"),
        (([{"type": "function"}],), r"tools\[0\]: its name None"),
        (([{"type": "function", "function": 3}],), r"tools\[0\]: its name None"),
        (([{"type": "function", "function": {"name": "a b"}}],), "its name 'a b'"),
        (([{"type": "function", "function": {"name": "a", "parameters": []}}],), "must be a JSON schema"),
        ((TOOLS + TOOLS[:1],), "two functions are named 'weather'"),
        ((TOOLS * 100,), "more than the 128"),
        ((TOOLS, "maybe"), "tool_choice = 'maybe'"),
        ((TOOLS, 3), "tool_choice = 3"),
        (([], "required"), "there are no tools"),
        (
            (TOOLS, {"type": "function", "function": {"name": "x"}}),
            "no tool is named 'x'; there: weather, now",
        ),
        ((TOOLS, {"type": "allowed_tools"}), "tool_choice"),
        ((TOOLS, allowed_tools("auto")), "must be functions"),
        ((TOOLS, allowed_tools({"type": "function", "name": "x"})), "named 'x'"),
        ((TOOLS, None, 1), "parallel_tool_calls"),
    ],
)
def test_a_wrong_request_is_one_line(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        ToolUse.from_openai(*fields)
    assert "\n" not in str(caught.value)


def test_messages_get_their_arguments_as_values_and_mistral_its_ids() -> None:
    call = {"id": "call_123", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_123", "content": "ok"},
    ]
    assistant, tool = CallFormat(FORMS["hermes"]).messages(said)
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (assistant["content"], tool) == ("", said[1])
    assistant, tool = CallFormat(FORMS["mistral"]).messages(said)
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] != "call_123"
    assert re.fullmatch("[a-zA-Z0-9]{9}", tool["tool_call_id"])
    call["function"] = {"name": "f", "arguments": "[1]"}
    with pytest.raises(EngineError, match=r"messages\[0\]: the arguments of f are no JSON object"):
        CallFormat(FORMS["hermes"]).messages(said)


TEMPLATE = (
    "{% if tools %}[AVAILABLE]{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m['role'] + ':' }}"
    "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}"
    "{% endfor %}{{ m['content'] }}{% endfor %}"
)


def test_a_whole_request_from_tools_to_deltas(tmp_path: Path) -> None:
    metadata = bpe_vocabulary(special=CONTROLS) | {"tokenizer.chat_template": TEMPLATE}
    metadata["tokenizer.ggml.eos_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 1
    path = write_tiny(tmp_path / "m.gguf", vocabulary=metadata, sizes=ModelSizes(context=1024))
    with LLM(path, device="cpu") as llm:
        assert llm.chat_template is not None
        tool_format = CallFormat(template_form(TEMPLATE, llm.chat_template.render), llm.tokenizer)
        assert tool_format.form.middle == "[ARGS]"
        use = ToolUse.from_openai(TOOLS, {"type": "function", "function": {"name": "weather"}})
        said = {"id": "x", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [said]}]
        ids = llm.encode_chat(tool_format.messages(messages), use.described)
        prompt = llm.tokenizer.decode(ids, skip_special=False)
        assert '"name": "weather"' in prompt and prompt.endswith('[TOOL_CALLS]now[ARGS]{"a": 1}')
        params = SamplingParams(temperature=0, max_tokens=200, constraint=tool_format.constraint(use))
        stream = llm.stream(ids, params, show_special=tool_format.marker_ids)
        parser = tool_format.parser(use)
        deltas = [delta for piece in stream for delta in parser.push(piece)] + parser.finish()
    text, calls = collect(deltas)
    assert (text, stream.completion.finish_reason, [call.name for call in calls]) == ("", "stop", ["weather"])
    jsonschema.validate(json.loads(calls[0].arguments), WEATHER)
