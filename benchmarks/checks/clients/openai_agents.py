"""openai-agents: a tool that has to be called, by chat completions and by responses, whole and as a stream."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

CALLED: list[str] = []


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    CALLED.append(city)
    return f"sunny in {city}"


async def main(url: str, name: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="agent",
            instructions="Use the tool.",
            model=kind(model=name, openai_client=client),
            tools=[weather],
            model_settings=ModelSettings(tool_choice="required", max_tokens=200),
            tool_use_behavior="stop_on_first_tool",
        )
        CALLED.clear()
        whole = await Runner.run(agent, "How is the weather?")
        assert CALLED and whole.final_output == f"sunny in {CALLED[-1]}", (kind, whole.final_output)
        CALLED.clear()
        stream = Runner.run_streamed(agent, "And now?")
        events = [event async for event in stream.stream_events()]
        assert events and CALLED and stream.final_output == f"sunny in {CALLED[-1]}"
        assert whole.context_wrapper.usage.output_tokens > 0


asyncio.run(main(sys.argv[1], sys.argv[2]))
