"""Where programs serve that tests start: a port that was found free may be another's before the program has it."""

import random
import re
import socket
import subprocess
from contextlib import suppress
from pathlib import Path


def url_of(program: "subprocess.Popen[str]") -> tuple[str, str]:
    """The address of a program that chose its port (`--port 0`), once it is ready, and what it has said until then on
    its standard error, a pipe."""
    assert program.stderr is not None
    said = ""
    for line in program.stderr:
        said += line
        if "ready" in line:
            return re.findall(r"http://\S+[0-9]", said)[-1], said
    raise AssertionError(f"the program ended before it was ready: {said}")


def free_port() -> int:
    """A port for a program that has to be told one: none of those that the kernel gives to whoever names none, if
    there are others."""
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, given_out.read_text().split()) if given_out.exists() else (32768, 60999)
    others = [port for port in range(1024, 1 << 16) if not first <= port <= last] or range(first, last + 1)
    for port in random.SystemRandom().sample(others, min(1000, len(others))):
        with socket.socket() as attempt, suppress(OSError):
            attempt.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"of 1000 ports but those from {first} to {last} none is free")
