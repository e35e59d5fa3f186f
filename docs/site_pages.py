"""What the site has beside the pages of docs/: CONTRIBUTING, the changelog, and the reference of the commands.

mkdocs calls these functions (`hooks` of mkdocs.yml). Links between pages are written as the repository has them.
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "README.md": "index.md",
}
"""Pages outside of docs/, and what the site calls them."""
MARK = "<!-- commands -->"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside of docs/."""
    for name, page in OUTSIDE.items():
        if page != "index.md":
            text = _inside((ROOT / name).read_text("utf-8"))
            if page == "examples.md":
                text = "\n".join((re.sub(r"\]\((\w+)\.py\)", r"](#\1py)", text), *_scripts()))
            files.append(File.generated(config, page, content=text))
    return files


def _scripts() -> Iterator[str]:
    for script in sorted((ROOT / "examples").glob("*.py")):
        yield from ("", f"## {script.name}", "", "```python", script.read_text("utf-8").rstrip(), "```")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the root's pages become those of the site; the mark becomes the reference."""
    markdown = _inside(markdown)
    return markdown.replace(MARK, "\n".join(reference())) if MARK in markdown else markdown


def _inside(markdown: str) -> str:
    """Links as the site has them, and code in tables, where GitHub alone reads `\\|` as a bar."""
    markdown = re.sub(r"^\|.*", lambda row: re.sub(r"`[^`]+`", _bars, row[0]), markdown, flags=re.M)
    names = "|".join(re.escape(name) for name in OUTSIDE)
    markdown = re.sub(rf"\]\((?:\.\./)?({names})", lambda found: f"]({OUTSIDE[found[1]]}", markdown)
    markdown = re.sub(r"\[([\w-]+)\.md\]\(", r"[\1](", markdown)  # a page has no file name on the site
    return markdown.replace("](docs/", "](")


def _bars(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


def reference() -> Iterator[str]:
    """The commands with their flags, as `engine COMMAND --help` has them, in markdown."""
    from quengine.cli import main

    main.register_commands([])
    group: Any = typer.main.get_command(main.app)
    for name, entry in main.COMMANDS.items():
        command = group.commands[name]
        yield from _command(f"engine {name}", command)
        for below, each in getattr(command, "commands", {}).items():
            yield from _command(f"engine {name} {below}", each, level=3)
        yield from ("", *(f"    {example}" for example in entry.examples), "")


def _command(title: str, command: Any, level: int = 2) -> Iterator[str]:
    """A command's heading, what it does, and its flags."""
    context = command.make_context(command.name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (
        "",
        f"{'#' * level} {title}",
        "",
        *_paragraphs(command.help or ""),
        f"    {title} {usage}",
        "",
    )
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if (row := parameter.get_help_record(context)) is not None:
            names, about = (" ".join(part.split()) for part in row)
            line = f"- `{names}`: {escape(about, quote=False)}" if about else f"- `{names}`"
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "", []).append(line)
    for panel, lines in panels.items():
        yield from (*([f"**{panel}**", ""] if panel else []), *lines, "")


def _paragraphs(text: str) -> Iterator[str]:
    for part in text.split("\n\n"):
        yield from (escape(" ".join(part.split()), quote=False), "")
