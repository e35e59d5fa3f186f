"""Programs run in forks of a process that has imported what they need, which takes seconds for torch or a converter.

A fork is a process of the program's own: what it changes in modules, and how it ends, concerns no other.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn


def without_interpreter(code: str, *arguments: object) -> str:
    """What `code` prints where Triton compiles: in tests it may interpret, and then it compiles nothing.

    Raises:
        AssertionError: the program failed; with what it said.
    """
    # The first operation on the meta device imports torch._dynamo, and that more than a second's modules.
    imports, root = ("benchmarks.checks.aot", "torch._dynamo"), str(Path(__file__).parents[1])
    # The product has Triton keep binaries alone, which Triton tells the processes of tests that follow.
    server = fork_server(imports, (root,), without=("TRITON_INTERPRET", "TRITON_STORE_BINARY_ONLY"))
    return server.run(code, *arguments)


@cache
def fork_server(
    imports: Sequence[str], path: Sequence[str] = (), without: Sequence[str] = ()
) -> "ForkServer":
    """The server that has imported these, of which there is one in each test process.

    path: folders that come first in its `sys.path`. without: variables that its environment lacks.
    """
    return ForkServer(imports, path, {name: v for name, v in os.environ.items() if name not in without})


class ForkServer:
    """A process that forks for each program. It ends when its input does, that is with this process."""

    def __init__(self, imports: Sequence[str], path: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [sys.executable, __file__, json.dumps([imports, path])]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=environment, text=True, start_new_session=True
        )

    def run(self, code: str, *arguments: object) -> str:
        """What the program prints; `arguments` are strings in its `sys.argv`.

        Raises:
            AssertionError: it failed; with what it said.
            OSError, ValueError: the server has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps([code, *map(str, arguments)]), file=self._process.stdin, flush=True)
            status, output, errors = json.loads(self._process.stdout.readline())
        except (
            BaseException
        ):  # it has ended, or the test's time has: what it says later is no answer to another
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            fork_server.cache_clear()
            raise
        assert status == 0, f"{output[-2000:]}\n{errors[-4000:]}"
        return str(output)


def _serve(imports: list[str], path: list[str]) -> None:
    """In the server: a line [code, *arguments] in, a line [status, output, errors] out."""
    sys.path[:1] = path  # and not the folder of this file
    for name in imports:
        __import__(name)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if not child:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                _run(*json.loads(line))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for stream in (output, errors):
                stream.seek(0)
            print(json.dumps([status, output.read(), errors.read()]), flush=True)


def _run(code: str, *arguments: str) -> NoReturn:
    sys.argv = ["-c", *arguments]
    names: dict[str, Any] = {"__name__": "__main__"}
    status = 1
    try:
        exec(compile(code, "<program>", "exec"), names)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
