"""Streams over one request: iterating computes it and yields its text."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, Self

from quengine.platform.out_of_memory import out_of_memory
from quengine.request.output import Completion
from quengine.request.sequence import Sequence
from quengine.structured.answer_parser import AnswerParser
from quengine.structured.schema_check import schema_violation
from quengine.structured.tool_calls import Delta, TextDelta, collect, reasoning_of


class StreamEngine(Protocol):
    """The engine that computes the requests of streams: an LLM. Thread-safe."""

    dropped: deque[Sequence]
    """Cancelled sequences that are still to be removed from the scheduler."""

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises EngineError if it does not fit into the cache, or in a forked process."""
        ...

    def step(self) -> object:
        """Computes one batch, or waits for the batch that another thread computes."""
        ...

    def end_step(self) -> None:
        """Waits until the current step, if any, is done."""
        ...

    def cancel(self, sequence: Sequence) -> None:
        """Removes a sequence, now or before the next step. Never waits."""
        ...

    def completion(self, sequence: Sequence) -> Completion:
        """The completion of a finished or interrupted sequence."""
        ...


class CompletionStream:
    """One request: iterate over the stream for its text, then read `completion`.

    The request is cancelled when the stream is closed or garbage-collected; leaving the loop is enough if only the
    loop holds the stream (`for piece in llm.stream(...)`). `completion` then holds what was generated, with
    finish_reason "abort". Iteration over a stream that is kept can be resumed; until then its request is still
    scheduled among the others. Not thread-safe.

    Attributes:
        progress: if set, called before each step until the first token, with the number of prompt tokens computed so
            far and their total.
    """

    # No attribute may refer back to the stream (no bound method, no generator over `self`), or the stream would
    # outlive its last reference until the next garbage collection.

    def __init__(self, engine: StreamEngine, sequence: Sequence) -> None:
        self._engine = engine
        self.sequence = sequence
        self.progress: Callable[[int, int], None] | None = None
        self._started = False
        self._closed = False
        self._ended: Completion | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if self._closed:
            raise StopIteration
        try:
            self.start()
            # Steps of other threads and other streams advance this sequence too.
            while (text := self.read()) == "":
                if self.progress is not None and not self.sequence.generated:
                    total = self.sequence.num_prompt_tokens
                    self.progress(min(self.sequence.num_cached_tokens, total), total)
                self._engine.step()
            if text is None:
                raise StopIteration
            return text
        except BaseException as error:
            # A single C call: a second interrupt may come at any point, and must find the sequence noted.
            self._engine.dropped.append(self.sequence)
            self.close()
            if (problem := out_of_memory(error)) is not None:
                raise problem from error
            raise

    def __del__(self) -> None:
        if self._started and not self._closed:
            self.close()

    def deltas(self) -> Iterator[Delta]:
        """The pieces of text, each as a delta of the answer."""
        return map(TextDelta, self)

    @property
    def completion(self) -> Completion:
        return _checked(self._whole, self.sequence)

    @property
    def _whole(self) -> Completion:
        """The completion with its raw text. If the stream was read to its end, also once the engine is closed."""
        return self._ended or self._engine.completion(self.sequence)

    @property
    def closed(self) -> bool:
        """Whether the request was cancelled, has failed, or was iterated over to its end."""
        return self._closed

    def start(self) -> None:
        """Queues the request now instead of at the first iteration. It must then be finished or closed.

        Raises:
            EngineError: the request does not fit into the cache.
        """
        if not self._started:
            self._started = True
            self._engine.add(self.sequence)

    def read(self) -> str | None:
        """The text that is new: "" where there is none yet, None at the end. Computes nothing.

        Raises:
            Exception: why the sequence could not go on.
        """
        if text := self.sequence.stream.read():
            return text
        if not self.sequence.finished:
            return ""
        self._engine.end_step()
        if text := self.sequence.stream.read():
            return text
        if self.sequence.error is not None:
            raise self.sequence.error
        self._ended = self._engine.completion(self.sequence)
        return None

    def finish(self) -> Completion:
        """Computes the request to its end, and returns its completion."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Cancels the request, unless it has finished."""
        self._engine.cancel(self.sequence)
        self._closed = True


def _checked(completion: Completion, sequence: Sequence) -> Completion:
    """The completion, with the violation of its JSON schema if its text is not valid under it."""
    spec = sequence.sampler.params.constraint
    if completion.finish_reason != "stop" or spec is None or not spec.schema:
        return completion
    return replace(completion, schema_violation=schema_violation(spec.schema, completion.text))


class ChatStream(CompletionStream):
    """The answer to a conversation: iterate over it for the text, or over `deltas` for reasoning and tool calls too.

    `completion` has the text, the reasoning and the tool calls without the markup of the model's answer format.
    `new_parser` creates a parser for one answer.
    """

    def __init__(
        self, engine: StreamEngine, sequence: Sequence, new_parser: Callable[[], AnswerParser]
    ) -> None:
        super().__init__(engine, sequence)
        self._new_parser = new_parser
        self._parser: AnswerParser | None = new_parser()

    def __next__(self) -> str:
        while True:
            if text := "".join(delta.text for delta in self._next_deltas() if isinstance(delta, TextDelta)):
                return text

    def deltas(self) -> Iterator[Delta]:
        """The parts of the answer, as soon as they are certain."""
        while True:
            try:
                found = self._next_deltas()
            except StopIteration:
                return
            yield from found

    @property
    def completion(self) -> Completion:
        completion, parser = self._whole, self._new_parser()
        deltas = parser.push(completion.text)
        if self.sequence.finished:
            deltas += parser.finish()
        text, calls = collect(deltas)
        answer = replace(completion, text=text, reasoning=reasoning_of(deltas), tool_calls=calls)
        return _checked(answer, self.sequence)

    def parse(self, text: str | None) -> list[Delta]:
        """The parts of the answer that become certain with `text`, the next piece of raw text; None: it has ended."""
        if self._parser is None:
            return []
        if text is not None:
            return self._parser.push(text)
        deltas = self._parser.finish()
        self._parser = None
        return deltas

    def _next_deltas(self) -> list[Delta]:
        if self._closed or self._parser is None:
            raise StopIteration
        try:
            return self.parse(super().__next__())
        except StopIteration:
            return self.parse(None)
