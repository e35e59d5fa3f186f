"""Events on their way to an answer: in order whatever is written at once, joined, and failing alone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from quengine.request.output import Timings
from quengine.request.sampling_params import SamplingParams
from quengine.serve.processes.server_handle import Handle
from quengine.serve.processes.shared_engine import Event, Finished, GenerationRequest, Piece

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


def made(count: int = 1, logprobs: int | None = None) -> tuple[Handle, list[GenerationRequest]]:
    requests = [GenerationRequest([1], SamplingParams(logprobs=logprobs)) for _ in range(count)]
    return Handle(requests), requests


def piece(request: GenerationRequest, token: int) -> Piece:
    return Piece(request.id, (token,), f"{token} ")


def end(request: GenerationRequest) -> Finished:
    return Finished(request.id, "stop", None, Timings(), 1)


class Client:
    """What is written to one client, by the coroutine and directly; `takes`: it can be written to directly."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.takes = True
        self.texts: list[tuple[int, str]] = []
        self.turns = 0
        handle.writer = self.write

    def write(self, choice: int, given: Piece) -> bool:
        if self.takes:
            self.texts.append((choice, given.text))
        return self.takes

    async def read(self, ends: int = 1) -> None:
        while ends:
            events = await self.handle.events()
            self.turns += 1
            for choice, event in events:
                if isinstance(event, Piece):
                    await asyncio.sleep(0)  # as a write may
                    self.texts.append((choice, event.text))
                else:
                    ends -= 1


def test_pieces_are_written_without_a_turn_while_the_coroutine_waits() -> None:
    async def work() -> Client:
        handle, (request,) = made()
        client, reading = Client(handle), None
        reading = asyncio.create_task(client.read())
        await asyncio.sleep(0)
        for token in range(5):
            handle.put([piece(request, token)])
        handle.put([piece(request, 5), piece(request, 6), end(request)])
        await reading
        return client

    client = run(work())
    assert client.texts == [*((0, f"{token} ") for token in range(5)), (0, "5 6 ")] and client.turns == 1


@pytest.mark.parametrize("seed", range(6))
def test_the_order_holds_when_the_client_takes_some_and_the_coroutine_the_rest(seed: int) -> None:
    async def work() -> Client:
        handle, (request,) = made()
        client = Client(handle)
        reading = asyncio.create_task(client.read())
        for token in range(60):
            client.takes = (token * 7 + seed) % 5 > 1
            handle.put([piece(request, token)])
            if (token + seed) % 3 == 0:
                await asyncio.sleep(0)
        handle.put([end(request)])
        await reading
        return client

    client = run(work())
    assert "".join(text for _, text in client.texts) == "".join(f"{token} " for token in range(60))
    assert 1 < client.turns < 60


def test_each_completion_has_its_own_and_what_waits_is_joined() -> None:
    async def work() -> list[tuple[int, Event]]:
        handle, requests = made(2)
        for token in range(3):
            handle.put([piece(each, token) for each in requests])
        handle.put([end(requests[0])])
        return await handle.events()

    (first, second, last) = run(work())
    assert [(choice, event.text) for choice, event in (first, second) if isinstance(event, Piece)] == [
        (0, "0 1 2 "),
        (1, "0 1 2 "),
    ]
    assert last[0] == 0 and isinstance(last[1], Finished)


def test_scored_tokens_stay_apart() -> None:
    async def work() -> Client:
        handle, (request,) = made(logprobs=1)
        client = Client(handle)
        reading = asyncio.create_task(client.read())
        await asyncio.sleep(0)
        handle.put([piece(request, 1), piece(request, 2)])
        client.takes = False
        handle.put([piece(request, 3), piece(request, 4)])
        handle.put([end(request)])
        await reading
        return client

    assert [text for _, text in run(work()).texts] == ["1 ", "2 ", "3 ", "4 "]


def test_what_writing_raises_is_raised_in_the_coroutine_of_that_answer() -> None:
    async def work() -> None:
        handle, (request,) = made()

        def fail(choice: int, given: Piece) -> bool:
            raise ValueError(f"{choice} {given.text}")

        handle.writer = fail
        reading = asyncio.create_task(handle.events())
        await asyncio.sleep(0)
        handle.put([piece(request, 1)])
        handle.put([piece(request, 2)])
        await reading

    with pytest.raises(ValueError, match="0 1 "):
        run(work())


def test_nothing_reaches_a_client_that_has_gone() -> None:
    async def work() -> Client:
        handle, (request,) = made()
        client = Client(handle)
        reading = asyncio.create_task(client.read())
        await asyncio.sleep(0)
        handle.cancelled = True
        handle.put([piece(request, 1)])
        await asyncio.sleep(0)
        reading.cancel()
        return client

    assert run(work()).texts == []
