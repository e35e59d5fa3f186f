"""Sections of reasoning: found in every chat template of llama.cpp's that has one, and parsed however a text is cut."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from quengine.models.template.template_worker import render
from quengine.structured.answer_parser import TextParser
from quengine.structured.calls.format import GENERIC_FORM, CallFormat
from quengine.structured.reasoning_format import ReasoningParser
from quengine.structured.reasoning_tags import ReasoningTags, State, switches
from quengine.structured.tool_calls import CallDelta, ToolUse, collect, reasoning_of
from tests.llama_cpp_source import llama_cpp_source

THINK = ("<think>", "</think>", "")
STEPS = ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "")
CHANNEL = ("<|channel>thought", "<channel|>", "")
# Tags, header, state of a prompt with reasoning switched on.
FOUND: dict[str, tuple[tuple[str, str, str], State]] = {
    "Apertus-8B-Instruct": (("<|inner_prefix|>", "<|inner_suffix|>", ""), "unknown"),
    "Apriel-1.6-15b-Thinker-fixed": (STEPS, "open"),
    "Bielik-11B-v3.0-Instruct": (THINK, "open"),
    "ByteDance-Seed-OSS": (("<seed:think>", "</seed:think>", ""), "unknown"),
    "Cohere2MoE": (("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>"), "open"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        ("<|START_THINKING|>", "<|END_THINKING|>", ""),
        "unknown",
    ),
    "GLM-4.6": (THINK, "unknown"),
    "GLM-4.7-Flash": (THINK, "open"),
    "HuggingFaceTB-SmolLM3-3B": (THINK, "unknown"),
    "Kimi-K2-Thinking": (THINK, "unknown"),
    "Kimi-K3": (("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>"), "open"),
    "LFM2.5-8B-A1B": (THINK, "unknown"),
    "LFM2.5-Instruct": (THINK, "unknown"),
    "MiniMax-M2": (THINK, "open"),
    "MiniMax-M3": (("<mm:think>", "</mm:think>", ""), "unknown"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (THINK, "open"),
    "NVIDIA-Nemotron-Nano-v2": (THINK, "open"),
    "Qwen-QwQ-32B": (THINK, "open"),
    "Qwen-Qwen3-0.6B": (THINK, "unknown"),
    "Qwen3.5-4B": (THINK, "open"),
    "Reka-Edge": (THINK, "open"),
    "Spark2.5": (THINK, "open"),
    "StepFun3.5-Flash": (THINK, "open"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (THINK, "open"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (THINK, "open"),
    "deepseek-ai-DeepSeek-V3.1": (THINK, "open"),
    "deepseek-ai-DeepSeek-V3.2": (THINK, "open"),
    "deepseek-ai-DeepSeek-V4": (THINK, "open"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": (THINK, "open"),
    "google-gemma-4-31B-it": (CHANNEL, "unknown"),
    "google-gemma-4-31B-it-interleaved": (CHANNEL, "unknown"),
    "ibm-granite-granite-3.3-2B-Instruct": (THINK, "unknown"),
    "inclusionai-ling-3.0-flash": (THINK, "open"),
    "llama-cpp-deepseek-r1": (THINK, "open"),
    "llama-cpp-rwkv-world": (THINK, "open"),
    "mistralai-Ministral-3-14B-Reasoning-2512": (("[THINK]", "[/THINK]", ""), "unknown"),
    "muse-glimmer": (("to=self<|message|>", "<|eom|>", "<|start|>assistant to=user<|message|>"), "unknown"),
    "openbmb-MiniCPM5-1B": (THINK, "open"),
    "poolside-Laguna-S-2.1": (THINK, "open"),
    "poolside-Laguna-XS-2.1": (THINK, "open"),
    "poolside-Laguna-XS.2": (THINK, "open"),
    "tencent-Hy3": (("<think:opensource>", "</think:opensource>", ""), "closed"),
    "unsloth-Apriel-1.5": (STEPS, "unknown"),
    "upstage-Solar-Open-100B": (("<|think|>", "<|end|>", "<|begin|>assistant<|content|>"), "unknown"),
}
SWITCHED_OFF = ("unknown", "closed")
NO_SWITCH = ("Apriel-1.6-15b-Thinker-fixed", "Cohere2MoE", "MiniMax-M2", "NVIDIA-Nemotron-Nano-v2")
NO_SWITCH += ("StepFun3.5-Flash", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "llama-cpp-deepseek-r1")
HELLO = [{"role": "user", "content": "Hello"}]
THOUGHT, TEXT = "They greet.\n\nI <b>may</b> too < / ", "Hello! <think>no</think> [THINK] <|channel>thought"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def template(name: str) -> str:
    path = llama_cpp_source() / "models" / "templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


class Template:
    def __init__(self, source: str) -> None:
        self.source = source

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], prompt: bool, variables: Mapping[str, Any]
    ) -> str | None:
        given = {"messages": list(messages), "tools": None, "add_generation_prompt": prompt}
        try:
            return render(
                self.source, {**variables, **given, "bos_token": "<s>", "eos_token": "</s>"}, 1 << 20
            )
        except Exception:
            return None

    @property
    def tags(self) -> ReasoningTags | None:
        return ReasoningTags.of(self.source, self, lambda _: False)

    def prompt(self, thinking: bool) -> str:
        text = self(HELLO, True, switches(self.source, thinking))
        assert text is not None
        return text


def parsed(parser: ReasoningParser, text: str, size: int) -> tuple[str, str]:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    return reasoning_of(deltas), collect(deltas)[0]


@pytest.mark.parametrize("name", FOUND)
def test_the_section_of_a_template_is_found_and_parsed_in_pieces_of_every_length(name: str) -> None:
    made = Template(template(name))
    tags, (written, state) = made.tags, FOUND[name]
    assert tags is not None and (tags.begin, tags.end, tags.header) == written
    assert tags.state(made.prompt(thinking=True)) == state
    if name not in NO_SWITCH:
        assert tags.state(made.prompt(thinking=False)) in SWITCHED_OFF
    section = f"{THOUGHT}{tags.closing}{tags.header}{TEXT}"
    for begun, text in (("open", section), ("unknown", tags.opening + section)):
        for size in range(1, len(text) + 1):
            parser = ReasoningParser(tags, begun, TextParser())  # type: ignore[arg-type]
            assert parsed(parser, text, size) == (THOUGHT.strip(), TEXT)


def test_a_mode_of_three_values_is_switched_off_and_else_left_to_the_model() -> None:
    made = Template(template("MiniMax-M3"))
    tags = made.tags
    assert tags is not None and tags.state(made.prompt(thinking=False)) == "closed"
    assert "thinking_mode" not in switches(made.source, True)


def test_other_templates_have_no_section() -> None:
    folder = llama_cpp_source() / "models" / "templates"
    names = {path.stem for path in folder.glob("*.jinja")} - FOUND.keys() - {"openai-gpt-oss-120b"}
    assert len(names) > 20
    for name in names:
        assert Template(template(name)).tags is None, name


def test_a_vocabulary_shows_what_its_template_does_not() -> None:
    source = template("MiniMax-M1")
    tags = ReasoningTags.of(source, Template(source), {"<think>", "</think>"}.__contains__)
    assert tags is not None and (tags.begin, tags.end) == ("<think>", "</think>")
    assert ReasoningTags.of(source, Template(source), {"<think>"}.__contains__) is None


def test_a_template_that_only_opens_a_section_has_one() -> None:
    tags = ReasoningTags.of("{{ '<think>' }}", None, lambda _: False)
    assert tags is not None and tags.state("...<think>\n") == "open"


@pytest.fixture
def tags() -> ReasoningTags:
    return ReasoningTags("<think>\n", "\n</think>\n\n")


@pytest.mark.parametrize(
    ("state", "text", "outcome"),
    [
        ("unknown", "", ("", "")),
        ("unknown", "  Hello", ("", "  Hello")),
        ("unknown", "<th", ("", "<th")),
        ("unknown", "<thing>", ("", "<thing>")),
        ("unknown", "A <think>b</think> c", ("", "A <think>b</think> c")),
        ("unknown", "\n</think>\n\nHello", ("", "Hello")),
        ("unknown", "b</think> c", ("", "b</think> c")),
        ("unknown", "\n<think>a</think>b <think>c</think>", ("a", "b <think>c</think>")),
        ("unknown", "<think>\n\n</think>\n\nHello", ("", "Hello")),
        ("unknown", "<think>\nHm </thin", ("Hm </thin", "")),
        ("open", "Hm.\n", ("Hm.", "")),
        ("open", "Hm.\n</think>", ("Hm.", "")),
        ("open", "\n</think>\n\nHello\n", ("", "Hello\n")),
        ("open", "<think>a</think>b", ("<think>a", "b")),
        ("closed", "<think>a</think>b", ("", "<think>a</think>b")),
    ],
)
def test_only_a_section_at_the_beginning_is_reasoning(
    tags: ReasoningTags, state: State, text: str, outcome: tuple[str, str]
) -> None:
    for size in range(1, len(text) + 2):
        assert parsed(ReasoningParser(tags, state, TextParser()), text, size) == outcome


def test_an_answer_cut_anywhere_has_no_tag(tags: ReasoningTags) -> None:
    text = f"<think>\n{THOUGHT}\n</think>\n\nHello"
    for length in range(len("<think>"), len(text)):
        reasoning, said = parsed(ReasoningParser(tags, "unknown", TextParser()), text[:length], 3)
        assert THOUGHT.startswith(reasoning) or "</think>".startswith(reasoning[len(THOUGHT) :].strip())
        assert "Hello".startswith(said)


def test_what_goes_out_is_not_held_back_longer_than_a_tag(tags: ReasoningTags) -> None:
    parser = ReasoningParser(tags, "open", TextParser())
    assert reasoning_of(parser.push("One two ")) == "One two"
    assert reasoning_of(parser.push("three <")) == " three"
    assert reasoning_of(parser.push(" four")) == " < four"


def test_calls_behind_the_section_are_calls(tags: ReasoningTags) -> None:
    text = f"They ask. <tool_call>\n</think>\n\nLet me see.\n{CALL}"
    for size in range(1, len(text) + 1):
        rest = CallFormat(GENERIC_FORM).parser(ToolUse.from_openai(TOOLS))
        parser = ReasoningParser(tags, "open", rest)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
        said, (call,) = collect(deltas)
        assert (reasoning_of(deltas), said) == ("They ask. <tool_call>", "Let me see.")
        assert (call.name, call.arguments, parser.calls) == ("weather", '{"city": "Paris"}', 1)
        assert sum(isinstance(delta, CallDelta) for delta in deltas) >= 1
