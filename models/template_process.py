"""Starts, asks and stops the process that renders one chat template (`template_worker`).

Knows how to wait and when to give up. Does not know what templates or messages mean.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock
from typing import Any

# Beyond the worker's own limit on its time: for one that is stuck within a single operation.
PATIENCE_SECONDS = 20.0
_WORKER = Path(__file__).with_name("template_worker.py")


class RenderingStoppedError(Exception):
    """The process died or was stopped; the message says why."""


class TemplateProcess:
    """Renders one template, again and again, in a process that starts with the first rendering (0.1 s)."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, variables: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer, {"text"} or {"error", "line"}.

        Raises RenderingStoppedError, and TypeError or ValueError for variables that are not JSON.
        """
        request = json.dumps({"variables": variables}).encode() + b"\n"
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
        """Starts the process now, so that it is up when the first rendering comes."""
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
        # -P: the worker's own folder is no place to import from. A session of its own: Ctrl-C is not for it.
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as failure:
            raise RenderingStoppedError(f"no process could be started for it: {failure}") from None
        assert process.stdin is not None
        process.stdin.write(json.dumps({"source": self._source}).encode() + b"\n")
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, process: "subprocess.Popen[bytes]", request: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            raise RenderingStoppedError(f"its process ended with status {process.wait()}") from None
        answer: dict[str, Any] = json.loads(self._line(process))
        return answer

    def _line(self, process: "subprocess.Popen[bytes]") -> bytes:
        assert process.stdout is not None
        give_up = time.monotonic() + PATIENCE_SECONDS
        received: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not (received and received[-1].endswith(b"\n")):
                if not selector.select(max(0.0, give_up - time.monotonic())):
                    raise RenderingStoppedError(f"not done after {PATIENCE_SECONDS:g} seconds")
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise RenderingStoppedError(f"its process ended with status {process.wait()}")
                received.append(piece)
        return b"".join(received)
