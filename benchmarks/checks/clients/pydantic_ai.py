"""pydantic-ai: values of a model class by a tool call and by a JSON schema, and a stream of text."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    capital: bool


async def main(url: str, name: str) -> None:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    for form in (City, NativeOutput(City)):
        found = await Agent(model, output_type=form).run("A city", model_settings={"max_tokens": 400})
        assert isinstance(found.output, City), found.output
        assert found.usage.output_tokens > 0
    async with Agent(model).run_stream("Say hi", model_settings={"max_tokens": 8}) as stream:
        assert [piece async for piece in stream.stream_text(delta=True)]


asyncio.run(main(sys.argv[1], sys.argv[2]))
