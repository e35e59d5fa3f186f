"""One request being computed, as its user iterates over it."""

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
    """What computes the requests of streams: an LLM. Any thread may call it."""

    dropped: deque[Sequence]
    """Sequences that were cancelled and are still to be taken out."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises EngineError where it does not fit into the cache, or after a fork."""
        ...

    def step(self) -> object:
        """Compute one batch, or wait for the one that another thread computes."""
        ...

    def end_step(self) -> None:
        """Wait for the step under way, if there is one."""
        ...

    def cancel(self, sequence: Sequence) -> None:
        """Take a sequence out, now or before the next step. Never waits."""
        ...

    def completion(self, sequence: Sequence) -> Completion:
        """What a finished or interrupted sequence has come to."""
        ...


class CompletionStream:
    """One request being computed: iterate for its text, then read `completion`.

    Once it is closed, or no longer referred to, the request is cancelled; leaving the loop is enough where only the
    loop has the stream (`for piece in llm.stream(...)`). `completion` then holds what was generated, with finish_reason
    "abort". Iteration over a stream that is kept can be resumed; until then its request has its turn among others. For
    one thread at a time. `progress`, if any, is called before each step until the first token, with the tokens of the
    prompt that are computed, and all of them.
    """

    # Nothing here may lead back to the stream (no bound method, no generator over `self`): it would outlive its last
    # reference until the next garbage collection.

    def __init__(self, engine: StreamEngine, sequence: Sequence) -> None:
        self._engine = engine
        self.sequence = sequence
        self.progress: Callable[[int, int], None] | None = None
        self._started = False
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if self._closed:
            raise StopIteration
        try:
            self.start()
            # Steps of other threads, and for other streams, bring this sequence on as well.
            while not (text := self.sequence.stream.read()):
                if self.sequence.finished:
                    return self._end()
                if self.progress is not None and not self.sequence.generated:
                    total = self.sequence.num_prompt_tokens
                    self.progress(min(self.sequence.num_cached_tokens, total), total)
                self._engine.step()
            return text
        except BaseException as error:
            # One call of C: a second interrupt may come anywhere, and finds the sequence noted.
            self._engine.dropped.append(self.sequence)
            self.close()
            if (problem := out_of_memory(error)) is not None:
                raise problem from error
            raise

    def __del__(self) -> None:
        if self._started and not self._closed:
            self.close()

    def deltas(self) -> Iterator[Delta]:
        """The pieces of text, as an answer's parts."""
        return map(TextDelta, self)

    @property
    def completion(self) -> Completion:
        return _checked(self._engine.completion(self.sequence), self.sequence)

    def start(self) -> None:
        """Queue the request now; else the first iteration does. Then it must be finished or closed.

        Raises:
            EngineError: the request does not fit into the cache.
        """
        if not self._started:
            self._started = True
            self._engine.add(self.sequence)

    def finish(self) -> Completion:
        """Compute to the end."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Cancel the request, unless it has finished."""
        self._engine.cancel(self.sequence)
        self._closed = True

    def _end(self) -> str:
        """The last piece of a sequence that has finished meanwhile. Raises its error, or StopIteration."""
        self._engine.end_step()
        if text := self.sequence.stream.read():
            return text
        if self.sequence.error is not None:
            raise self.sequence.error
        raise StopIteration


def _checked(completion: Completion, sequence: Sequence) -> Completion:
    """A completion with what of its text is not valid under its schema."""
    spec = sequence.sampler.params.constraint
    if completion.finish_reason != "stop" or spec is None or not spec.schema:
        return completion
    return replace(completion, schema_violation=schema_violation(spec.schema, completion.text))


class ChatStream(CompletionStream):
    """An answer of a conversation: iterate for its text, or over `deltas` for its reasoning and calls too.

    `completion` has the text and the reasoning, each without the marks of the model's form. `new_parser` makes a
    parser for one answer.
    """

    def __init__(
        self, engine: StreamEngine, sequence: Sequence, new_parser: Callable[[], AnswerParser]
    ) -> None:
        super().__init__(engine, sequence)
        self._new_parser = new_parser
        self._parser: AnswerParser | None = new_parser()

    def __next__(self) -> str:
        while True:
            if text := collect(self._next_deltas())[0]:
                return text

    def deltas(self) -> Iterator[Delta]:
        """The parts of the answer as they become certain."""
        while True:
            try:
                found = self._next_deltas()
            except StopIteration:
                return
            yield from found

    @property
    def completion(self) -> Completion:
        completion, parser = self._engine.completion(self.sequence), self._new_parser()
        deltas = parser.push(completion.text)
        if self.sequence.finished:
            deltas += parser.finish()
        answer = replace(completion, text=collect(deltas)[0], reasoning=reasoning_of(deltas))
        return _checked(answer, self.sequence)

    def _next_deltas(self) -> list[Delta]:
        if self._closed or self._parser is None:
            raise StopIteration
        try:
            return self._parser.push(super().__next__())
        except StopIteration:
            deltas = self._parser.finish()
            self._parser = None
            return deltas
