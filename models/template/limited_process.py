"""A process with limits. It runs code from a model's file (a chat template's program, a tokenizer's patterns), or
decodes the image files of requests.

Processor time and memory are bounded by the kernel there, so that whatever such a file asks for ends in an error here.
"""

import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

from quengine.kernels.channel import TooLongError
from quengine.kernels.child_process import ChildProcess

# Wall-clock seconds for one answer, beyond the worker's own limits: for a process that is stopped or starved.
PATIENCE_SECONDS = 20.0
MAX_ANSWER_BYTES = 128 << 20

Answer: TypeAlias = dict[str, Any]


class ProcessStoppedError(Exception):
    """The process died or was stopped, for the reason in the message."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a worker: seconds of processor time for one answer, bytes of address space, and seconds to wait for an
    answer; None: PATIENCE_SECONDS."""

    cpu_seconds: float
    memory_bytes: int
    patience_seconds: float | None = None


class _PythonJson:
    """A JSON decoder for all that `json.dumps` writes, lone surrogates included."""

    def decode(self, buf: bytearray, /) -> Answer:
        answer: Answer = json.loads(buf)
        return answer


class LimitedProcess:
    """Sends questions to a worker, whose process starts with the first one.

    worker: a Python file that runs a `LimitedWorker`, which gets `setup` and answers each question. descriptors: those
    that stay open in the process, under their numbers.
    """

    def __init__(
        self, worker: Path, setup: Any, limits: ProcessLimits, descriptors: Sequence[int] = ()
    ) -> None:
        self._worker, self._descriptors = worker, descriptors
        self._setup = setup
        self._limits = limits
        self._lock = Lock()
        self._process: ChildProcess[Answer] | None = None

    def ask(self, question: Any) -> Answer:
        """The worker's answer.

        Raises ProcessStoppedError, and TypeError or ValueError for a question that is no JSON value.
        """
        request = json.dumps(question).encode()
        with self._lock:
            process = self._process
            if process is None or process.code is not None:
                self._stop()
                process = self._process = self._start()
            try:
                return self._exchange(process, request)
            except BaseException:
                self._stop()
                raise

    def start(self) -> None:
        """Starts the process now; without this it starts with the first question."""
        with self._lock:
            if self._process is None:
                self._process = self._start()

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        self._stop()

    def _start(self) -> ChildProcess[Answer]:
        limits = [str(self._limits.cpu_seconds), str(self._limits.memory_bytes)]
        try:
            process = ChildProcess(
                (str(self._worker),), _PythonJson(), limits, descriptors=self._descriptors, quiet=True
            )
        except OSError as failure:
            raise ProcessStoppedError(f"no process could be started for it: {failure}") from None
        with suppress(OSError):  # `_exchange` reports why
            process.channel.send_bytes(json.dumps(self._setup).encode())
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _exchange(self, process: ChildProcess[Answer], request: bytes) -> Answer:
        patience = self._limits.patience_seconds or PATIENCE_SECONDS
        try:
            process.channel.send_bytes(request)
            return process.channel.receive(patience, MAX_ANSWER_BYTES)
        except TimeoutError:
            raise ProcessStoppedError(f"not done after {patience:g} seconds") from None
        except TooLongError:
            raise ProcessStoppedError(f"gives more than {MAX_ANSWER_BYTES >> 20} MiB") from None
        except (EOFError, OSError):
            raise self._ended(process) from None

    def _ended(self, process: ChildProcess[Answer]) -> ProcessStoppedError:
        """Why the process is gone. A native library that gets no more memory aborts or, at times, crashes."""
        status = process.wait()
        if status == -signal.SIGVTALRM:
            return ProcessStoppedError(f"takes more than {self._limits.cpu_seconds:g} seconds")
        if status in (-signal.SIGABRT, -signal.SIGSEGV):
            mib = self._limits.memory_bytes >> 20
            return ProcessStoppedError(
                f"its process, which may use {mib} MiB of memory, ended with {signal.Signals(-status).name}"
            )
        return ProcessStoppedError(f"its process ended with status {status}")
