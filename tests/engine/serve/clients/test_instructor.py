"""instructor against a tiny model with random weights: what comes is valid as the server holds it to the schema."""

import asyncio
from types import ModuleType
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, field_validator

from tests.engine.serve.serving import KEY, Served

LIMIT = 1500
"""More than a value has with all the white space that it may have."""
ASKED = [{"role": "user", "content": "hi"}]


class Look(BaseModel):
    """A look at something."""

    ok: bool
    kind: Literal["a", "b"]


@pytest.fixture(scope="module")
def instructor() -> ModuleType:
    """Imported here, for it takes half a second."""
    import instructor

    return instructor


def given(served: Served) -> dict[str, Any]:
    return {"base_url": f"{served.url}/v1", "api_key": KEY, "max_retries": 0}


def ask(kind: Any = Look, **more: Any) -> dict[str, Any]:
    limit = {} if "max_output_tokens" in more else {"max_tokens": LIMIT}
    return {"model": "tiny", "messages": ASKED, "response_model": kind, "max_retries": 0, **limit, **more}


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_openais_modes_give_a_value_of_the_type(instructor: ModuleType, tiny: Served, mode: str) -> None:
    client = instructor.from_openai(OpenAI(**given(tiny)), mode=instructor.Mode[mode])
    more = (
        {"max_output_tokens": LIMIT, "extra_body": {"seed": 3}} if mode == "RESPONSES_TOOLS" else {"seed": 3}
    )
    assert isinstance(client.create(**ask(**more)), Look)


def test_anthropics_tools_do_too(instructor: ModuleType, tiny: Served) -> None:
    from anthropic import Anthropic

    client = instructor.from_anthropic(
        Anthropic(base_url=tiny.url, api_key=KEY, max_retries=0), mode=instructor.Mode.TOOLS
    )
    assert isinstance(client.create(**ask(extra_body={"seed": 3})), Look)


def test_a_value_comes_in_parts(instructor: ModuleType, tiny: Served) -> None:
    client = instructor.from_openai(OpenAI(**given(tiny)))
    parts = list(client.create_partial(**ask(seed=3)))
    assert parts[0].kind is None
    assert Look.model_validate(parts[-1].model_dump())


def test_a_value_that_is_refused_is_asked_for_again(instructor: ModuleType, tiny: Served) -> None:
    tried = []

    class Refused(BaseModel):
        ok: bool

        @field_validator("ok")
        @classmethod
        def refuse(cls, value: bool) -> bool:
            tried.append(value)
            if len(tried) < 2:
                raise ValueError("not this one")
            return value

    client = instructor.from_openai(OpenAI(**given(tiny)))
    assert client.create(**ask(Refused, seed=3, max_retries=1)).ok in (True, False)
    assert len(tried) == 2, "the refusal goes back as the result of the call"


def test_many_at_once(instructor: ModuleType, tiny: Served) -> None:
    async def all_of_them() -> list[Any]:
        client = instructor.from_openai(AsyncOpenAI(**given(tiny)))
        return await asyncio.gather(*(client.create(**ask(seed=seed)) for seed in range(4)))

    assert all(isinstance(one, Look) for one in asyncio.run(all_of_them()))
