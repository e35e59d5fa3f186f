"""One request being computed, as its user iterates over it."""

from typing import TYPE_CHECKING, Self

from quengine.request.output import Completion
from quengine.request.sequence import Sequence

if TYPE_CHECKING:
    from quengine.llm import LLM


class CompletionStream:
    """One request being computed: iterate for its text, then read `completion`.

    Once it is closed, or no longer referred to, the request is cancelled; leaving the loop is enough where only the
    loop has the stream (`for piece in llm.stream(...)`). `completion` then holds what was generated, with finish_reason
    "abort". Iteration over a stream that is kept can be resumed; until then its request has its turn among others. For
    one thread at a time.
    """

    # Nothing here may lead back to the stream (no bound method, no generator over `self`): it would outlive its last
    # reference until the next garbage collection.

    def __init__(self, llm: "LLM", sequence: Sequence) -> None:
        self._llm = llm
        self.sequence = sequence
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
                self._llm.step()
            return text
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        if self._started and not self._closed:
            self.close()

    @property
    def completion(self) -> Completion:
        return self._llm.completion(self.sequence)

    def start(self) -> None:
        """Queue the request now; else the first iteration does. Then it must be finished or closed.

        Raises:
            EngineError: the request does not fit into the cache.
        """
        if not self._started:
            self._started = True
            self._llm._add(self.sequence)

    def finish(self) -> Completion:
        """Compute to the end."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """Cancel the request, unless it has finished."""
        self._closed = True
        self._llm._cancel(self.sequence)

    def _end(self) -> str:
        """The last piece of a sequence that has finished meanwhile. Raises its error, or StopIteration."""
        self._llm._end_step()
        if text := self.sequence.stream.read():
            return text
        if self.sequence.error is not None:
            raise self.sequence.error
        raise StopIteration
