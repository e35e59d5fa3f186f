"""Flags of another program that `engine` neither takes nor answers, from the program's own help.

    python -m benchmarks.checks.peer_flags llama-server "vllm serve" "ollama run" "mlx_lm.server"
    python -m benchmarks.checks.peer_flags --help-text help.txt

Each argument is a command, which is run with --help and with --help=all. Prints how many of its flags `engine` takes,
how many `engine/foreign_flags.py` answers, and the names of the others; exits with 1 if there are any.
`tests/cli/peer_flags.txt` keeps the names for a test, so that it needs none of these programs.
"""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

from quengine.foreign_flags import FOREIGN
from tests.cli.test_main import own_flags

_FLAG = re.compile(r"(?<![\w/.-])(--?[A-Za-z][\w-]*(?:\.\d\w*(?:-\w+)*)?)(?=[\s,=\]|)]|$)")
_BEGINS_A_FLAG = re.compile(r"^\s{0,8}-")


def flags_of(text: str) -> set[str]:
    """The flags that the lines of a help text begin with."""
    heads = (re.split(r"\s{2,}", line.strip())[0] for line in text.splitlines() if _BEGINS_A_FLAG.match(line))
    return {flag for head in heads for flag in _FLAG.findall(head)}


def help_of(command: str) -> str:
    """What a command prints about its flags. Raises SystemExit where it cannot be run."""
    texts = []
    for ask in ("--help", "--help=all"):
        try:
            done = subprocess.run([*shlex.split(command), ask], capture_output=True, text=True, timeout=120)
        except OSError as error:
            raise SystemExit(f"{command}: {error}") from None
        texts.append(done.stdout + done.stderr)
    return "\n".join(texts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="*", metavar="COMMAND")
    parser.add_argument("--help-text", type=Path, action="append", default=[], metavar="FILE")
    given = parser.parse_args()
    texts = {str(path): path.read_text() for path in given.help_text}
    texts |= {command: help_of(command) for command in given.commands}
    own, missing = own_flags() | {"-h", "--help", "--version"}, set[str]()
    for name, text in texts.items():
        flags = flags_of(text)
        answered = flags & FOREIGN.keys() - own
        others = flags - own - answered
        print(f"{name}: {len(flags)} flags, {len(flags & own)} taken, {len(answered)} answered")
        print(f"  neither: {' '.join(sorted(others)) or 'none'}")
        missing |= others
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
