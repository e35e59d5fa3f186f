"""Conversations of Qwen3.5 and later: prompts are those of `transformers`, and answers are read back however they come.

The template is that of Qwen3.5-4B among llama.cpp's; Qwen3.6's has a switch more, which keeps the reasoning of earlier
turns.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from quengine.models.template.chat_template import ChatTemplate
from quengine.models.tokenizer import Tokenizer
from quengine.request.chat_format import ChatFormat
from quengine.structured.tool_calls import ToolUse, collect, reasoning_of
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary
from tests.llama_cpp_source import llama_cpp_source

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
)
LATE = "{%- if loop.index0 > ns.last_query_index %}"
KEPT = "{%- if (preserve_thinking is defined and preserve_thinking is true) or (loop.index0 > ns.last_query_index) %}"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "at": {"type": "object"},
                    "hours": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}},
    },
]
GIVEN = {"city": "São Paulo\n<b>", "days": 3, "exact": True, "at": {"x": [1, None]}, "hours": [1.5, 2]}
ASKED = {"role": "user", "content": "How is the weather?"}
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = "The user asks.\n\n1 < 2, so I call."


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: str, *calls: dict[str, Any], reasoning: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": list(calls)} if calls else {})


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": content}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [ASKED],
    "instructions": [SYSTEM, ASKED],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "is it?"}]}],
    "a second turn": [SYSTEM, ASKED, said("Sunny.", reasoning=THOUGHT), ASKED],
    "reasoning in the text": [ASKED, said(f"<think>\n{THOUGHT}\n</think>\n\nSunny."), ASKED],
    "a call": [ASKED, said("", call("weather", **GIVEN), reasoning=THOUGHT), result("blue")],
    "calls behind a text": [
        ASKED,
        said("I look.", call("weather", city="Lyon"), call("now"), reasoning=THOUGHT),
        result("blue"),
        result("noon"),
    ],
    "two rounds": [
        SYSTEM,
        ASKED,
        said("", call("now"), reasoning="First."),
        result("noon"),
        said("", call("weather", city="Lyon"), reasoning="Second."),
        result("blue"),
        said("Blue at noon.", reasoning="Done."),
        ASKED,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    values = bpe_vocabulary(special=CONTROL) | {"general.architecture": "llama"}
    return Tokenizer.from_gguf(GGUFBuilder().kvs(values).write(tmp_path_factory.mktemp("chats") / "v.gguf"))


def source(keeps: bool) -> str:
    text = (llama_cpp_source() / "models/templates/Qwen3.5-4B.jinja").read_text(encoding="utf-8")
    assert text.count(LATE) == 1
    return text.replace(LATE, KEPT) if keeps else text


@pytest.fixture(scope="module", params=[False, True], ids=["3.5", "keeps"])
def chat(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer, ChatTemplate(source(request.param), "", "<|im_end|>"), "none")


def transformers_text(chat: ChatFormat, messages: list[dict[str, Any]], tools: Any, **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=chat.source,
        add_generation_prompt=True,
        **variables,
    )
    return str(text)


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a client sends it: with arguments as text."""
    sent = json.loads(json.dumps(messages))
    for function in (each["function"] for message in sent for each in message.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"])
    return list(sent)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("thinking", [None, True, False])
def test_prompts_are_those_of_transformers(
    chat: ChatFormat, tokenizer: Tokenizer, name: str, thinking: bool | None
) -> None:
    """With and without tools; `preserve_thinking` where the template has it."""
    for tools in (None, TOOLS):
        for keeps in (None, True, False) if "preserve_thinking" in (chat.source or "") else (None,):
            given = {"enable_thinking": thinking, "preserve_thinking": keeps}
            variables = {key: value for key, value in given.items() if value is not None}
            theirs = transformers_text(chat, CONVERSATIONS[name], tools, **variables)
            messages = chat.answers.messages(as_sent(CONVERSATIONS[name]), tools)
            ids = chat.encode(messages, tools, variables)
            assert tokenizer.decode(ids, skip_special=False) == theirs
            assert ids == tokenizer.encode(theirs, special=True)


def read(chat: ChatFormat, prompt: str, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls of an answer that comes in these pieces."""
    parser = chat.answers.parser(ToolUse.from_openai(TOOLS), prompt)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    text, calls = collect(deltas)
    return reasoning_of(deltas), text, [(each.name, json.loads(each.arguments)) for each in calls]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("content", ["", "I look."])
def test_answers_are_read_back_however_they_are_cut(chat: ChatFormat, thinking: bool, content: str) -> None:
    """What the template writes of an answer with reasoning and calls, from each place of it on."""
    reasoning = THOUGHT if thinking else ""
    answer = said(content, call("weather", **GIVEN), call("now"), reasoning=reasoning)
    prompt = transformers_text(chat, [ASKED], TOOLS, enable_thinking=thinking)
    whole = transformers_text(chat, [ASKED, answer, result("blue")], TOOLS, enable_thinking=thinking)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].partition("<|im_end|>")[0]
    expected = reasoning, content, [("weather", GIVEN), ("now", {})]
    assert read(chat, prompt, [text]) == expected == read(chat, prompt, list(text))
    for cut in range(1, len(text)):
        assert read(chat, prompt, [text[:cut], text[cut:]]) == expected
    for size in range(2, 24):
        edges = [*range(0, len(text), size), len(text)]
        assert read(chat, prompt, [text[a:b] for a, b in pairwise(edges)]) == expected


def test_what_was_read_is_written_again_as_it_was(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    """So that the next turn's prompt begins with the tokens of this one and its answer."""
    answer = said("I look.", call("weather", **GIVEN), reasoning=THOUGHT)
    prompt = transformers_text(chat, [ASKED], TOOLS)
    text = transformers_text(chat, [ASKED, answer, result("blue")], TOOLS)[len(prompt) :].partition(
        "<|im_end|>"
    )[0]
    reasoning, content, ((name, arguments),) = read(chat, prompt, [text])
    back = said(content, call(name, **arguments), reasoning=reasoning)
    ids = chat.encode(chat.answers.messages(as_sent([ASKED, back, result("blue")]), TOOLS), TOOLS, {})
    before = chat.encode([ASKED], TOOLS, {})
    assert ids[: len(before)] == before
    assert tokenizer.decode(ids, skip_special=False).startswith(prompt + text + "<|im_end|>")
