"""Tokenizing and chat templates for the server's event loop: short jobs run in a thread, long ones in a process.

There is one process for long jobs and one for very long ones, so that a document never waits for megabytes. Each does
one job at a time, and starts with the first one (half a second).
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from quengine.kernels.child_process import ChildProcess
from quengine.serve.processes.shared_model import ServedModel, TextFiles
from quengine.serve.processes.shared_text import TextJob, TextResult, perform
from quengine.serve.processes.text_main import MEMORY_BYTES, OUT_OF_MEMORY
from quengine.serve.schemas.errors import ApiError, bad_request

logger = logging.getLogger("quengine.serve")

SHORT_BYTES = 8 << 10
"""The most bytes of a short job, as JSON: it holds the interpreter's lock for a few milliseconds at most."""
LONG_BYTES = 256 << 10
"""The most bytes of a long job; a larger one is very long."""
SECONDS = 60.0
"""Seconds that one job may take in a process."""
LONG_WAITING, VERY_LONG_WAITING = 128, 16
"""The most jobs that may wait for the process of long ones, and for that of very long ones."""
_ABORTED = -6  # by SIGABRT: what a library does that is refused memory
_THREADS = 4
_END_SECONDS = 1.0

_encoder = msgspec.json.Encoder()
_results = msgspec.msgpack.Decoder(TextResult)


class TextPool:
    """Does the jobs of all requests. Called in the event loop."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._closed = False
        self._threads = ThreadPoolExecutor(_THREADS, "text")
        self._long, self._very_long = _Lane("long", LONG_WAITING), _Lane("very long", VERY_LONG_WAITING)

    async def perform(self, model: ServedModel, job: TextJob) -> TextResult:
        """The result of a job. Cancelling the call ends the job.

        Raises:
            ApiError: the text or the template is to blame, the job took too much time or memory, too many jobs wait,
                or the pool is closed.
        """
        if job.kind == "encode" and not any(isinstance(part, str) for ids in job.prompts for part in ids):
            return perform(model, job)  # token ids: nothing to tokenize
        message, source = _encoder.encode(job), model.source
        try:
            if source is None or len(message) <= SHORT_BYTES:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, perform, model, job)
            else:
                lane = self._long if len(message) <= LONG_BYTES else self._very_long
                result = await lane.perform(source, message, self._seconds)
        except (ApiError, RuntimeError, asyncio.CancelledError):
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise ApiError(503, "the engine has stopped", code="stopped", retry_after=5) from None
        if result.error is not None:
            raise bad_request(result.error)
        return result

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._closed = True
        self._long.close()
        self._very_long.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Lane:
    """One process, and the jobs that wait for it in their order."""

    def __init__(self, name: str, most_waiting: int) -> None:
        self._name = name
        self._most_waiting = most_waiting
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, f"text-{name}")
        self._closed = False
        self._process: _TextProcess | None = None

    async def perform(self, source: TextFiles, message: bytes, seconds: float) -> TextResult:
        if self._waiting >= self._most_waiting:
            raise ApiError(
                429,
                f"{self._waiting} {self._name} prompts wait to be tokenized, no more may",
                code="queue_full",
                retry_after=5,
            )
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            if self._closed:
                raise RuntimeError("closed while others had their turn")
            return await self._exchange(source, message, seconds)
        finally:
            self._turn.release()

    async def _exchange(self, source: TextFiles, message: bytes, seconds: float) -> TextResult:
        process = self._process
        if process is None or process.code is not None:
            process = self._process = _TextProcess(source)
            logger.debug("process %d started for %s prompts", process.pid, self._name)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, process.out_of_time)
        answer = loop.run_in_executor(self._thread, process.request, message)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            process.close()
            await asyncio.wait([answer])
            answer.exception()
            raise
        except (EOFError, OSError):
            raise self._ended(process, len(message), seconds) from None
        finally:
            timer.cancel()

    def _ended(self, process: "_TextProcess", size: int, seconds: float) -> ApiError:
        """The error of a process that gave no answer."""
        code = process.close(_END_SECONDS)
        logger.warning(
            "the process that tokenizes %s prompts ended (%d) over %d bytes", self._name, code, size
        )
        what = f"the request's text ({size} bytes as JSON)"
        if process.late:
            return bad_request(f"{what} takes more than {seconds:g} s to tokenize", code="over_limit")
        if code in (OUT_OF_MEMORY, _ABORTED):
            memory = MEMORY_BYTES >> 20
            return bad_request(
                f"{what} takes more than {memory} MiB of memory to tokenize", code="over_limit"
            )
        return ApiError(
            500, "the process that tokenizes long prompts has ended; another one is started when needed"
        )

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.close(_END_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)


class _TextProcess(ChildProcess[TextResult]):
    """A running `text_main`."""

    def __init__(self, source: TextFiles) -> None:
        self.late = False
        super().__init__(("-m", "quengine.serve.processes.text_main"), _results, [str(source.path)])
        with suppress(OSError):  # of a process that has ended at once the first request says so
            self.channel.send_bytes(_encoder.encode(source.template))

    def request(self, message: bytes) -> TextResult:
        """The answer to a request. Called in a thread. Raises EOFError or OSError if the process ends without one."""
        self.channel.send_bytes(message)
        result = self.channel.receive()
        if result.last:
            self.close(_END_SECONDS)
        return result

    def out_of_time(self) -> None:
        self.late = True
        self.kill()
