"""The README, CONTRIBUTING, the docs, the changelog and the help's examples name commands, flags, files, headings and
benchmarks that there are."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import quengine
from quengine.cli import main
from quengine.foreign_flags import FOREIGN

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL = [*DOCS, ROOT / "CHANGELOG.md"]
PRESENT = [path for path in DOCS if path.name != "llama-server-tests.md"]
"""Those that name only what is there: that page names llama.cpp's files."""
MOST_WORDS = 27_250
"""Of README, CONTRIBUTING and docs/, without the bars of tables: what is new takes the place of what is not needed any
more."""
FOLDERS = ("engine", "kernels", "models", "cli", "tests", "benchmarks", "docs", "examples")
PLACEHOLDERS = {"tests/models/architectures/test_NAME.py"}
OTHERS = {"--fuse-qkv", "--fuse-gate-up-exps", "--gpus"}
"""Flags of llama.cpp's converter and of Docker."""
ENDS = {
    "/".join(each.relative_to(ROOT).parts[begin:])
    for folder in FOLDERS
    for each in (ROOT / folder, *(ROOT / folder).rglob("*"))
    for begin in range(len(each.relative_to(ROOT).parts))
}
"""Of the path of every file and folder, itself and what is left of it without its first folders."""
SOURCES = {path: path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")}
LINE = re.compile(r"(?: {4,}(?:\$ )?|\$ )(?:engine(?: -v)?|docker run .* quengine) ([a-z]+ .*|[a-z]+$)")


def spans(path: Path) -> Iterator[str]:
    """What stands between backticks on a line."""
    for line in path.read_text().splitlines():
        yield from re.findall(r"`([^`]+)`", line)


def anchors(path: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PRESENT, ids=lambda path: path.name)
def test_named_files_and_folders_are_there(path: Path) -> None:
    for span in spans(path):
        for word in re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w./-]*|(?<![\w/.])\w+\.py\b", span):
            assert word.rstrip("/.") in ENDS | PLACEHOLDERS, f"{path.name}: {word}"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_links_lead_to_pages_and_headings(path: Path) -> None:
    for name, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)]*)\)", path.read_text()):
        page = path.parent / name if name else path
        assert page.exists(), f"{path.name}: {name}"
        assert not anchor or page.suffix != ".md" or anchor in anchors(page), f"{path.name}: {name}#{anchor}"


def sentences(text: str) -> list[str]:
    """Those of paragraphs and list items, without code, tables and headings."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if not re.match(r" {4}|\||#|<|!\[|:::", line)]
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    split = (each for part in parts for each in re.split(r"(?<=[.!?])\)?\s+", " ".join(part.split())))
    return [each for each in split if len(each.split()) > 2]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_lines_cells_and_sentences_are_short(path: Path) -> None:
    text = path.read_text()
    long = [number for number, line in enumerate(text.splitlines(), 1) if len(line) > 120]
    assert not long, f"{path.name}: lines of more than 120 characters: {long}"
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row) if len(cell.split()) > 20]
    assert not cells, f"{path.name}: cells of more than 20 words: {cells}"
    said = sentences(text)
    assert sum(len(each.split()) for each in said) <= 25 * len(said), path.name


def test_the_documents_stay_within_their_words() -> None:
    words = (word for path in DOCS for word in path.read_text().split())
    assert sum(re.search(r"\w", word) is not None for word in words) <= MOST_WORDS


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    made = {"contributing.md", "changelog.md", "examples.md"}
    assert set(listed) == {path.name for path in (ROOT / "docs").glob("*.md")} | made
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_in_the_documents_compiles(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        compile(block, path.name, "exec")


def test_toml_in_the_documents_is_valid() -> None:
    blocks = [
        block for path in DOCS for block in re.findall(r"```toml\n(.*?)```", path.read_text(), re.DOTALL)
    ]
    assert blocks
    for block in blocks:
        assert tomllib.loads(block), block


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_yaml_in_the_documents_has_lists_of_mappings(path: Path) -> None:
    for block in re.findall(r"(?:\A|\n)\n((?:    )\w+:\n(?:    .*\n)+)", path.read_text()):
        for entries in yaml.safe_load(block).values():
            assert all(isinstance(entry, dict) and len(entry) > 1 for entry in entries), block


def test_the_python_reference_names_what_there_is() -> None:
    names = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/python.md").read_text(), re.M)
    assert {f"quengine.{name}" for name in quengine.__all__ if name != "__version__"} <= set(names)
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def benchmark_lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each `python -m benchmarks...` or `python benchmarks/...`: what is run, and the flags given to it."""
    for found in re.findall(r"python (?:-m )?(benchmarks[\w./]*)([^`\n]*)", path.read_text()):
        yield found[0], re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", found[1].partition(" # ")[0])


@pytest.mark.parametrize("path", PRESENT, ids=lambda path: path.name)
def test_named_benchmarks_take_the_flags_that_are_shown(path: Path) -> None:
    for module, flags in benchmark_lines(path):
        file = ROOT / module.removesuffix(".py").rstrip(".").replace(".", "/")
        file = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
        assert file in SOURCES, f"{path.name}: {module}"
        beside = "".join(source for each, source in SOURCES.items() if each.parent == file.parent)
        for flag in flags:  # of the file, or of one beside it that it takes flags from
            assert f'"{flag}"' in beside, f"{path.name}: {module} {flag}"


def command_lines(text: str) -> Iterator[list[str]]:
    """The arguments of each `engine ...`, or of a container, that begins an indented line."""
    for line in text.replace("\\\n", " ").splitlines():
        if found := LINE.match(line):
            for part in found[1].split("; engine "):
                yield shlex.split(re.split(r" [<>|] ", part)[0], comments=True)


def test_the_servers_limits_have_the_defaults_that_are_shown() -> None:
    main.register_commands([])
    group: Any = typer.main.get_command(main.app)
    defaults = {flag: each.default for each in group.commands["serve"].params for flag in each.opts}
    rows = re.findall(r"^\| `(--[\w-]+)` \| (\d+)(?: s)? \|", (ROOT / "docs/server.md").read_text(), re.M)
    assert len(rows) > 10
    for flag, default in rows:
        assert defaults[flag] == float(default), flag


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
    lines = [words for path in DOCS for words in command_lines(path.read_text())]
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


def test_named_aliases_are_in_the_catalogue() -> None:
    catalogue = tomllib.loads((ROOT / "models/hub/catalogue.toml").read_text())
    texts = [path.read_text() for path in (*DOCS, *(ROOT / "examples").iterdir()) if path.is_file()]
    texts += [example for entry in main.COMMANDS.values() for example in entry.examples]
    named = {name for text in texts for name in re.findall(r"(?<![\w/.-])[a-z][\w.-]*-q(?:4k|8)\b", text)}
    assert len(named) > 40
    assert named <= set(catalogue), named - set(catalogue)


def test_named_flags_are_there(known: dict[str, set[str]]) -> None:
    """Also where no command stands before them."""
    flags = set(FOREIGN).union(OTHERS, *known.values())
    for path in PRESENT:
        for span in spans(path):
            if flag := re.match(r"--[a-z][\w-]*", span):
                ours = any(f'"{flag[0]}"' in source for source in SOURCES.values())
                assert flag[0] in flags or ours, f"{path.name}: {flag[0]}"
