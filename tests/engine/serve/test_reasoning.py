"""A model that reasons, through the openai client: an engine that says harmony, and a tiny model with gpt-oss's
template."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from quengine import LLM, SamplingParams
from quengine.serve.apis.openai.responses.input_items import messages_of
from quengine.serve.apis.openai.responses.output_items import OutputItems
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.structured.answer_format import nearest_effort
from quengine.structured.harmony import HarmonyFormat
from quengine.structured.tool_calls import ToolUse
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine, SpeakingModel, chat
from tests.gguf_builder import ModelSizes
from tests.tiny_models import harmony_vocabulary, write_tiny

THOUGHT, TEXT, PARIS = "They greet. “Hé!”", "Hello! “Ça va?”", '{"city": "Paris"}'
HM = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}"
SAYS = {
    "greet": f"{HM}<|channel|>final<|message|>{TEXT}",
    "weather": f"{HM}{CALL}",
    "before": f"{HM}<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{CALL}",
    "plain": "No channels.",
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
LOOK = {"type": "function", **FUNCTION}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(lambda: SpeakingEngine(SAYS), settings={"defaults": SamplingParams()}) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_text_are_apart(client: openai.OpenAI, stream: bool) -> None:
    answer = chat(
        client, "greet", n=2, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    if stream:
        chunks = list(answer)
        usage = chunks.pop().usage
        for index in range(2):
            choices = [c.choices[0] for c in chunks if c.choices[0].index == index]
            thought = "".join(getattr(c.delta, "reasoning_content", None) or "" for c in choices)
            assert thought == THOUGHT
            assert "".join(c.delta.content or "" for c in choices) == TEXT
            assert choices[-1].finish_reason == "stop" and choices[0].delta.role == "assistant"
            order = ["reasoning_content" in c.delta.model_extra for c in choices[1:-1]]
            assert order == sorted(order, reverse=True), "all reasoning comes first"
    else:
        usage = answer.usage
        for choice in answer.choices:
            assert (choice.message.content, choice.message.reasoning_content) == (TEXT, THOUGHT)
            assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert usage.completion_tokens_details.reasoning_tokens == 2 * len(THOUGHT.encode())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["weather", "before"])
def test_calls_are_calls(client: openai.OpenAI, text: str, stream: bool) -> None:
    answer = chat(client, text, tools=TOOLS, stream=stream)
    said = "Let me see." if text == "before" else ""
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        assert "".join(getattr(c.delta, "reasoning_content", None) or "" for c in chunks) == THOUGHT
        assert "".join(c.delta.content or "" for c in chunks) == said
        deltas = [delta for c in chunks for delta in c.delta.tool_calls or []]
        name, reason = deltas[0].function.name, chunks[-1].finish_reason
        arguments = "".join(delta.function.arguments or "" for delta in deltas)
        assert len(deltas) > 2, "arguments come in pieces"
    else:
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason
        assert (choice.message.content or "", choice.message.reasoning_content) == (said, THOUGHT)
    assert (name, arguments, reason) == ("weather", PARIS, "tool_calls")


def test_an_answer_cut_anywhere_shows_no_mark_and_no_channel(client: openai.OpenAI) -> None:
    count = len(SpeakingEngine(SAYS).model.spoken(SAYS["before"]))
    for limit in range(1, count, 3):
        (choice,) = chat(client, "before", tools=TOOLS, max_tokens=limit).choices
        message = choice.message
        assert choice.finish_reason == "length"
        assert THOUGHT.encode().startswith(
            (getattr(message, "reasoning_content", None) or "").encode().rstrip(b"\xef\xbf\xbd")
        )
        assert "Let me see.".startswith(message.content or "")
        for call in message.tool_calls or []:
            assert call.function.name == "weather"
            assert PARIS.startswith(call.function.arguments) or call.function.arguments == "{}"


def test_what_has_no_channel_is_text(client: openai.OpenAI) -> None:
    (choice,) = chat(client, "plain").choices
    assert choice.message.content == SAYS["plain"]
    assert "reasoning_content" not in (choice.message.model_extra or {})


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_reasoning_items(client: openai.OpenAI, stream: bool) -> None:
    answer = client.responses.create(
        model="fake",
        input="before",
        tools=[LOOK],
        stream=stream,
        reasoning={"effort": "low", "summary": "auto"},
    )  # type: ignore[call-overload]
    if stream:
        events = list(answer)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
        (done,) = (e for e in events if e.type == "response.reasoning_text.done")
        assert (done.text, done.output_index, done.content_index) == (THOUGHT, 0, 0)
        items = [e.item for e in events if e.type == "response.output_item.done"]
        answer = events[-1].response
        assert answer.output == items
    thought, said, call = answer.output
    assert (thought.type, thought.content[0].type, thought.content[0].text) == (
        "reasoning",
        "reasoning_text",
        THOUGHT,
    )
    assert (said.type, said.content[0].text) == ("message", "Let me see.")
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", PARIS)
    assert {thought.status, said.status, call.status} == {"completed"}
    assert answer.usage.output_tokens_details.reasoning_tokens == len(THOUGHT.encode())
    assert answer.reasoning.effort == "low"


def test_items_of_an_answer_go_back_as_one_message(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="before", tools=[LOOK])  # type: ignore[list-item]
    items = [item.model_dump() for item in answer.output]
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "sunny"}
    asked = {"role": "user", "content": "before"}
    first, said, result = messages_of([asked, *items, output])
    assert (first, result["content"]) == (asked, "sunny")
    assert (said["reasoning_content"], said["content"]) == (THOUGHT, "Let me see.")
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": PARIS}
    only = messages_of([items[0], items[2], items[0], asked])
    assert [message.get("reasoning_content") for message in only] == [THOUGHT, None]


def test_items_of_one_kind_are_apart() -> None:
    said = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    text = f"{HM}{said}{HM}<|channel|>final<|message|>{TEXT}"
    output, parser = OutputItems(), HarmonyFormat().parser(ToolUse())
    for character in text:
        output.take(parser.push(character))
    output.take(parser.finish())
    output.finish(cut=False)
    assert [item.content[0].text for item in output.items if item.content] == [
        THOUGHT,
        "Let me see.",
        THOUGHT,
        TEXT,
    ]


def test_an_effort_that_the_api_does_not_have_is_a_400(client: openai.OpenAI) -> None:
    effort: Any = "huge"
    with pytest.raises(openai.BadRequestError, match=r"reasoning_effort = .*low, medium"):
        chat(client, "greet", reasoning_effort=effort)
    with pytest.raises(openai.BadRequestError, match=r"reasoning\.effort = .*low, medium"):
        client.responses.create(model="fake", input="greet", reasoning={"effort": effort})


@pytest.mark.parametrize(
    ("effort", "taken"),
    [("none", "low"), ("minimal", "low"), ("medium", "medium"), ("xhigh", "high"), ("max", "high")],
)
def test_an_effort_that_the_template_does_not_take_is_the_nearest_that_it_takes(
    client: openai.OpenAI, effort: Any, taken: str
) -> None:
    form = SpeakingModel.answer_format
    assert nearest_effort(form, "{{ reasoning_effort }}", effort) == taken
    assert chat(client, "greet", reasoning_effort=effort).choices[0].message.content == TEXT


def test_reasoning_in_the_text_is_not_to_be_had(client: openai.OpenAI) -> None:
    for given in ("auto", "deepseek"):
        assert (
            chat(client, "greet", extra_body={"reasoning_format": given}).choices[0].message.content == TEXT
        )
    with pytest.raises(openai.BadRequestError, match='reasoning format "none": must be auto or deepseek'):
        chat(client, "greet", extra_body={"reasoning_format": "none"})


def test_a_model_whose_template_has_no_effort_answers_all_the_same() -> None:
    efforts: tuple[Any, ...] = ("none", "low", "max")
    with serving() as running, running.openai() as client:
        for effort in efforts:
            assert chat(client, "hi", reasoning_effort=effort).choices[0].message.content
            client.responses.create(model="fake", input="hi", reasoning={"effort": effort})


# --- a tiny model with gpt-oss's template


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=4096)
    path = tmp_path_factory.mktemp("gpt-oss") / "tiny.gguf"
    write_tiny(path, kind="Q8_0", sizes=sizes, vocabulary=harmony_vocabulary())
    with serving(lambda: LLMEngine(LLM(path, device="cpu")), settings={"model_names": ("fake",)}) as running:
        yield running


def test_the_prompt_has_effort_tools_and_earlier_reasoning(tiny: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    said = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        said,
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    with tiny.http() as http:
        body = {"messages": messages, "tools": TOOLS, "reasoning_effort": "high"}
        prompt = http.post("/apply-template", json=body).json()["prompt"]
        assert "\nReasoning: high\n" in prompt and "# Instructions\n\nBe kind." in prompt
        assert "type weather = (_: {\ncity: any,\n}) => any;" in prompt
        assert "<|channel|>analysis<|message|>Hm.<|end|>" in prompt
        assert f"to=functions.weather<|channel|>commentary json<|message|>{PARIS}<|call|>" in prompt
        assert prompt.endswith('to=assistant<|channel|>commentary<|message|>"sunny"<|end|><|start|>assistant')
        body = {"messages": messages[:2], "chat_template_kwargs": {"reasoning_effort": "low"}}
        assert "\nReasoning: low\n" in http.post("/apply-template", json=body).json()["prompt"]
        wrong = http.post("/apply-template", json={"messages": [*messages[1:2], messages[0]]})
        assert wrong.status_code == 400 and "at the beginning" in wrong.json()["error"]["message"]


def test_an_answer_is_continued_on_its_channel(tiny: Served) -> None:
    hello, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}
    with tiny.http() as http:
        for message, end in (
            (said, "<|start|>assistant<|channel|>final<|message|>I am"),
            ({**said, "content": "", "reasoning_content": "Hm"}, "<|channel|>analysis<|message|>Hm"),
            ({**said, "thinking": "Hm"}, "Hm<|end|><|start|>assistant<|channel|>final<|message|>I am"),
        ):
            prompt = http.post("/apply-template", json={"messages": [hello, message]}).json()["prompt"]
            assert prompt.endswith(end)
        body = {"messages": [hello, {**said, "content": "", "reasoning": "Hm"}], "max_tokens": 4, "seed": 1}
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message["reasoning_content"] and not message["content"]
        bounded = http.post("/v1/chat/completions", json={"messages": [hello], "reasoning_budget": 3})
        assert bounded.status_code == 400 and "reasoning budget 3" in bounded.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_after_reasoning_or_at_once(tiny: Served, stream: bool) -> None:
    with tiny.http() as http, tiny.openai() as client:
        (end,) = http.post("/tokenize", json={"content": "<|end|>"}).json()["tokens"]
        given = {"tools": TOOLS, "tool_choice": "required", "seed": 3, "max_tokens": 400, "stream": stream}
        answer = chat(client, "hi", **given, reasoning_effort="low", logit_bias={str(end): 20})
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            deltas = [delta for c in chunks for delta in c.delta.tool_calls or []]
            arguments, reason = "".join(d.function.arguments or "" for d in deltas), chunks[-1].finish_reason
            assert "".join(c.delta.content or "" for c in chunks) == ""
        else:
            (choice,) = answer.choices
            (call,) = choice.message.tool_calls
            arguments, reason = call.function.arguments, choice.finish_reason
            assert choice.message.content is None
    jsonschema.validate(json.loads(arguments), SCHEMA)
    assert reason == "tool_calls"


def test_a_response_format_holds_the_text(tiny: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with tiny.http() as http, tiny.openai() as client:
        (end,) = http.post("/tokenize", json={"content": "<|end|>"}).json()["tokens"]
        more = {"response_format": schema, "logit_bias": {str(end): 20}, "seed": 1, "max_tokens": 400}
        jsonschema.validate(json.loads(chat(client, "hi", **more).choices[0].message.content), SCHEMA)
        answer = client.responses.create(
            model="fake",
            input="hi",
            max_output_tokens=400,
            text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            extra_body={"logit_bias": {str(end): 20}, "seed": 2},
        )
        jsonschema.validate(json.loads(answer.output_text), SCHEMA)
