"""Requests that are computed to their end together, with reports of how far they are."""

import time
from collections.abc import Sequence as Seq
from typing import Protocol

from quengine.completion_stream import CompletionStream, StreamEngine
from quengine.platform.out_of_memory import memory_errors
from quengine.request.output import BatchProgress, Completion, ShowProgress, show_progress
from quengine.request.sequence import Sequence


class BatchEngine(StreamEngine, Protocol):
    """The engine that computes the requests: an LLM."""

    def step(self) -> Seq[tuple[Sequence, str]]:
        """Computes one batch, and returns its sequences with their new text; none where another thread computes."""
        ...


def finish_all(
    engine: BatchEngine, streams: Seq[CompletionStream], progress: bool | ShowProgress
) -> list[Completion]:
    """The completions of all streams, in order; where one fails, all are cancelled. progress: as for `LLM.generate`."""
    sequences = [stream.sequence for stream in streams]
    try:
        for stream in streams:
            stream.start()
        if progress:
            _report(engine, sequences, show_progress if progress is True else progress)
        return [stream.finish() for stream in streams]
    finally:
        engine.dropped.extend(sequences)
        for stream in streams:
            stream.close()


def _report(engine: BatchEngine, sequences: Seq[Sequence], report: ShowProgress) -> None:
    """Computes requests to their end; reports each time that some have ended."""
    began, done, own = time.perf_counter(), 0, set(sequences)
    while done < len(sequences):
        with memory_errors():
            stepped = engine.step()
        if any(each in own for each, _ in stepped) and not any(each.finished for each, _ in stepped):
            continue  # nor have all ended in a step of another thread
        ended = sum(sequence.finished for sequence in sequences)
        if ended > done:
            done, tokens = ended, sum(len(sequence.generated) for sequence in sequences)
            report(BatchProgress(done, len(sequences), tokens, time.perf_counter() - began))
