"""Forms of calls found by rendering: the calls of every chat template that llama.cpp comes with are read back, and the
grammar of a required call accepts them."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine import LLM, SamplingParams
from quengine.errors import EngineError
from quengine.models.template.chat_template import ChatTemplate
from quengine.models.tokenizer import Tokenizer
from quengine.request.chat_format import answer_format
from quengine.request.text_stream import TextStream
from quengine.structured.answer_format import AnswerFormat, TextFormat
from quengine.structured.calls.format import CallFormat
from quengine.structured.calls.named import template_form
from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.tool_calls import Delta, ToolUse, collect, reasoning_of
from tests.engine.structured.family_templates import FAMILIES
from tests.gguf_builder import GGUFBuilder, ModelSizes, bpe_vocabulary
from tests.llama_cpp_source import llama_cpp_source
from tests.tiny_models import CHATML, write_tiny

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where"},
        "days": {"type": "integer", "description": "How many"},
        "exact": {"type": "boolean", "description": "Whether"},
        "more": {"type": "object", "description": "What else", "additionalProperties": True},
    },
    "required": ["city"],
}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
NOTE = {
    "name": "note",
    "description": "Keep a text.",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "What"}},
        "required": ["text"],
    },
}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, NOTE)]
FIRST = (
    "get_weather",
    {"city": "São Paulo, 7", "days": 3, "exact": True, "more": {"a": [1, "b"], "c": None}},
)
SECOND = ("note", {"text": '12 < 13\n- <b> and "c"'})
QUESTION = "How is the weather?"
MARKS = re.compile(r"<[|｜][^|｜<>]+[|｜]>|\[[A-Z_]+\]|<\|[a-z_]+>|<[a-z_]+\|>|\]<\]minimax\[>\[")

SPECIAL = {
    "openai-gpt-oss-120b": "harmony: test_harmony",
    "fireworks-ai-llama-3-firefunction-v2": "the template takes no tools, but a text `functions`",
}
"""Templates that are not asked here, or whose form is not supported."""
NAMED = {
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
}
ONE_CALL = {*NAMED, "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B"}
"""Templates that write one call an answer."""


@cache
def templates() -> dict[str, str]:
    """The source of each."""
    found = sorted((llama_cpp_source() / "models" / "templates").glob("*.jinja"))
    return {path.stem: path.read_text() for path in found if path.stem not in SPECIAL} | FAMILIES


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, and the marks of all templates as control tokens."""
    marks = sorted({mark for source in templates().values() for mark in MARKS.findall(source)})
    values = bpe_vocabulary(special=("<|endoftext|>", *marks)) | {"general.architecture": "llama"}
    path = tmp_path_factory.mktemp("forms") / "vocab.gguf"
    return Tokenizer.from_gguf(GGUFBuilder().kvs(values).write(path))


@dataclass
class Case:
    """A template and what it writes of calls."""

    name: str
    template: ChatTemplate
    calls: CallFormat

    @cached_property
    def asked(self) -> list[tuple[str, dict[str, Any]]]:
        if self.name == "MiniMax-M3":  # which leaves nulls out
            return [(FIRST[0], {**FIRST[1], "more": {"a": [1, "b"]}}), SECOND]
        return [FIRST] if self.name in ONE_CALL else [FIRST, SECOND]

    @cached_property
    def plain(self) -> list[tuple[str, dict[str, Any]]]:
        """The calls without values that some templates write as Python's literals, or with other escapes."""
        return [
            (
                name,
                {k: "Lyon" if k == "city" else v for k, v in given.items() if k in ("city", "days", "text")},
            )
            for name, given in self.asked
        ]

    def answer(self, asked: list[tuple[str, dict[str, Any]]] | None = None) -> str:
        """The answer with calls, as the template writes it in a conversation: behind the prompt of the answer."""
        user = {"role": "user", "content": QUESTION}
        calls = [
            {
                "id": f"abcdefgh{n}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for n, (name, given) in enumerate(asked or self.asked)
        ]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        prompt = self.rendered([user], True).rpartition(QUESTION)[2]
        text = self.rendered([user, said], False).rpartition(QUESTION)[2]
        if text.startswith(prompt):
            return text[len(prompt) :]
        # Command R+ has its instructions behind the conversation.
        return text.rpartition("</think>")[2].partition("\n<|START_OF_TURN_TOKEN|><|SYSTEM")[0]

    def rendered(self, messages: list[dict[str, Any]], prompt: bool) -> str:
        return self.template.render(self.calls.messages(messages, TOOLS), prompt, TOOLS)

    def read(
        self, pieces: Iterator[str] | list[str], choice: str = "auto"
    ) -> tuple[str, list[tuple[str, Any]]]:
        parser = self.calls.parser(ToolUse.from_openai(TOOLS, choice))
        deltas: list[Delta] = [delta for piece in pieces for delta in parser.push(piece)]
        text, calls = collect(deltas + parser.finish())
        return text, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.fixture(scope="module", params=templates())
def case(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[Case]:
    source = templates()[request.param]
    template = ChatTemplate(source, "<s>", "</s>")
    yield Case(request.param, template, CallFormat(template_form(source, template.render), tokenizer))
    template._process.close()


def test_calls_are_read_back_however_they_are_cut(case: Case) -> None:
    answer = case.answer()
    text, calls = case.read([answer])
    assert calls == case.asked
    form = case.calls.form
    rest = re.sub(r"\s", "", text)
    marks = (form.open, form.close, form.head.partition("{")[0])
    assert not any(mark.strip() and re.sub(r"\s", "", mark) in rest for mark in marks)
    for size in range(1, 25):
        assert case.read([answer[n : n + size] for n in range(0, len(answer), size)]) == (text, calls)


def test_text_in_front_of_calls_stays_text(case: Case) -> None:
    if case.name in NAMED or case.name == "glm4":
        pytest.skip("a bare call is the whole answer")
    form = case.calls.form
    said = f"{form.text_mark}Let me see: 1 < 2 [3]."
    lead = form.separator if form.text_mark else ""
    text, calls = case.read(list(said + lead + case.answer()))
    assert calls == case.asked and text.startswith("Let me see: 1 < 2 [3].")


def test_the_grammar_of_a_required_call_accepts_what_the_template_writes(
    case: Case, tokenizer: Tokenizer
) -> None:
    use = ToolUse.from_openai(TOOLS, "required")
    spec = case.calls.constraint(use)
    assert spec is not None
    form, answer = case.calls.form, case.answer(case.plain)
    parts = [re.split("[\ue100-\ue102]", text)[0] for text in (form.open, form.head)]
    start = next((part for part in parts if part.strip()), "")
    answer = answer[answer.find(start.strip()) :]
    end = re.split("[\ue100-\ue102]", (form.tail + form.close).strip())[-1] or "}"
    answer = answer[: answer.rfind(end[-8:]) + len(end[-8:])]
    constraint = ConstraintCompiler(tokenizer, tokenizer.vocab_size).compile(spec)
    for n, token in enumerate(ids := tokenizer.encode(answer, special=True)):
        assert constraint.allowed()[token], (tokenizer.decode(ids[:n], skip_special=False), answer)
        constraint.advance(token)
    assert constraint.finished or constraint.allowed()[list(tokenizer.eos_ids)].any()


PLAIN = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>' }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN


@pytest.mark.parametrize("source", [PLAIN, NO_SYSTEM])
def test_a_template_without_tools_gets_them_in_a_message(source: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(source, "<s>", "</s>")
    form = answer_format(source, tokenizer, calls=template.render)
    assert form.calls_tools
    call = {"id": "call_1", "type": "function", "function": {"name": "note", "arguments": '{"text": "a"}'}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "kept"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "kept too"}]},
    ]
    prompt = template.render(form.messages(messages, TOOLS), False, TOOLS)
    assert json.dumps(WEATHER, ensure_ascii=False) in prompt and prompt.index("get_weather") < prompt.index(
        "<assistant>"
    )
    assert prompt.startswith("<user>" if source == NO_SYSTEM else "<system>")
    written = '<tool_call>\n{"name": "note", "arguments": {"text": "a"}}\n</tool_call>'
    results = "<tool_response>\nkept\n</tool_response>\n\n<tool_response>\nkept too\n</tool_response>"
    assert prompt.endswith(f"<assistant>{written}\n{written}</s><user>{results}</s>")
    assert form.messages(messages[:1]) == messages[:1]
    parser = form.parser(ToolUse.from_openai(TOOLS))
    text, calls = collect(parser.push(f"Well. {written}") + parser.finish())
    assert text == "Well." and [(each.name, each.arguments) for each in calls] == [("note", '{"text": "a"}')]


def test_a_model_whose_template_shows_no_tools_calls_one(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path / "m.gguf", sizes=ModelSizes(context=2048), changes={"tokenizer.chat_template": CHATML}
    )
    with LLM(path, device="cpu") as llm:
        use = ToolUse.from_openai(TOOLS, {"type": "function", "function": {"name": "get_weather"}})
        ids = llm.encode_chat([{"role": "user", "content": QUESTION}], llm.answer_format.tools(use))
        assert "Keep a text." in llm.tokenizer.decode(ids, skip_special=False)
        params = SamplingParams(temperature=0, max_tokens=60)
        text, calls = collect(list(llm.stream_answer(ids, params, use).deltas()))
    assert text == "" and [call.name for call in calls] == ["get_weather"]


GARBAGE = (
    "<tool_call>", "</tool_call>", "<function=", "note", ">", "\n", "<parameter=", "</parameter>", "</function>",
    "text", "{", "}", '"name": ', '"note"', ", ", '"arguments": ', "[", "]", "(", ")", "=", "'", "<|tool_call_start|>[",
    "]<|tool_call_end|>", "<|tool_call>call:", "<tool_call|>", '<|"|>', ":", "[TOOL_CALLS]", "[ARGS]", ">>>", "all\n",
    "note\n", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_calls>", "</tool_calls>", "\\", '"', "a",
    "]<]minimax[>[", '<invoke name="note">', "<text>", "</text>", "<item>", "</invoke>", "<|open|>", "<|close|>",
    'call tool="note" index="1"', 'argument key="text" type="string"', "<|sep|>", "response", "call", "argument",
)  # fmt: skip
CUT = (
    "Qwen3-Coder",
    "LFM2.5-8B-A1B",
    "google-gemma-4-31B-it",
    "meetkai-functionary-medium-v3.2",
    "GLM-4.6",
    "MiniMax-M1",
    "deepseek-ai-DeepSeek-V3.2",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Kimi-K3",
    "MiniMax-M3",
)


@pytest.fixture(scope="module")
def calls_of(tokenizer: Tokenizer) -> dict[str, AnswerFormat]:
    sources = {name: templates()[name] for name in CUT}
    return {
        name: TextFormat(CallFormat(template_form(text, ChatTemplate(text).render), tokenizer))
        for name, text in sources.items()
    }


@settings(max_examples=600, deadline=None, derandomize=True)
@given(name=st.sampled_from(CUT), parts=st.lists(st.sampled_from(GARBAGE), max_size=16))
def test_garbage_gives_the_same_in_one_piece_and_in_characters(
    name: str, parts: list[str], calls_of: dict[str, AnswerFormat]
) -> None:
    text, use = "".join(parts), ToolUse.from_openai(TOOLS)
    outcomes = []
    for pieces in ([text], list(text)):
        parser = calls_of[name].parser(use)
        deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
        said, calls = collect(deltas)
        outcomes.append((said, [(call.name, call.arguments) for call in calls]))
    assert outcomes[0] == outcomes[1]
    said, calls = outcomes[0]
    assert calls or said == text or ">>>" in text or "all\n" in text


BOUNDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"enum": [1, 2]},
        "unit": {"enum": ["C", "F"]},
        "at": {"type": "object", "properties": {"x": {"enum": [1]}}, "additionalProperties": False},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", CUT)
def test_a_required_call_is_valid_whatever_the_model_chooses(
    name: str, tokenizer: Tokenizer, calls_of: dict[str, AnswerFormat]
) -> None:
    parameters: dict[str, Any] = {**BOUNDED, "properties": {**BOUNDED["properties"]}}
    if "gemma" in name:  # objects within are free there
        del parameters["properties"]["at"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    use, form = ToolUse.from_openai(tools, "required"), calls_of[name]
    spec = form.constraint(use, None)
    assert spec is not None
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    for seed in range(4):
        constraint, rng, parser = compiler.compile(spec), random.Random(seed), form.parser(use)
        deltas: list[Delta] = []
        stream = TextStream(tokenizer.token_bytes)
        for _ in range(3000):
            if constraint.finished:
                break
            allowed = np.flatnonzero(constraint.allowed()).tolist()
            ends = [token for token in allowed if token in tokenizer.eos_ids]
            token = ends[0] if ends else rng.choice(allowed)
            if token in tokenizer.eos_ids:
                break
            assert not tokenizer.is_control(token) or token in form.shown(use)
            deltas += parser.push(stream.push(token))
            constraint.advance(token)
        else:
            pytest.fail("the walk does not end")
        text, calls = collect(deltas + parser.finish())
        assert text == "" and calls
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), parameters)


def test_nested_elements_become_objects_and_arrays(calls_of: dict[str, AnswerFormat]) -> None:
    n = "]<]minimax[>["
    more = f"{n}<more>{n}<a>{n}<item>1{n}</item>{n}<item>b{n}</item>{n}</a>{n}<e>{n}</e>{n}</more>"
    text = f'{n}<tool_call>\n{n}<invoke name="get_weather">{n}<city>1{n}</city>{more}{n}</invoke>\n{n}</tool_call>'
    expected = '{"city": "1", "more": {"a": [1, "b"], "e": ""}}'
    assert xml_calls(text, calls_of["MiniMax-M3"]) == [("get_weather", expected)]
    for at in range(text.index("<city>"), text.index(f"{n}</invoke>")):
        ((_, arguments),) = xml_calls(text[:at], calls_of["MiniMax-M3"])
        assert expected.startswith(arguments)


def test_elements_nested_without_end_are_no_values(calls_of: dict[str, AnswerFormat]) -> None:
    n = "]<]minimax[>["
    text = f'{n}<tool_call>\n{n}<invoke name="note">' + f"{n}<a>" * 5000
    assert xml_calls(text, calls_of["MiniMax-M3"]) == [("note", '{"a": ')]
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        schema = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(EngineError, match="nested too deeply"):
        calls_of["MiniMax-M3"].constraint(ToolUse.from_openai(tools, "required"), None)


def test_the_sections_of_kimi_k3_are_no_text(tokenizer: Tokenizer) -> None:
    source = templates()["Kimi-K3"]
    template = ChatTemplate(source, "<s>", "</s>")

    def rendered(messages: Any, prompt: bool, variables: Any) -> str:
        return template.render(messages, prompt, None, variables)

    form = answer_format(source, tokenizer, rendered, template.render)
    user = {"role": "user", "content": QUESTION}
    said = {"role": "assistant", "content": "Rain.", "reasoning_content": "Look up."}
    for variables in ({}, {"thinking": False}):
        prompt = template.render([user], True, None, variables)
        answer = template.render([user, said], False, None, variables).removeprefix(prompt)
        parser = form.parser(ToolUse(), prompt)
        deltas = [delta for char in answer.partition("<|end_of_msg|>")[0] for delta in parser.push(char)]
        deltas += parser.finish()
        assert (reasoning_of(deltas), collect(deltas)) == ("" if variables else "Look up.", ("Rain.", []))
    assert {tokenizer.token_text(token) for token in form.shown(ToolUse())} == {
        "<|open|>",
        "<|close|>",
        "<|sep|>",
    }


XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n"


def xml_calls(text: str, form: AnswerFormat) -> list[tuple[str, str]]:
    parser = form.parser(ToolUse.from_openai(TOOLS))
    return [(call.name, call.arguments) for call in collect(parser.push(text) + parser.finish())[1]]


def test_parameters_become_json_by_the_schema(calls_of: dict[str, AnswerFormat]) -> None:
    end = "\n</parameter>\n</function>\n</tool_call>"
    for value, read in (("3", "3"), ("null", "null"), ("three", '"three"'), ("[1, True]", "[1, true]")):
        assert xml_calls(XML + value + end, calls_of["Qwen3-Coder"]) == [
            ("get_weather", f'{{"city": "12", "days": {read}}}')
        ]


def test_a_call_with_parameters_that_is_cut_off_keeps_what_it_had(calls_of: dict[str, AnswerFormat]) -> None:
    for at in range(len("<tool_call>\n<function=get_weather>"), len(XML)):
        ((name, arguments),) = xml_calls(XML[:at], calls_of["Qwen3-Coder"])
        assert name == "get_weather" and '{"city": "12", "days": '.startswith(arguments)
