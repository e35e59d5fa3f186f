"""Turns of a coding agent: requests in the form of OpenAI's Codex CLI, and its way of reading events.

The form is that of its public source (github.com/openai/codex, `ResponsesApiRequest` and `ResponseItem`).
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quengine import SamplingParams
from quengine.serve.apis.openai.responses.input_items import messages_of
from quengine.serve.processes.shared_engine import GenerationRequest
from tests.engine.serve.fake_engine import FIRST_BYTE
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine

THOUGHT = "The tests need a look."
HM = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
LIST = '{"command": ["ls"], "workdir": "/src"}'
PATCH = '*** Begin Patch\n*** Add File: "a.txt"\n+é\\n 😀\n*** End Patch\n'
PATCHED = json.dumps({"input": PATCH})


def call(name: str, arguments: str) -> str:
    return f"{HM}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


SAYS = {
    "Fix the tests.": call("shell", LIST),
    "a_test.py\n": call("apply_patch", PATCHED),
    "Success.": f"{HM}<|channel|>final<|message|>Done.",
}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
PLAN = {
    "type": "function",
    "name": "update_plan",
    "description": "Keeps the plan.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"plan": {"type": "array", "items": {"type": "object"}}}},
}
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)+/'},
}
NAMESPACE = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [PLAN]}
SEARCH = {"type": "web_search", "external_web_access": False}
METADATA = {"session_id": "4f0c", "x-codex-installation-id": "91aa"}


class RecordingEngine(SpeakingEngine):
    """Keeps the prompts."""

    def __init__(self) -> None:
        super().__init__(SAYS)
        self.prompts: list[str] = []

    def add(self, request: GenerationRequest) -> None:
        self.prompts.append(bytes(token - FIRST_BYTE for token in request.prompt).decode())
        super().add(request)


ENGINE = RecordingEngine()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(lambda: ENGINE, settings={"defaults": SamplingParams()}) as running:
        yield running


def text(role: str, content: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": content}]}


def turn(
    served: Served, items: list[dict[str, Any]], **more: Any
) -> tuple[list[dict[str, Any]], httpx.Response]:
    """The events of a turn, and its response."""
    body = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": [SHELL, PLAN, APPLY_PATCH, SEARCH, NAMESPACE],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "4f0c",
        "client_metadata": METADATA,
        **more,
    }
    with served.http() as client:
        answer = client.post("/v1/responses", json=body, headers={"accept": "text/event-stream"})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")], answer


def kept(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the client sends with its next request: without ids, and reasoning without its text."""
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    dropped = {"reasoning": ("id", "status", "content")}
    return [
        {key: value for key, value in item.items() if key not in dropped.get(item["type"], ("id", "status"))}
        for item in items
    ]


def test_turns_of_an_agent_go_from_a_command_to_a_patch_to_an_answer(served: Served) -> None:
    history = [
        text("developer", "Commands run in a sandbox."),
        text("user", "<environment_context>/src</environment_context>"),
        text("user", "Fix the tests."),
    ]
    events, answer = turn(served, history)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    thought = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    assert thought == THOUGHT
    usage = events[-1]["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0 and events[-1]["response"]["id"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == len(THOUGHT)
    assert answer.headers["X-Quengine-Notes"] == (
        "tools[2]: its grammar is shown to the model and not enforced; "
        'tools[3] skipped: "web_search"; tools[4] skipped: "namespace"'
    )
    assert ENGINE.prompts[-1].startswith(
        "system: You are a coding agent.\nsystem: Commands run in a sandbox.\nuser: "
    )

    reasoning, shell = kept(events)
    assert (shell["type"], shell["name"], shell["arguments"]) == ("function_call", "shell", LIST)
    assert set(reasoning) == {"type", "summary", "encrypted_content"}
    output = {"type": "function_call_output", "call_id": shell["call_id"], "output": "a_test.py\n"}
    history += [reasoning, shell, output]
    events, _ = turn(served, history)

    reasoning, patch = kept(events)
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 2 and "".join(deltas) == PATCH
    (done,) = (e for e in events if e["type"] == "response.custom_tool_call_input.done")
    assert done["input"] == PATCH
    output = {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "Success."}
    history += [reasoning, patch, output]
    events, _ = turn(served, history)

    (said,) = (item for item in kept(events) if item["type"] == "message")
    assert said["content"][0]["text"] == "Done."
    assert [message["role"] for message in messages_of(history)][-4:] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    calls = [message for message in messages_of(history) if message.get("tool_calls")]
    assert [message["reasoning_content"] for message in calls] == [THOUGHT, THOUGHT]
    assert calls[1]["tool_calls"][0]["function"]["arguments"] == json.dumps(
        {"input": PATCH}, ensure_ascii=False
    )


def test_items_of_other_servers_and_versions_do_not_stop_a_conversation(served: Served) -> None:
    shell = {"type": "local_shell_call", "call_id": None, "id": "ls_1", "status": "completed"}
    shell["action"] = {"type": "exec", "command": ["ls"], "timeout_ms": None, "env": {}}
    history = [
        text("user", "hi"),
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "encrypted_content": "gAAA",
        },
        {**text("assistant", "Hello."), "phase": "final_answer", "id": None},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "0"}},
        shell,
        {"type": "local_shell_call_output", "id": "ls_1", "output": '{"output": "a"}'},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "call_id": "c", "name": "shell", "namespace": None, "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:,"}],
        },
        {**text("user", "Fix the tests."), "id": "msg_01a2"},
    ]
    events, answer = turn(
        served, history, instructions=None, parallel_tool_calls=True, reasoning={"summary": "auto"}
    )
    assert events[-1]["type"] == "response.completed"
    notes = answer.headers["X-Quengine-Notes"]
    for place, kind in ((3, "web_search_call"), (4, "compaction"), (5, "ghost_snapshot")):
        assert f'input[{place}] skipped: "{kind}"' in notes
    assert (
        "input[1].encrypted_content skipped" in notes and 'input[10].output: "input_image" left out' in notes
    )
    messages = messages_of(history)
    assert messages[1]["reasoning_content"] == "Hm."
    assert messages[1]["tool_calls"][0]["function"] == {
        "name": "local_shell",
        "arguments": '{"command": ["ls"], "env": {}}',
    }
    assert messages[2] == {
        "role": "tool",
        "tool_call_id": "ls_1",
        "name": "local_shell",
        "content": '{"output": "a"}',
    }
    assert messages[4]["content"] == "see\n[input_image left out: this model reads text only]"


def test_a_schema_for_the_last_message_and_options_without_effect_are_taken(served: Served) -> None:
    text_options = {"verbosity": "low", "format": {"type": "text"}}
    more = {
        "text": text_options,
        "service_tier": "priority",
        "stream_options": {"include_obfuscation": False},
    }
    events, answer = turn(
        served, [text("user", "Fix the tests.")], reasoning=None, tool_choice="none", **more
    )
    assert 'text.verbosity = "low": it has no effect' in answer.headers["X-Quengine-Notes"]
    assert events[-1]["response"]["service_tier"] == "default"
