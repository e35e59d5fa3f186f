"""Templates that a GGUF file gives by name write what llama.cpp writes for the name."""

import ctypes
from pathlib import Path

import pytest

from quengine.models.gguf import open_gguf
from quengine.models.template.chat_template import ChatTemplate, ChatTemplateError
from quengine.models.template.named_templates import NAMED_TEMPLATES
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_vocab import library

CONVERSATIONS = [
    [("user", "Hello")],
    [("system", "Be brief."), ("user", "Hello, \"you\" & 'me'")],
    [("user", "  one "), ("assistant", " two\n"), ("user", "three")],
    [("system", "A"), ("user", "b"), ("assistant", "c"), ("system", "D"), ("user", "e"), ("assistant", "f")],
    [("user", "a"), ("user", "b"), ("assistant", "")],
]


class _Message(ctypes.Structure):
    """`llama_chat_message` of llama.h."""

    _fields_ = [("role", ctypes.c_char_p), ("content", ctypes.c_char_p)]


def llama_cpp_prompt(name: str, conversation: list[tuple[str, str]]) -> str:
    apply = library().llama_chat_apply_template
    apply.argtypes = [
        *(ctypes.c_char_p, ctypes.POINTER(_Message), ctypes.c_size_t),
        *(ctypes.c_bool, ctypes.c_char_p, ctypes.c_int32),
    ]
    messages = (_Message * len(conversation))(*[(r.encode(), c.encode()) for r, c in conversation])
    buffer = ctypes.create_string_buffer(4096)
    length = apply(name.encode(), messages, len(conversation), True, buffer, len(buffer))
    assert 0 <= length < len(buffer)
    return buffer.raw[:length].decode()


def template(folder: Path, name: str) -> ChatTemplate:
    path = GGUFBuilder().kv("tokenizer.chat_template", name).write(folder / "m.gguf")
    with open_gguf(path) as file:
        found = ChatTemplate.from_gguf(file)
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_prompts_are_llama_cpps(tmp_path: Path, name: str) -> None:
    ours = template(tmp_path, name)
    for conversation in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in conversation]
        assert ours.render(messages) == llama_cpp_prompt(name, conversation), conversation


@pytest.mark.parametrize("name", sorted(NAMED_TEMPLATES.keys() - {"chatml"}))
def test_a_role_that_the_format_lacks_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ChatTemplateError, match="no role tool"):
        template(tmp_path, name).render([{"role": "tool", "content": "7"}])
