"""Conversations with tool calls through real models' templates, against what transformers renders.

OpenAI's clients send such messages with `content` null or left out. Where transformers renders that, so does this, to
the letter; where its rendering fails, the message counts as one with null content, then as one with an empty text.
"""

from pathlib import Path
from typing import Any

import pytest

from quengine.models.gguf import open_gguf
from quengine.models.template.chat_template import ChatTemplate, ChatTemplateError, encode_chat
from quengine.models.tokenizer import Tokenizer
from quengine.request.chat_format import ChatFormat
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary
from tests.llama_cpp_source import llama_cpp_source
from tests.tiny_models import CHATML

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city"}},
    "required": ["city"],
}
WEATHER = {"name": "weather", "description": "The weather of a city", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
MISSING = object()
# Templates read a call's arguments as a value or as the JSON text of it.
ARGUMENTS = ({"city": "Paris"}, '{"city": "Paris"}')


def conversation(content: object, arguments: object, answered: bool = True) -> list[dict[str, Any]]:
    """A question, the call with `content`, and its result; with `answered`, the next question too."""
    function = {"name": "weather", "arguments": arguments}
    call = {
        "role": "assistant",
        "tool_calls": [{"id": "call12345", "type": "function", "function": function}],
    }
    if content is not MISSING:
        call["content"] = content
    messages = [
        {"role": "user", "content": "How is the weather in Paris?"},
        call,
        {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "sunny"},
    ]
    return [*messages, {"role": "user", "content": "Thanks"}] if answered else messages


def transformers_text(source: str, messages: list[dict[str, Any]]) -> str | None:
    """What transformers renders; None where it fails."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            [messages],
            tools=TOOLS,
            chat_template=source,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
        )
    except Exception:
        return None
    return str(rendered[0])


def templates() -> list[Path]:
    return sorted((llama_cpp_source() / "models" / "templates").glob("*.jinja"))


def cases() -> list[tuple[Path, object, bool]]:
    """Each template with the arguments, and the end of the conversation, for which it takes a null or empty content."""
    found = []
    for path in templates():
        tries = [(c, a, answered) for c in (None, "") for answered in (True, False) for a in ARGUMENTS]
        for content, arguments, answered in tries:
            if transformers_text(path.read_text(), conversation(content, arguments, answered)) is not None:
                found.append((path, arguments, answered))
                break
    return found


def test_a_call_without_content_is_written_as_transformers_does(tmp_path: Path) -> None:
    values = bpe_vocabulary(special=("<|end|>",))
    builder = GGUFBuilder().kv("general.architecture", "llama").kvs(values)
    tokenizer = Tokenizer.from_gguf(builder.write(tmp_path / "t.gguf"))
    taken = cases()
    assert len(taken) >= 60
    repaired, wrong = set(), []
    for path, arguments, answered in taken:
        source = path.read_text()
        template = ChatTemplate(source, "<s>", "</s>")
        texts = {
            c: transformers_text(source, conversation(c, arguments, answered)) for c in (MISSING, None, "")
        }
        for content, theirs in texts.items():
            messages = conversation(content, arguments, answered)
            if theirs is None:
                repaired.add((path.stem, content))
                theirs = texts[None] if texts[None] is not None else texts[""]
            assert theirs is not None
            ids = encode_chat(tokenizer, template, messages, tools=TOOLS)
            if tokenizer.decode(ids, skip_special=False) != theirs:
                wrong.append((path.stem, content))
    assert not wrong
    assert len(repaired) >= 10


def test_a_template_that_refuses_a_conversation_for_another_reason_says_so() -> None:
    source = "{{ messages[0].tool_calls[0].function.name + messages[0].tool_calls[0].function.arguments }}"
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    with pytest.raises(ChatTemplateError, match="can only concatenate str"):
        ChatTemplate(source).render(messages)


@pytest.mark.parametrize("name", ["NousResearch-Hermes-3-Llama-3.1-8B", "CohereForAI-c4ai-command-r-plus"])
def test_a_template_for_tools_beside_a_default_is_as_good_as_alone(tmp_path: Path, name: str) -> None:
    """Its prompts, and the form of calls that is found by rendering it."""
    path = llama_cpp_source() / "models" / "templates" / f"{name}-tool_use.jinja"
    words = bpe_vocabulary()
    default, with_tools = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
    forms = []
    for keys in ({default: path.read_text()}, {default: CHATML, with_tools: path.read_text()}):
        file = open_gguf(GGUFBuilder().kvs({**words, **keys}).write(tmp_path / f"{len(keys)}.gguf"))
        chat = ChatFormat(Tokenizer.from_gguf(file), ChatTemplate.from_gguf(file), "")
        messages = conversation(None, {"city": "Paris"})
        calls = chat.answers.calls
        assert chat.answers.calls_tools
        forms.append((calls.form, chat.render(messages, TOOLS, {}), chat.render(messages[:1], TOOLS, {})))
    assert forms[0] == forms[1]
