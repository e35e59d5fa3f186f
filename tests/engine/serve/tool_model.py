"""A tiny model whose template knows tools, behind a server: its words are random, so only what holds its text can make
it JSON."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quengine import LLM
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import Served, serving
from tests.gguf_builder import ModelSizes
from tests.tiny_models import CHATML, write_tiny

HERMES = "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}" + CHATML
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@contextmanager
def serving_tools(folder: Path, parallel: int = 1, context: int = 1024) -> Iterator[Served]:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=context)
    path = write_tiny(
        folder / "tiny.gguf", kind="Q8_0", sizes=sizes, changes={"tokenizer.chat_template": HERMES}
    )
    with serving(
        lambda: LLMEngine(LLM(path, device="cpu", parallel=parallel)), settings={"model_names": ("tiny",)}
    ) as running:
        yield running
