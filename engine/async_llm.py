"""`LLM` for asyncio: a thread computes the requests of all tasks together, and the event loop never waits for a step.

    async with AsyncLLM("smollm2-135m", parallel=8) as llm:
        async for piece in llm.stream("Once upon a time"):
            print(piece, end="")

That thread refers to a stream only weakly: a stream that no task refers to any more is cancelled.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar
from weakref import ReferenceType, ref

from quengine.completion_stream import ChatStream, CompletionStream
from quengine.config import Configured, EngineConfig
from quengine.engine_lock import closed_error
from quengine.errors import EngineError
from quengine.llm import LLM
from quengine.platform.out_of_memory import out_of_memory
from quengine.request.output import Completion
from quengine.request.pooling import Pooling
from quengine.request.prompt import Message, Prompt, as_prompts
from quengine.request.sampling_params import SamplingParams, params_of_each
from quengine.scoring.choices import ChoiceScore
from quengine.scoring.perplexity import Perplexity
from quengine.structured.tool_calls import Delta, TextDelta

S = TypeVar("S", bound=CompletionStream)


class AsyncStream(Generic[S]):
    """One request: `async for` gives its text as soon as it is certain; then read `completion`.

    The request begins with the first iteration. It is cancelled when the task that waits for it is, and when the stream
    is closed or garbage-collected, as after a `break`. Used in one event loop, by one task at a time.
    """

    def __init__(self, owner: "AsyncLLM", make: Callable[[], S]) -> None:
        self._owner, self._make = owner, make
        self._stream: S | None = None
        self._pieces = deque[str]()
        self._error: BaseException | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        text = await self._next()
        if text is None:
            raise StopAsyncIteration
        return text

    async def finish(self) -> Completion:
        """Waits for the end of the request, and returns its completion."""
        while await self._next() is not None:
            pass
        return self.completion

    @property
    def completion(self) -> Completion:
        """The completion so far; before the end its finish_reason is "abort"."""
        if self._stream is None:
            raise EngineError("the request has not begun: iterate over the stream first")
        return self._stream.completion

    def close(self) -> None:
        """Cancels the request, unless it has finished."""
        if self._stream is not None and not self._ended:
            self._stream.close()
        self._arrived([], ended=True)

    def __del__(self) -> None:
        if self._stream is not None and not self._ended:
            self._stream.close()

    async def _next(self) -> str | None:
        """The next piece of text as it was generated; None at the end."""
        try:
            if self._stream is None and not self._ended:
                # Texts are encoded, and grammars compiled, beside the event loop.
                self._stream = await asyncio.to_thread(self._make)
                self._owner._submit(_Request(self._stream, ref(self), asyncio.get_running_loop()))
            while not self._pieces and not self._ended:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        except BaseException:
            self.close()
            raise
        if self._pieces:
            return self._pieces.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _arrived(self, pieces: Seq[str], ended: bool, error: BaseException | None = None) -> None:
        """Takes what the engine's thread has for the stream; called in the event loop."""
        if not self._ended:
            self._pieces += pieces
            self._ended, self._error = ended, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncChatStream(AsyncStream[ChatStream]):
    """The answer to a conversation: its text, or with `deltas` reasoning and tool calls too."""

    _is_parsed = False

    async def __anext__(self) -> str:
        while True:
            deltas = await self._parsed()
            if deltas is None:
                raise StopAsyncIteration
            if text := "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)):
                return text

    async def deltas(self) -> AsyncIterator[Delta]:
        """The parts of the answer, as soon as they are certain."""
        while (deltas := await self._parsed()) is not None:
            for delta in deltas:
                yield delta

    async def _parsed(self) -> list[Delta] | None:
        """The parts that the next piece of text adds; None after the last one."""
        text = await self._next()
        if self._stream is None or self._is_parsed:
            return None
        self._is_parsed = text is None
        return self._stream.parse(text)


class _News(NamedTuple):
    """What is new for a stream, which may be gone: pieces of text, and whether the request has ended, or failed."""

    to: "ReferenceType[AsyncStream[Any]]"
    pieces: Seq[str]
    ended: bool = False
    error: BaseException | None = None


class _Request:
    """A request that the engine's thread computes for a stream in an event loop. `ended`: there is no more news."""

    def __init__(
        self, stream: CompletionStream, to: "ReferenceType[AsyncStream[Any]]", loop: asyncio.AbstractEventLoop
    ) -> None:
        self.stream, self.loop, self.ended = stream, loop, False
        self._to = to

    def news(self) -> _News | None:
        """What is new since the last call, or None. Ends the request if its stream is gone or closed."""
        if self._to() is None or self.stream.closed:
            self.stream.close()
            self.ended = True
            return None
        pieces = list[str]()
        try:
            while text := self.stream.read():
                pieces.append(text)
        except Exception as error:
            return self.failed(error, pieces)
        self.ended = text is None
        return _News(self._to, pieces, self.ended) if pieces or self.ended else None

    def failed(self, error: BaseException, pieces: Seq[str] = ()) -> _News:
        """Ends the request with an error, and returns this as news."""
        self.stream.close()
        self.ended = True
        return _News(self._to, pieces, True, out_of_memory(error) or error)


def _receive(news: Seq[_News]) -> None:
    """Hands streams what is new; called in their event loop."""
    for to, pieces, ended, error in news:
        if (stream := to()) is not None:
            stream._arrived(pieces, ended, error)


class AsyncLLM(Configured):
    """A loaded model for asyncio: `LLM` with methods to await, and streams for `async for`.

    Loading blocks the event loop; `await asyncio.to_thread(AsyncLLM, model, ...)` does not. Arguments are those of
    `LLM`.

    Attributes:
        llm: the model itself. Its methods block, and other threads may call them meanwhile.
    """

    llm: LLM

    def _open(self, model: str | Path, config: EngineConfig) -> None:
        self._use(LLM(model, **vars(config)))

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """An `AsyncLLM` of a model that is loaded already."""
        self = cls.__new__(cls)
        self._use(llm)
        return self

    def _use(self, llm: LLM) -> None:
        self.llm = llm
        self._new, self._active = list[_Request](), list[_Request]()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._compute, name="quengine-async", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Number of requests of streams that are under way, queued ones among them."""
        with self._changed:
            return len(self._new) + len(self._active)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, index: int = 0
    ) -> AsyncStream[CompletionStream]:
        """Completes one prompt, as `LLM.stream`. Errors are raised by the first iteration."""
        return AsyncStream(self, partial(self.llm.stream, prompt, params, index=index))

    def stream_chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        tools: Seq[Message] | None = None,
        tool_choice: str | Message | None = None,
    ) -> AsyncChatStream:
        """Answers a conversation, as `LLM.stream_chat`. Errors are raised by the first iteration."""
        make = partial(self.llm.stream_chat, messages, params, tools=tools, tool_choice=tool_choice)
        return AsyncChatStream(self, make)

    async def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completes each prompt `params.n` times, in order, as `LLM.generate`."""
        listed = as_prompts(prompts)
        each = [None] * len(listed) if params is None else params_of_each(params, len(listed))
        return await _finished(
            [
                self.stream(prompt, given, index=index)
                for prompt, given in zip(listed, each, strict=True)
                for index in range(1 if given is None else given.n)
            ]
        )

    async def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        tools: Seq[Message] | None = None,
        tool_choice: str | Message | None = None,
    ) -> Completion:
        """Answers a conversation, as `LLM.chat`."""
        return await self.stream_chat(messages, params, tools=tools, tool_choice=tool_choice).finish()

    async def embed(
        self, prompts: Prompt | Seq[Prompt], pooling: Pooling | None = None, task: str | None = None
    ) -> list[list[float]]:
        """A unit-length embedding for each prompt, as `LLM.embed`."""
        return await asyncio.to_thread(self.llm.embed, prompts, pooling, task)

    async def score(self, prompt: str | Seq[int], choices: Seq[str]) -> list[ChoiceScore]:
        """The log-probability of each choice after the prompt, as `LLM.score`."""
        return await asyncio.to_thread(self.llm.score, prompt, choices)

    async def perplexity(self, text: str, ctx: int | None = None, *, stride: int = 0) -> Perplexity:
        """The perplexity of a text, as `LLM.perplexity`."""
        return await asyncio.to_thread(partial(self.llm.perplexity, text, ctx, stride=stride))

    def close(self) -> None:
        """Ends all requests, and closes the model as `LLM.close`; waits for the step that is being computed."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.llm.close()

    async def aclose(self) -> None:
        """`close` beside the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _submit(self, request: _Request) -> None:
        with self._changed:
            if self._closing:
                raise closed_error()
            self._new.append(request)
            self._changed.notify()

    def _compute(self) -> None:
        """Computes requests as long as there are any; in a thread of its own."""
        while True:
            with self._changed:
                while not (self._new or self._active or self._closing):
                    self._changed.wait()
                new, self._new = self._new, []
                self._active += new
                if self._closing:
                    break
            _send({request: _queue(request) for request in new})
            self._active = [request for request in self._active if not request.ended]
            _send(self._step(self._active))
            self._active = [request for request in self._active if not request.ended]
        _send({request: request.failed(closed_error()) for request in self._active})
        self._active.clear()

    def _step(self, active: Seq[_Request]) -> dict[_Request, _News | None]:
        """Computes one step; returns what is new for each request. An error ends all of them."""
        try:
            self.llm.step()
        except Exception as error:
            return {request: request.failed(error) for request in active}
        return {request: request.news() for request in active}


def _queue(request: _Request) -> _News | None:
    """Queues a request; returns the error as news if that fails, else None."""
    try:
        request.stream.start()
    except Exception as error:
        return request.failed(error)
    return None


def _send(found: Mapping[_Request, _News | None]) -> None:
    """Sends what is new to the event loops, once to each."""
    loops = dict[asyncio.AbstractEventLoop, list[tuple[_Request, _News]]]()
    for request, news in found.items():
        if news is not None:
            loops.setdefault(request.loop, []).append((request, news))
    for loop, together in loops.items():
        try:
            loop.call_soon_threadsafe(_receive, [news for _, news in together])
        except RuntimeError:  # the loop is closed, and nobody waits any more
            for request, _ in together:
                request.stream.close()
                request.ended = True


async def _finished(streams: Seq[AsyncStream[CompletionStream]]) -> list[Completion]:
    """The completions of all streams. If one fails, or the task is cancelled, all streams are closed."""
    try:
        return list(await asyncio.gather(*(stream.finish() for stream in streams)))
    finally:
        for stream in streams:
            stream.close()
