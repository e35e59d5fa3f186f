"""The rooms of the house: how many files a folder has, and which way imports point."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "models", "engine", "cli")
"""From the bottom up."""
OPTIONAL = ("quengine.serve", "quengine.diagnostics")
"""Rooms that the core does without."""
CORE = ("engine", "engine/request", "models", "kernels")


def sources(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer_of(module: str) -> str:
    first = module.partition(".")[2].partition(".")[0]
    return first if first in LAYERS else "engine"


def test_no_folder_has_more_files_than_one_takes_in() -> None:
    folders = {path.parent for layer in (*LAYERS, "tests", "benchmarks") for path in sources(layer)}
    assert len(folders) > 30
    for folder in folders:
        most = 24 if folder.relative_to(ROOT).parts[0] == "tests" else 15
        assert len(list(folder.glob("*.py"))) <= most, folder


def test_every_room_is_installed() -> None:
    """A room that pyproject.toml does not list is in a checkout's import root, and in no installation."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {
        ".".join(("quengine", *path.parent.relative_to(ROOT).parts)).replace("quengine.engine", "quengine")
        for layer in LAYERS
        for path in sources(layer)
    }
    assert len(rooms) > 30 and set(packages) == rooms


def test_imports_point_down() -> None:
    """`quengine.errors`, which imports nothing, is everybody's."""
    for layer in LAYERS:
        above = LAYERS[LAYERS.index(layer) + 1 :]
        for path in sources(layer):
            wrong = [
                name
                for name in imports(path)
                if name.startswith("quengine.") and name != "quengine.errors" and layer_of(name) in above
            ]
            assert not wrong, (path, wrong)


def test_the_core_imports_no_optional_room() -> None:
    for folder in CORE:
        for path in (ROOT / folder).glob("*.py"):
            assert not [name for name in imports(path) if name.startswith(OPTIONAL)], path


def test_every_room_says_what_it_is_for() -> None:
    for layer in LAYERS:
        for path in sources(layer):
            if path.name == "__init__.py":
                assert ast.get_docstring(ast.parse(path.read_text())), path
