"""Prompts for templates that refuse the order of the messages."""

from collections.abc import Iterator

import openai
import pytest

from quengine import LLM
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import serving
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

ALTERNATING = (
    "{%- for m in (messages[1:] if messages[0].role == 'system' else messages) -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{%- endfor -%}{%- for m in messages -%}[{{ m.role }}]{{ m.content }}{%- endfor -%}"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=512)
    changes = {"tokenizer.chat_template": ALTERNATING}
    path = write_tiny(
        tmp_path_factory.mktemp("prompt") / "tiny.gguf", kind="Q8_0", sizes=sizes, changes=changes
    )
    settings = {"model_names": ("tiny",)}
    with (
        serving(lambda: LLMEngine(LLM(path, device="cpu")), settings=settings) as served,
        served.openai() as made,
    ):
        yield made


def tokens(client: openai.OpenAI, items: list[dict[str, str]]) -> int:
    """Of a prompt."""
    answer = client.responses.create(
        model="tiny",
        input=items,  # type: ignore[arg-type]
        instructions="Be kind.",
        max_output_tokens=1,
    )
    return answer.usage.input_tokens  # type: ignore[union-attr]


def test_messages_are_joined_to_turns_where_the_template_takes_no_others(client: openai.OpenAI) -> None:
    said = {"role": "assistant", "content": "Yes."}
    parts = [
        {"role": role, "content": content}
        for role, content in (("user", "a"), ("user", "b"), ("developer", "c"))
    ]
    joined = {"role": "user", "content": "a\n\nb\n\nc"}
    assert tokens(client, [*parts, said, parts[0]]) == tokens(client, [joined, said, parts[0]])


def test_what_the_template_refuses_in_turns_too_is_its_own_error(client: openai.OpenAI) -> None:
    said = {"role": "assistant", "content": "Yes."}
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        tokens(client, [said, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
