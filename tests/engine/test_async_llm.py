"""`AsyncLLM`: what tasks await and iterate over is what `LLM` computes, and a cancelled task frees its place."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quengine import LLM, AsyncLLM, CannotRunError, EngineError, SamplingParams
from quengine.structured.tool_calls import CallDelta, Delta
from tests.engine.test_python_calls import TOOL
from tests.tiny_models import write_tiny_chat

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True, context_shift=True)
PROMPTS = ["the cat", "a", "sat on the mat", "zz", "b c d"]
CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("async") / "tiny.gguf"
    return write_tiny_chat(path, 2048)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[AsyncLLM]:
    loaded = AsyncLLM(model, device="cpu", parallel=3)
    yield loaded
    loaded.close()


async def ended(llm: AsyncLLM) -> None:
    """Waits until no request is left, nor its sequence in the scheduler."""
    while llm.running:
        await asyncio.sleep(0)
    while llm.llm.scheduler.sequences:
        await asyncio.sleep(0)
        llm.llm.step()


def test_tasks_get_what_the_model_generates_alone(llm: AsyncLLM) -> None:
    expected = [each.tokens for each in llm.llm.generate(PROMPTS, GREEDY)]

    async def streamed(prompt: str) -> list[int]:
        stream = llm.stream(prompt, GREEDY)
        text = "".join([piece async for piece in stream])
        assert text == stream.completion.text
        return stream.completion.tokens

    async def main() -> None:
        together, alone, *streams = await asyncio.gather(
            llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS[0], GREEDY), *map(streamed, PROMPTS)
        )
        assert [each.tokens for each in together] == expected == streams
        assert [each.tokens for each in alone] == expected[:1]
        vectors, scores, text = await asyncio.gather(
            llm.embed(["a"]), llm.score("the", [" cat", "s"]), llm.perplexity("the cat sat")
        )
        assert vectors == llm.llm.embed(["a"]) and scores == llm.llm.score("the", [" cat", "s"])
        assert text.perplexity == llm.llm.perplexity("the cat sat").perplexity

    asyncio.run(main())


def test_chats_stream_text_and_calls(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=90, seed=2)

    async def main() -> None:
        answer = await llm.chat(CHAT, GREEDY)
        stream = llm.stream_chat(CHAT, GREEDY)
        assert "".join([piece async for piece in stream]) == answer.text == llm.llm.chat(CHAT, GREEDY).text
        deltas = list[Delta]()
        async for delta in llm.stream_chat(CHAT, params, tools=[TOOL], tool_choice="required").deltas():
            deltas.append(delta)
        assert next(each.name for each in deltas if isinstance(each, CallDelta)) == "add"
        called = await llm.chat(CHAT, params, tools=[TOOL], tool_choice="required")
        assert [each.name for each in called.tool_calls] == [
            each.name for each in deltas if getattr(each, "name", None)
        ]

    asyncio.run(main())


def test_a_cancelled_task_frees_its_place(llm: AsyncLLM) -> None:
    async def main() -> None:
        pieces = asyncio.Queue[str]()

        async def read() -> None:
            async for piece in llm.stream("the cat", ENDLESS):
                await pieces.put(piece)

        readers = [asyncio.create_task(read()) for _ in range(3)]
        batch = asyncio.create_task(llm.generate(PROMPTS, ENDLESS))
        for _ in range(9):
            await pieces.get()
        for task in (*readers, batch):
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError)
            for each in await asyncio.gather(*readers, batch, return_exceptions=True)
        )
        await ended(llm)
        async for _ in llm.stream("the cat", ENDLESS):  # garbage-collected after the loop
            break
        stream = llm.stream("the", ENDLESS)
        await anext(stream)
        stream.close()
        assert stream.completion.finish_reason == "abort"
        await ended(llm)  # though the stream is kept
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await llm.generate("the cat", ENDLESS)
        await ended(llm)

    asyncio.run(main())


def test_errors_are_those_of_the_request(llm: AsyncLLM) -> None:
    def fails(_ids: list[int], _logits: Any) -> Any:
        raise LookupError("mine")

    async def main() -> None:
        with pytest.raises(EngineError, match="the prompt is empty"):
            await llm.generate("")
        with pytest.raises(LookupError, match="mine"):
            await llm.generate(["a", "b"], [GREEDY, SamplingParams(logits_processors=(fails,))])
        with pytest.raises(EngineError, match="has not begun"):
            _ = llm.stream("a").completion
        assert (await llm.generate("a", GREEDY))[0].tokens == llm.llm.generate("a", GREEDY)[0].tokens

    asyncio.run(main())


def test_a_failed_step_ends_the_requests_under_way(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = llm.llm.runner.launch

    async def main() -> None:
        def fails(_plan: Any) -> Any:
            monkeypatch.setattr(llm.llm.runner, "launch", launch)
            raise MemoryError

        monkeypatch.setattr(llm.llm.runner, "launch", fails)
        with pytest.raises(CannotRunError, match="not enough memory; lower"):
            await llm.generate("the", GREEDY)
        assert (await llm.generate("a", GREEDY))[0].tokens == llm.llm.generate("a", GREEDY)[0].tokens

    asyncio.run(main())


def test_a_closed_model_ends_its_streams(model: Path) -> None:
    async def main() -> None:
        async with AsyncLLM.of(LLM(model, device="cpu")) as llm:
            stream, waiting = llm.stream("the", ENDLESS), llm.stream("a", ENDLESS)
            await anext(stream)
            task = asyncio.create_task(waiting.finish())
            await anext(stream)
        for left in (stream.finish(), task, llm.generate("a")):
            with pytest.raises(EngineError, match="this LLM is closed"):
                await left
        assert not llm.running

    asyncio.run(main())
    with pytest.raises(TypeError, match=r"AsyncLLM\(\) has no n_ctx: use ctx_size"):
        AsyncLLM("m", n_ctx=2)  # type: ignore[call-arg]
