"""The program imports torch as it is, from bytecode."""

import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

# The program's preparation, then modules that a start does not need, in the order that is given.
IMPORTS = """
import importlib, sys
import quengine
from quengine.cli import process
process.prepare(["bench"])
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
class Twice(torch.nn.Module):
    def forward(self, x):
        return x + x
graph = torch.export.export(Twice(), (torch.ones(3),))
assert graph.module()(torch.arange(3.0)).tolist() == [0, 2, 4]
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    torch.ones(3) + 1
assert any(event.name == "aten::add" for event in profiler.events())
"""
LATER = (
    "torch.utils._content_store",
    "torch.profiler",
    "torch._dynamo",
    "torch.export",
    "torch.distributions",
    "torch.masked",
    "torch.nested",
    "torch.optim",
    "torch.utils.data",
    "torch._meta_registrations",
)
BYTECODE = """
import importlib.machinery, importlib.util, sys
from pathlib import Path
from quengine.platform import torch_import
spec = importlib.util.find_spec("torch")
torch_import.importlib.util.find_spec = lambda name: importlib.machinery.ModuleSpec("torch", None, origin=sys.argv[1])
torch_import.keep_bytecode()
sys.path.insert(0, str(Path(sys.argv[1]).parent))
import module_of_a_test
print(sys.pycache_prefix, module_of_a_test.__cached__, Path(module_of_a_test.__cached__).exists())
"""


def python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_torch_imports_later_can_be_imported_and_profiled() -> None:
    """As the profiler of a CUDA device imports dynamo: before what it would import itself."""
    python(IMPORTS, "torch._dynamo", *LATER[::-1])


def test_no_import_of_another_package_is_changed() -> None:
    python(
        "import inspect, sys\n"
        "before = list(sys.meta_path), inspect.getblock\n"
        "from quengine.cli import process\n"
        "process.prepare(['bench'])\n"
        "assert (list(sys.meta_path), inspect.getblock) == before"
    )


def bytecode(folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> list[str]:
    """Where a process keeps bytecode, where that of a module is and whether it is there; torch has its own or none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (folder / "module_of_a_test.py").write_text("x = 1")
    source = folder / "__init__.py"
    source.write_text("")
    if compiled:
        py_compile.compile(str(source))
    return python(BYTECODE, str(source)).split()


def test_bytecode_is_kept_in_the_cache_where_torch_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, file, there = bytecode(tmp_path, monkeypatch, compiled=False)
    folder = tmp_path / "cache" / "quengine" / "bytecode"
    assert (prefix, there) == (str(folder), "True")
    assert Path(file).is_relative_to(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_no_bytecode_is_written_where_torch_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bytecode(tmp_path, monkeypatch, compiled=True)[::2] == ["None", "False"]


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "quengine" / "bytecode"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert bytecode(tmp_path, monkeypatch, compiled=False)[::2] == ["None", "False"]
