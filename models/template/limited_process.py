"""A process with limits that runs what a model's file brings: a chat template's program, a tokenizer's patterns.

Processor time and memory are bounded by the kernel there, so that whatever such a file asks for ends in an error here.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

# Wall-clock seconds for one answer, beyond the worker's own limits: for a process that is stopped or starved.
PATIENCE_SECONDS = 20.0
MAX_ANSWER_BYTES = 128 << 20


class ProcessStoppedError(Exception):
    """The process died or was stopped; the message says why."""


@dataclass(frozen=True)
class Limits:
    """What a worker may use: seconds of processor time for one answer, bytes of address space."""

    cpu_seconds: float
    memory_bytes: int


class LimitedProcess:
    """Asks a worker again and again; its process starts with the first question.

    worker: a Python file, run alone. It gets the limits as arguments, `setup` as its first line of standard input, then
    a JSON line a question, and answers each with a JSON line.
    """

    def __init__(self, worker: Path, setup: Any, limits: Limits) -> None:
        self._worker = worker
        self._setup = setup
        self._limits = limits
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Any) -> dict[str, Any]:
        """The worker's answer.

        Raises ProcessStoppedError, and TypeError or ValueError for a question that is no JSON value.
        """
        request = json.dumps(question).encode() + b"\n"
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = self._start()
            try:
                return self._exchange(process, request)
            except BaseException:
                self._stop()
                raise

    def start(self) -> None:
        """Starts the process now, so that it is up when the first question comes."""
        with self._lock:
            if self._process is None:
                self._process = self._start()

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        self._stop()

    def _start(self) -> "subprocess.Popen[bytes]":
        limits = [str(self._limits.cpu_seconds), str(self._limits.memory_bytes)]
        # -P: the worker's own folder is no place to import from. A session of its own: Ctrl-C is not for it.
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(self._worker), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as failure:
            raise ProcessStoppedError(f"no process could be started for it: {failure}") from None
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # `_exchange` says why
            process.stdin.write(json.dumps(self._setup).encode() + b"\n")
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was not yet written is for nobody
                    pipe.close()

    def _exchange(self, process: "subprocess.Popen[bytes]", request: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            raise self._ended(process) from None
        answer: dict[str, Any] = json.loads(self._line(process))
        return answer

    def _line(self, process: "subprocess.Popen[bytes]") -> bytes:
        assert process.stdout is not None
        give_up = time.monotonic() + PATIENCE_SECONDS
        received: list[bytes] = []
        size = 0
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not (received and received[-1].endswith(b"\n")):
                if not selector.select(max(0.0, give_up - time.monotonic())):
                    raise ProcessStoppedError(f"not done after {PATIENCE_SECONDS:g} seconds")
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._ended(process)
                received.append(piece)
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    raise ProcessStoppedError(f"gives more than {MAX_ANSWER_BYTES >> 20} MiB")
        return b"".join(received)

    def _ended(self, process: "subprocess.Popen[bytes]") -> ProcessStoppedError:
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
