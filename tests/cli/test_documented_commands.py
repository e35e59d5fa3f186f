"""The command lines in the README, the docs and the help's examples: commands and flags that there are."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from quengine.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINE = re.compile(r"(?: {4,}(?:\$ )?|\$ )(?:engine(?: -v)?|docker run .* quengine) ([a-z]+ .*|[a-z]+$)")


def command_lines(text: str) -> Iterator[list[str]]:
    """The arguments of each `engine ...`, or of a container, that begins an indented line."""
    for line in text.replace("\\\n", " ").splitlines():
        if found := LINE.match(line):
            for part in found[1].split("; engine "):
                yield shlex.split(re.split(r" [<>|] ", part)[0], comments=True)


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """The flags of every command, and of those below it."""
    main.register_commands([])
    group: Any = typer.main.get_command(main.app)
    return {
        name: {
            flag
            for each in (command, *getattr(command, "commands", {}).values())
            for parameter in each.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command in group.commands.items()
    }


def check(words: list[str], known: dict[str, set[str]]) -> None:
    name, *rest = [word for word in words if word != "-v"]
    assert name in known, f"engine {name}"
    for word in rest:
        if re.match(r"--?[a-z]", word):
            assert word.partition("=")[0] in known[name] | {"--help", "-h"}, f"engine {name} {word}"


def test_documents_name_commands_and_flags_that_there_are(known: dict[str, set[str]]) -> None:
    lines = [words for path in DOCUMENTS for words in command_lines(path.read_text())]
    assert len(lines) > 40
    for words in lines:
        check(words, known)


def test_so_do_the_examples(known: dict[str, set[str]]) -> None:
    for name, entry in main.COMMANDS.items():
        assert entry.examples
        for example in entry.examples:
            program, *words = shlex.split(example.partition(" < ")[0])
            assert (program, words[0]) == ("engine", name)
            check(words, known)
