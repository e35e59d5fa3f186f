"""Harmony, gpt-oss's form of answers: read from a stream, however it is cut, and constraints that are read back."""

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine import LLM, SamplingParams
from quengine.models.template.chat_template import ChatTemplate
from quengine.models.tokenizer import Tokenizer
from quengine.request.chat_format import answer_format
from quengine.request.text_stream import TextStream
from quengine.structured.answer_format import TextFormat
from quengine.structured.answer_parser import TextParser
from quengine.structured.calls.json_calls import ToolCallParser
from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.harmony import HarmonyFormat
from quengine.structured.tool_calls import (
    CallDelta,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolUse,
    collect,
    reasoning_of,
)
from tests.gguf_builder import GGUFBuilder, ModelSizes
from tests.llama_cpp_source import llama_cpp_source
from tests.tiny_models import HARMONY_MARKS, harmony_vocabulary, write_tiny

CONTROLS = (*HARMONY_MARKS, "<|endoftext|>")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "stop.it")
]
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
AGAIN = "<|start|>assistant"
PARIS = '{"city": "Paris"}'
TO = "to=functions.weather"

# text, what is thought, said and called
Outcome = tuple[str, str, list[tuple[str, str]]]
CASES: dict[str, Outcome] = {
    "": ("", "", []),
    " \n ": ("", " \n ", []),
    "just text": ("", "just text", []),
    "to be": ("", "to be", []),
    "<|channel|>final<|message|>Hello": ("", "Hello", []),
    "<|message|>Hello": ("", "Hello", []),
    "<|channel|>other<|message|>Hello": ("", "Hello", []),
    f"{THOUGHT}{AGAIN}<|channel|>final<|message|>Hello": ("Hm.", "Hello", []),
    f"{THOUGHT}\n{AGAIN}<|channel|>final <|constrain|>json<|message|>{PARIS}<|return|>": ("Hm.", PARIS, []),
    # calls: the recipient in the one place or the other, with or without a type
    f"{THOUGHT}{AGAIN}<|channel|>commentary {TO} <|constrain|>json<|message|>{PARIS}<|call|>": (
        *("Hm.", ""),
        [("weather", PARIS)],
    ),
    f" {TO}<|channel|>commentary json<|message|>{PARIS}": ("", "", [("weather", PARIS)]),
    f"{THOUGHT}{AGAIN} {TO}<|channel|>commentary <|constrain|>json<|message|>{PARIS}": (
        *("Hm.", ""),
        [("weather", PARIS)],
    ),
    f"<|channel|>commentary {TO}<|constrain|> text/plain <|message|>{PARIS}": ("", "", [("weather", PARIS)]),
    f"<|channel|>analysis {TO} code<|message|>{PARIS}<|call|>": ("", "", [("weather", PARIS)]),
    f"<|channel|>commentary {TO}<|message|>": ("", "", [("weather", "{}")]),
    "<|channel|>commentary to=weather<|message|>{}": ("", "", [("weather", "{}")]),
    "<|channel|>commentary to=functions.new<|message|>{}": ("", "", [("new", "{}")]),
    f"<|channel|>commentary<|message|>Let me see.<|end|>{AGAIN}<|channel|>commentary {TO}<|message|>{PARIS}": (
        *("", "Let me see."),
        [("weather", PARIS)],
    ),
    # what goes to another is for nobody here
    "<|channel|>commentary to=python code<|message|>1 + 1<|call|>": ("1 + 1", "", []),
    "<|channel|>commentary to=functions.a/b<|message|>{}": ("{}", "", []),
    "<|channel|>final to=user<|message|>Hello": ("", "Hello", []),
    # messages of one kind, and ends that are missing
    f"{THOUGHT}{AGAIN}{THOUGHT}{AGAIN}<|channel|>final<|message|>a<|end|>{AGAIN}<|message|>b": (
        *("Hm.\n\nHm.", "a\n\nb"),
        [],
    ),
    "<|channel|>analysis<|message|>a<|channel|>final<|message|>b": ("a", "b", []),
    f"<|channel|>analysis<|message|>a{AGAIN}<|channel|>final<|message|>b": ("a", "b", []),
    f"{AGAIN}<|channel|>final<|message|>b": ("", "b", []),
    # not of the form
    "<|channel|>final<|message|>the <|channel|> and <|end|> tokens <|st": (
        *("", "the <|channel|> and <|end|> tokens <|st"),
        [],
    ),
    "<|channel|>analysis<|message|>a <|end|> b": ("a <|end|> b", "", []),
    "<|channel|>final and more<|end|>": ("", "<|channel|>final and more", []),
    "Hello<|end|><|start|>": ("", "Hello", []),
    f"Hello {AGAIN}<|channel|>analysis<|message|>a": ("a", "Hello ", []),
    # cut off
    "<|chan": ("", "", []),
    "<|channel|>ana": ("", "", []),
    " to=functions.we": ("", "", []),
    "<|channel|>analysis<|message|>Hm": ("Hm", "", []),
    f"{THOUGHT}{AGAIN}<|channel|>comm": ("Hm.", "", []),
    f"{THOUGHT}{AGAIN}<|channel|>commentary {TO} <|constrain|>js": ("Hm.", "", []),
    f'<|channel|>commentary {TO}<|message|>{{"city": "P': ("", "", [("weather", '{"city": "P')]),
}


def parsed(pieces: list[str], use: ToolUse | None = None) -> list[Delta]:
    parser = HarmonyFormat().parser(use or ToolUse.from_openai(TOOLS))
    return [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()


def outcome(deltas: list[Delta]) -> Outcome:
    text, calls = collect(deltas)
    return reasoning_of(deltas), text, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("text", CASES)
def test_reasoning_text_and_calls_are_told_apart(text: str) -> None:
    assert outcome(parsed([text])) == CASES[text]
    assert outcome(parsed(list(text))) == CASES[text]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.sampled_from(list(CASES)), data=st.data())
def test_any_split_of_a_stream_gives_the_same(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert outcome(parsed(pieces)) == CASES[text]


FRAGMENTS = (
    *CONTROLS, "analysis", "final", "commentary", "assistant", " to=functions.weather", "to=python", " ", "\n", "json",
    "{}", "a", "<|", "|>", "<", "t", "to", "=",
)  # fmt: skip


@settings(max_examples=500, deadline=None, derandomize=True)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=16), asked=st.booleans())
def test_garbage_gives_the_same_in_one_piece_and_in_characters(parts: list[str], asked: bool) -> None:
    text = "".join(parts)
    use = ToolUse.from_openai(TOOLS) if asked else ToolUse()
    whole = outcome(parsed([text], use))
    assert outcome(parsed(list(text), use)) == whole
    assert asked or not whole[2]
    if "<|message|>" not in text and "<|" not in text[-80:] and "to=" not in text:
        assert whole == ("", text, []), "text without a header comes back as it was"


def test_parts_go_out_as_they_come() -> None:
    parser = HarmonyFormat().parser(ToolUse.from_openai(TOOLS))
    pieces = ["<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>", "assistant"]
    pieces += [
        "<|channel|>",
        "commentary to=functions",
        ".weather ",
        "<|constrain|>",
        "json",
        "<|message|>",
        "{",
        "}",
    ]
    steps = [parser.push(piece) for piece in pieces]
    (begun,) = steps[13]
    assert isinstance(begun, CallDelta) and re.fullmatch("call_[a-zA-Z0-9]{24}", begun.id or "")
    assert (begun.name, begun.arguments) == ("weather", "")
    steps[13] = []
    given = {
        3: [ReasoningDelta("Hm")],
        4: [ReasoningDelta(".")],
        14: [CallDelta(0, "{")],
        15: [CallDelta(0, "}")],
    }
    assert steps == [given.get(n, []) for n in range(len(pieces))]
    assert parser.finish() == [] and parser.calls == 1


def test_text_is_not_held_longer_than_it_may_become_a_header() -> None:
    parser = HarmonyFormat().parser(ToolUse())
    assert [parser.push(piece) for piece in ("t", "oo ", "<|", "a", "<|end|>", " b")] == [
        *([], [TextDelta("too ")], [], [TextDelta("<|a")], [], [TextDelta("<|end|> b")]),
    ]


def test_without_tools_a_call_is_no_text() -> None:
    text = f"<|channel|>commentary {TO}<|message|>{PARIS}"
    assert outcome(parsed([text], ToolUse())) == (PARIS, "", [])
    required = ToolUse.from_openai(TOOLS, "required")
    assert outcome(parsed([f"{THOUGHT}{AGAIN}<|channel|>final<|message|>no"], required)) == ("Hm.", "", [])


# --- the format of a model


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    return harmony_vocabulary()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, vocabulary: dict[str, Any]) -> Tokenizer:
    path = tmp_path_factory.mktemp("harmony") / "vocab.gguf"
    return Tokenizer.from_gguf(
        GGUFBuilder().kvs({"general.architecture": "gpt-oss", **vocabulary}).write(path)
    )


@pytest.fixture(scope="module")
def harmony(vocabulary: dict[str, Any], tokenizer: Tokenizer) -> HarmonyFormat:
    found = answer_format(vocabulary["tokenizer.chat_template"], tokenizer)
    assert isinstance(found, HarmonyFormat)
    return found


def test_the_form_is_chosen_by_the_template(harmony: HarmonyFormat, tokenizer: Tokenizer) -> None:
    assert {tokenizer.token_text(i) for i in harmony.shown(ToolUse())} == set(CONTROLS[:7])
    assert answer_format(None, tokenizer) == TextFormat()
    others = {p.name: p.read_text() for p in (llama_cpp_source() / "models" / "templates").glob("*.jinja")}
    found = {
        name for name, source in others.items() if isinstance(answer_format(source, tokenizer), HarmonyFormat)
    }
    assert found == {"openai-gpt-oss-120b.jinja"}
    use = ToolUse.from_openai(TOOLS)
    hermes = answer_format("<tool_call>", tokenizer, calls=ChatTemplate("<tool_call>").render)
    assert isinstance(hermes.parser(use), ToolCallParser) and isinstance(hermes.parser(ToolUse()), TextParser)


def walk(tokenizer: Tokenizer, spec: ConstraintSpec, seed: int, shown: frozenset[int]) -> list[str]:
    """The pieces of a random answer under a constraint, which closes what it opens rather soon."""
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    constraint, rng, pieces = compiler.compile(spec), random.Random(seed), []
    stream = TextStream(
        lambda t: b"" if tokenizer.is_control(t) and t not in shown else tokenizer.token_bytes(t)
    )
    likely = [*tokenizer.encode('"}'), *(tokenizer.control_id(t) or 0 for t in CONTROLS)]
    for _ in range(600):
        if constraint.finished:
            break
        allowed = [int(token) for token in np.flatnonzero(constraint.allowed())]
        token = rng.choice([t for t in likely if t in allowed and rng.random() < 0.4] or allowed)
        if token in tokenizer.eos_ids:
            break
        assert not tokenizer.is_control(token) or token in shown
        constraint.advance(token)
        pieces.append(stream.push(token))
    return [*pieces, stream.finish()]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "stop.it"}}], ids=str
)
def test_a_required_call_is_valid_whatever_the_model_chooses(
    choice: Any, harmony: HarmonyFormat, tokenizer: Tokenizer
) -> None:
    use = ToolUse.from_openai(TOOLS, choice)
    spec = harmony.constraint(use, None)
    assert spec is not None
    thought = 0
    for seed in range(12):
        pieces = walk(tokenizer, spec, seed, harmony.shown(use))
        reasoning, text, calls = outcome(parsed(pieces, use))
        ((name, arguments),) = calls
        jsonschema.validate(json.loads(arguments), SCHEMA)
        assert text == "" and name in {tool.name for tool in use.callable}
        thought += "analysis" in "".join(pieces)
        assert not reasoning or thought
    assert 0 < thought < 12, "the model may think before it, and need not"


SPECS = {
    "schema": ConstraintSpec.json_schema(SCHEMA),
    "regex": ConstraintSpec.regex("[}]{2}x/\\{"),
    "gbnf": ConstraintSpec.grammar('root ::= "}" [{] "\\""'),
    "lark": ConstraintSpec.grammar('%llguidance {}\nstart: A "}" thought\nA: /\\}/\nthought: "last" // }\n'),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_constraint_holds_the_text_and_not_the_reasoning(
    name: str, harmony: HarmonyFormat, tokenizer: Tokenizer
) -> None:
    spec = harmony.constraint(ToolUse(), SPECS[name])
    assert spec is not None and spec.kind == SPECS[name].kind
    found = [outcome(parsed(walk(tokenizer, spec, seed, harmony.shown(ToolUse())))) for seed in range(12)]
    for _, text, calls in found:
        assert not calls
        if name == "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert text == {"regex": "}}x/{", "gbnf": '}{"', "lark": "}}last"}[name]
    assert any(reasoning for reasoning, _, _ in found)


def test_nothing_is_constrained_where_nothing_is_asked(harmony: HarmonyFormat) -> None:
    for use in (ToolUse(), ToolUse.from_openai(TOOLS), ToolUse.from_openai(TOOLS, "none")):
        assert harmony.constraint(use, None) is None


def test_reasoning_tokens_are_counted_without_marks(harmony: HarmonyFormat, tokenizer: Tokenizer) -> None:
    text = f"{THOUGHT}{AGAIN}<|channel|>commentary to=python<|message|>ab<|end|>{AGAIN}<|channel|>final<|message|>Hello"
    ids = tokenizer.encode(text, special=True)
    thought = len(tokenizer.encode("Hm.")) + len(tokenizer.encode("ab"))

    def decode(ids: Any) -> str:
        return tokenizer.decode(ids, skip_special=False)

    assert harmony.reasoning_tokens(ToolUse(), ids, decode) == thought
    assert harmony.reasoning_tokens(ToolUse(), ids[:5], decode) < thought
    assert TextFormat().reasoning_tokens(ToolUse(), ids, decode) == 0


# --- a model that writes so


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, vocabulary: dict[str, Any]) -> Any:
    """A tiny random model with gpt-oss's template and control tokens."""
    path = tmp_path_factory.mktemp("harmony") / "tiny.gguf"
    sizes = ModelSizes(embedding=64, feed_forward=128, context=2048)
    with LLM(
        write_tiny(path, kind="Q8_0", sizes=sizes, vocabulary=vocabulary), device="cpu", threads=1
    ) as loaded:
        yield loaded


def test_a_model_answers_a_conversation_with_reasoning_and_text(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    end = llm.tokenizer.control_id("<|end|>") or 0
    params = SamplingParams(
        temperature=1,
        max_tokens=200,
        seed=1,
        constraint=ConstraintSpec.regex("(?:yes|no), that is (?:so|it)"),
        logit_bias={llm.tokenizer.encode("a")[0]: 30.0, end: 30.0},
    )
    stream = llm.stream_chat(messages, params)
    deltas = list(stream.deltas())
    reasoning, text, _ = outcome(deltas)
    assert re.fullmatch("(yes|no), that is (so|it)", text), text
    assert reasoning
    assert stream.completion.text == text and stream.completion.reasoning == reasoning
    answer = llm.chat(messages, params)
    assert (answer.text, answer.reasoning) == (text, reasoning)
    assert "".join(llm.stream_chat(messages, params)) == text
    use = ToolUse.from_openai(TOOLS, "required")
    ids = llm.encode_chat(messages, llm.answer_format.tools(use), {"reasoning_effort": "low"})
    assert "Reasoning: low" in llm.tokenizer.decode(ids)
    called = SamplingParams(temperature=0.8, max_tokens=300, seed=2, logit_bias={end: 60.0})
    ((name, arguments),) = outcome(list(llm.stream_answer(ids, called, use).deltas()))[2]
    jsonschema.validate(json.loads(arguments), SCHEMA)
    assert name in ("weather", "stop.it")
