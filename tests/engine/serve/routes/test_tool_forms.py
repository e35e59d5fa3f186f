"""The form of a model's tool calls is found beside the event loop, whichever route asks for it first."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quengine.structured.answer_format import TextFormat
from quengine.structured.calls.form import CallForm
from quengine.structured.calls.format import GENERIC_FORM, CallFormat
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import serving

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
NO_CONTROLS: Any = SimpleNamespace(control_texts=(), eos_ids=())
ANTHROPICS = {"tools": [{"name": "weather", "input_schema": PARAMETERS}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", CHAT | ANTHROPICS),
        ("/v1/messages", CHAT | ANTHROPICS),
        ("/v1/chat/completions", CHAT | TOOLS),
        (
            "/v1/responses",
            {"input": "hi", "max_output_tokens": 16, "tools": [{"type": "function", **FUNCTION}]},
        ),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False, **TOOLS}),
        ("/apply-template", {"messages": CHAT["messages"], **TOOLS}),
    ],
)
def test_no_request_finds_it_in_the_event_loop(path: str, body: dict[str, Any]) -> None:
    in_loop: list[bool] = []

    def find() -> CallForm:
        try:
            asyncio.get_running_loop()
            in_loop.append(True)
        except RuntimeError:
            in_loop.append(False)
        return GENERIC_FORM

    def engine() -> FakeEngine:
        made = FakeEngine(step_s=0.0)
        made.model.answer_format = TextFormat(CallFormat(find, NO_CONTROLS))
        return made

    with serving(engine) as served, served.http() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert in_loop == [False]
