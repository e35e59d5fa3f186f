"""Runs programs for tools, with limits on time and output and with few environment variables. When a program ends, so
does all that it started. `exec_shell_command` is the tool.

A command without anything for a shell to interpret runs without one. On Linux a process of `confine` supervises it, and
confines it unless the server was started with --no-confine-commands.
"""

import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from msgspec import Meta, Struct

from quengine import kernels
from quengine.errors import CannotRunError
from quengine.serve.tool_options import COMMANDS
from quengine.serve.tools.tool import (
    Answer,
    ServerTool,
    ToolError,
    ToolInput,
    Write,
    read_arguments,
    schema_of,
)
from quengine.serve.tools.workspace import Workspace

MAX_OUTPUT = 16 << 10
"""Bytes."""
MAX_SECONDS = 60
_POLL_SECONDS = 0.02
_LAST_SECONDS = 0.2
PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TERM", "TMPDIR", "TZ")
"""Environment variables that programs get: the server's others may be keys."""
_KEEPER = (
    *(sys.executable, "-I", "-S", "-c"),
    "import sys; sys.path.append(sys.argv.pop(1)); from confine.keeper import main; main()",
    str(Path(kernels.__file__).parent),
)
"""What keeps a command: it imports nothing of this package beside `confine`."""
_KEEPER_SECONDS = 10.0
"""For it to end all that the command has started."""
_PLAIN = re.compile(r"""[\w@%+:,./\- '"=]+""", re.ASCII)
"""Commands that a shell would only split."""


@dataclass(frozen=True)
class Ended:
    """The result of a program. code: -N for signal N; None: its time was over. cut: its output was longer than kept."""

    output: bytes
    code: int | None
    cut: bool


class ShellCommand(Struct):
    command: Annotated[str, Meta(min_length=1, description="The command, as for sh")]
    timeout: Annotated[int, Meta(ge=1, description=f"Seconds, at most {MAX_SECONDS}")] = 10
    max_output_size: Annotated[int, Meta(ge=0, description=f"Bytes of output, at most {MAX_OUTPUT}")] = (
        MAX_OUTPUT
    )


def check_confinement(as_root: bool) -> None:
    """Raises CannotRunError where this machine cannot confine commands, and for root without `as_root`."""
    if sys.platform == "linux":
        from quengine.kernels.confine import landlock, privileges

        if landlock.version() > 0 and privileges.supported():
            if os.geteuid() == 0 and not as_root:
                raise CannotRunError(
                    f"{COMMANDS} as root reads root's files of the system: start the server as another user, or give "
                    "--commands-as-root"
                )
            return
    raise CannotRunError(
        f"{COMMANDS} cannot be confined here, which takes Landlock (Linux 5.13, x86-64 or ARM64): leave it out, or "
        "give --no-confine-commands if commands may do whatever you may do"
    )


def command_tool(workspace: Workspace, confined: bool) -> ServerTool:
    async def run(call: ToolInput) -> Answer:
        given = read_arguments(ShellCommand, call)
        folder, seconds = call.folder or workspace.root, min(given.timeout, MAX_SECONDS)
        most = min(given.max_output_size, MAX_OUTPUT)
        arguments = arguments_of(given.command)
        with TemporaryDirectory(prefix="quengine-") as temporary:
            variables = {"TMPDIR": temporary}
            if confined:
                variables["HOME"] = temporary
            if kept := sys.platform == "linux":
                how = "confined" if confined else "free"
                arguments = [*_KEEPER, how, str(workspace.root), temporary, *arguments]
            ended = await run_program(
                arguments, folder, seconds, most, write=call.write, variables=variables, kept=kept
            )
        told = f"[exit code: {ended.code}]" if ended.code is not None else f"[ended after {seconds} s]"
        tail = "\n[output truncated]" * ended.cut + f"\n{told}"
        if call.write is not None:
            call.write(tail)
        return {"plain_text_response": ended.output.decode(errors="replace") + tail}

    return ServerTool(
        COMMANDS,
        "Run a command",
        "Run a shell command; the answer has its output and its exit code.",
        schema_of(ShellCommand),
        run,
        changes=True,
        streams=True,
    )


def arguments_of(command: str) -> list[str]:
    """The program and its arguments where no shell is needed, else those of a shell. Raises ToolError."""
    if "\0" in command:
        raise ToolError("a command cannot hold a NUL byte")
    if _PLAIN.fullmatch(command):
        with suppress(ValueError):  # a quotation mark too many, which the shell tells of
            words = shlex.split(command)
            if words and "=" not in words[0] and shutil.which(words[0]):
                return words
    return ["/bin/sh", "-c", command]


async def run_program(
    arguments: Sequence[str],
    folder: Path,
    seconds: float,
    most: int,
    *,
    given: bytes | None = None,
    write: Write | None = None,
    descriptors: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
    kept: bool = False,
) -> Ended:
    """Run a program until it ends, its time is over, or the caller is cancelled; then its process group is killed.

    `most` bytes of output and errors are kept, and passed to `write` as they come. given: its standard input. kept: the
    program supervises others (`confine`), so it is first asked to end, with all that it has started in other groups.

    Raises:
        ToolError: it cannot be started.
    """
    environment = {
        name: value for name, value in os.environ.items() if name in PASSED or name.startswith("LC_")
    }
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            cwd=folder,
            env={**environment, **(variables or {})},
            stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=descriptors,
            start_new_session=True,
        )
    except OSError as error:
        raise ToolError(f"{arguments[0]}: it cannot be run: {error.strerror}") from None
    output = _Output(most, write)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if process.stdin is not None:
                    process.stdin.write(given or b"")
                    process.stdin.close()
                await _read(process, output)
                return Ended(bytes(output.kept), process.returncode, output.cut)
        return Ended(bytes(output.kept), None, output.cut)
    finally:
        with suppress(ProcessLookupError, TimeoutError):
            if kept and process.returncode is None:
                process.terminate()
                async with asyncio.timeout(_KEEPER_SECONDS):
                    await process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _Output:
    def __init__(self, most: int, write: Write | None) -> None:
        self.kept = bytearray()
        self.cut = False
        self._most = most
        self._write = write

    def add(self, part: bytes) -> None:
        room = self._most - len(self.kept)
        self.cut = self.cut or len(part) > room
        part = part[:room]
        self.kept += part
        if part and self._write is not None:
            self._write(part.decode(errors="replace"))


async def _read(process: asyncio.subprocess.Process, output: _Output) -> None:
    """Reads until the process has ended, and a moment longer for its last output. Programs that it started may keep the
    output open."""
    assert process.stdout is not None
    polls = 0
    while polls * _POLL_SECONDS < _LAST_SECONDS:
        polls += process.returncode is not None
        try:
            part = await asyncio.wait_for(process.stdout.read(1 << 14), _POLL_SECONDS)
        except TimeoutError:
            continue
        output.add(part)
        if not part and process.returncode is not None:
            return
        if not part:  # it has closed its output and goes on
            await asyncio.sleep(_POLL_SECONDS)
