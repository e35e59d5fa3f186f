"""The rooms of the house: what is installed, and which way imports point."""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "models", "engine", "cli")
"""From the bottom up."""
OPTIONAL = ("quengine.serve", "quengine.diagnostics", "quengine.evaluation")
"""Rooms that the core does without."""
CORE = ("engine", "engine/request", "models", "kernels")


def sources(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]


def module_name(path: Path) -> str:
    """What a file of the product is imported as; a package's __init__ ends so."""
    layer, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("quengine", *parts) if layer == "engine" else ("quengine", layer, *parts))


def imports(source: str, name: str) -> Iterator[str]:
    """What the module `name` imports: at its top, within functions, and for types alone (under TYPE_CHECKING)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            package = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def imports_of(path: Path) -> list[str]:
    return list(imports(path.read_text(), module_name(path)))


def layer_of(module: str) -> str:
    first = module.partition(".")[2].partition(".")[0]
    return first if first in LAYERS else "engine"


def test_every_room_is_installed() -> None:
    """A room that pyproject.toml does not list is in a checkout's import root, and in no installation."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {
        ".".join(("quengine", *path.parent.relative_to(ROOT).parts)).replace("quengine.engine", "quengine")
        for layer in LAYERS
        for path in sources(layer)
    }
    assert len(rooms) > 30 and set(packages) == rooms


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import a.b
from c import d
from . import here
from .near import x
if TYPE_CHECKING:
    from e import f
def g():
    from h import i
"""
    assert set(imports(source, "p.q")) == {"a.b", "c.d", "p.here", "p.near.x", "e.f", "h.i"}


def test_there_is_no_circle_of_imports() -> None:
    """Not even one that fails nowhere, since an import of it stands within a function or is for types alone."""
    files = {module_name(path).removesuffix(".__init__"): path for layer in LAYERS for path in sources(layer)}
    graph = {
        name: {each if each in files else each.rpartition(".")[0] for each in imports_of(path)} & files.keys()
        for name, path in files.items()
    }
    assert "quengine.request.sequence" in graph["quengine.llm"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_imports_point_down() -> None:
    """Those within functions and for types alone too. The one exception is `quengine.errors`: it imports nothing, and
    is everybody's."""
    for layer in LAYERS:
        above = LAYERS[LAYERS.index(layer) + 1 :]
        for path in sources(layer):
            wrong = [
                name
                for name in imports_of(path)
                if name.startswith("quengine.")
                and not f"{name}.".startswith("quengine.errors.")
                and layer_of(name) in above
            ]
            assert not wrong, (path, wrong)


def test_the_core_imports_no_optional_room() -> None:
    """But for `engine/__init__.py`, which names the public functions for type checkers alone."""
    for folder in CORE:
        for path in set((ROOT / folder).glob("*.py")) - {ROOT / "engine" / "__init__.py"}:
            assert not [name for name in imports_of(path) if name.startswith(OPTIONAL)], path


def test_side_rooms_of_the_server_are_imported_by_nothing_in_its_core() -> None:
    side = tuple(f"quengine.serve.{room}." for room in ("tools", "ray", "replicas"))
    for path in sources("engine/serve"):
        if not module_name(path).startswith(side):
            assert not [name for name in imports_of(path) if f"{name}.".startswith(side)], path


def test_the_rooms_of_the_server_import_each_other_in_one_direction() -> None:
    """A folder is a room, with the files that lie in it; a file beside the folders is one of its own."""

    def room(module: str) -> str:
        *above, last = module.removeprefix("quengine.serve.").split(".")
        return ".".join(above) or last

    files = {module_name(path).removesuffix(".__init__"): path for path in sources("engine/serve")}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        targets = {
            each if each in files else each.rpartition(".")[0] for each in imports_of(path)
        } & files.keys()
        graph.setdefault(room(name), set()).update({room(each) for each in targets} - {room(name)})
    assert {"guard", "routes", "models"} <= graph.keys() and "models" in graph["routes"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_every_room_says_what_it_is_for() -> None:
    for layer in LAYERS:
        for path in sources(layer):
            if path.name == "__init__.py":
                assert ast.get_docstring(ast.parse(path.read_text())), path


def changed_packages(source: str) -> Iterator[str]:
    """The attributes of torch, Triton or numba that a module assigns to, as the source has them."""
    nodes = list(ast.walk(ast.parse(source)))
    taken = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0]
        in ("torch", "triton", "numba", "llvmlite")
    }
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if isinstance(node, ast.Call) and called in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], ast.unparse(node.args[1]))]
        for target in targets:
            if isinstance(target, ast.Attribute):
                name = ast.unparse(target)
                if name.partition(".")[0] in taken:
                    yield name


def test_other_packages_are_changed_in_one_file() -> None:
    """But for the settings that Triton has for its users."""
    source = "import torch, triton.x as y\nfrom numba import z\ntorch.a.b = 1\nsetattr(y, 'c', 1)\ndel z.d\nq = z.e\n"
    assert set(changed_packages(source)) == {"torch.a.b", "y.'c'", "z.d"}
    found = {
        (path.name, name)
        for layer in LAYERS
        for path in sources(layer)
        for name in changed_packages(path.read_text())
        if not name.startswith("triton.knobs.")
    }
    assert {file for file, _ in found} == {"triton_changes.py"}, found
    assert {name for _, name in found} == {
        "JITFunction.run",
        "DependenciesFinder._update_hash",
        "driver._active",
    }
