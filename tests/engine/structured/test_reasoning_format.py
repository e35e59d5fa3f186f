"""Constraints behind a section of reasoning, and what is counted of it."""

from typing import Any

import pytest

from quengine.models.template.chat_template import ChatTemplate
from quengine.models.tokenizer import Tokenizer
from quengine.request.chat_format import answer_format
from quengine.structured.answer_format import TextFormat
from quengine.structured.calls.format import GENERIC_FORM, CallFormat
from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.reasoning_format import ReasoningFormat
from quengine.structured.reasoning_tags import ReasoningTags
from quengine.structured.tool_calls import ToolUse, collect, reasoning_of
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary

CONTROLS = ("<|END_THINKING|>", "<|START_TEXT|>", "<|close|>", "<|sep|>", "<|endoftext|>")
TAGS = {
    "letters": ReasoningTags("<think>\n", "\n</think>\n\n"),
    "control": ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>"),
    "mixed": ReasoningTags("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"a": {}}}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    words = bpe_vocabulary(special=CONTROLS)
    eos = words["tokenizer.ggml.tokens"].index("<|endoftext|>")
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.gguf"
    keys: dict[str, Any] = {"general.architecture": "llama", **words, "tokenizer.ggml.eos_token_id": eos}
    return Tokenizer.from_gguf(GGUFBuilder().kvs(keys).write(path))


def form_of(name: str, tokenizer: Tokenizer) -> ReasoningFormat:
    return ReasoningFormat.of(TAGS[name], TextFormat(CallFormat(GENERIC_FORM)), tokenizer)


def holds(tokenizer: Tokenizer, spec: ConstraintSpec, text: str) -> bool:
    """Whether a text is one that a constraint allows, as a whole."""
    constraint = ConstraintCompiler(tokenizer, tokenizer.vocab_size).compile(spec)
    for token in tokenizer.encode(text, special=True):
        if not constraint.allowed()[token]:
            return False
        constraint.advance(token)
    return constraint.accepting


@pytest.mark.parametrize("name", TAGS)
def test_a_constraint_holds_the_text_and_not_the_reasoning(name: str, tokenizer: Tokenizer) -> None:
    form, wanted = form_of(name, tokenizer), ConstraintSpec.regex("ab+")
    tags = form.tags
    section = f"ab ba?{tags.closing}{tags.header}"
    opened, closed = f"...{tags.opening}", f"...{tags.opening}{tags.closing}"
    cases = {
        ("", "abb"): True,
        ("", f"{tags.opening}{section}abb"): True,
        ("", f"{tags.opening}{section}ba"): False,
        ("", "ba"): False,
        (opened, f"{section}abb"): True,
        (opened, f"{section}ba"): False,
        (opened, "abb"): False,
        (closed, "abb"): True,
        (closed, f"{tags.opening}{section}abb"): False,
    }
    for (prompt, text), right in cases.items():
        spec = form.constraint(ToolUse(), wanted, prompt)
        assert spec is not None and spec.kind == "regex"
        assert holds(tokenizer, spec, text) == right, (prompt, text)


def test_a_required_call_comes_behind_the_section(tokenizer: Tokenizer) -> None:
    form, use = form_of("letters", tokenizer), ToolUse.from_openai(TOOLS, "required")
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'
    section = "Hm.\n</think>\n\n"
    opened, free = (form.constraint(use, None, prompt) for prompt in ("<think>\n", ""))
    assert opened is not None and free is not None
    for text, after_open, after_free in (
        (section + call, True, False),
        (f"<think>\n{section}{call}", True, True),
        (call, False, True),
        (f"{section}No.", False, False),
    ):
        assert holds(tokenizer, opened, text) == after_open, text
        assert holds(tokenizer, free, text) == after_free, text
    parser = form.parser(use, "<think>\n")
    deltas = parser.push(section + call) + parser.finish()
    assert [each.name for each in collect(deltas)[1]] == ["weather"] and reasoning_of(deltas) == "Hm."


def test_reasoning_in_the_text_stays_there(tokenizer: Tokenizer) -> None:
    form = form_of("letters", tokenizer).with_reasoning_in_text()
    text = "Hm.\n</think>\n\nHello"
    parser = form.parser(ToolUse(), "<think>\n")
    deltas = parser.push(text) + parser.finish()
    assert (reasoning_of(deltas), collect(deltas)[0]) == ("", text)
    assert form.reasoning_tokens(ToolUse(), tokenizer.encode(text), tokenizer.decode, "<think>") == 0


def test_tokens_between_the_tags_are_counted(tokenizer: Tokenizer) -> None:
    form = form_of("control", tokenizer)
    ids = tokenizer.encode("Hm. Well.<|END_THINKING|><|START_TEXT|>Hello", special=True)
    thought = len(tokenizer.encode("Hm. Well."))

    def decode(ids: Any) -> str:
        return tokenizer.decode(ids, skip_special=False)

    assert form.reasoning_tokens(ToolUse(), ids, decode, "<|START_THINKING|>") == thought
    assert form.reasoning_tokens(ToolUse(), ids, decode, "") == 0
    assert {tokenizer.token_text(i) for i in form.shown(ToolUse())} == {*CONTROLS[:2]}


def test_the_form_is_found_by_the_template(tokenizer: Tokenizer) -> None:
    source = "{{ '<think>\\n' }}</think><tool_call>"
    found = answer_format(source, tokenizer, calls=ChatTemplate(source).render)
    assert isinstance(found, ReasoningFormat) and found.calls_tools and found.reasons
    assert not isinstance(answer_format("<tool_call>", tokenizer), ReasoningFormat)
