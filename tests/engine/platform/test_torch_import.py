"""The program imports torch without the modules for tracing and training, and these still work where they are used."""

import importlib.util
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quengine.platform import torch_import
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

# A process that prints what is still put off at its end.
GENERATE = """
import atexit, sys
from quengine.platform import torch_import
def left():
    made = [n for n in torch_import.DEFERRED if type(sys.modules.get(n)) is torch_import._Deferred]
    print("left", len(made))
atexit.register(left)
from quengine.cli import main
sys.exit(main.main())
"""
USED = """
import sys
from quengine.platform import torch_import
torch_import.defer_modules()
import torch
assert type(torch.export) is torch_import._Deferred
class Twice(torch.nn.Module):
    def forward(self, x):
        return x + x
graph = torch.export.export(Twice(), (torch.ones(3),))
assert graph.module()(torch.arange(3.0)).tolist() == [0, 2, 4]
assert type(torch.export) is type(sys)
from torch.utils.data import *
assert DataLoader([1, 2, 3], batch_size=3).__iter__().__next__().tolist() == [1, 2, 3]
"""

GENERATORS = """
import sys
from quengine.platform import torch_import
torch_import.defer_modules()
import torch
first = torch.rand(3, generator=torch.Generator().manual_seed(1))
assert type(torch.export) is torch_import._Deferred
import torch._prims.rng_prims
torch.export.export
assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(1)))
"""
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


def test_a_model_runs_without_any_of_the_modules(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", kind="Q8_0", sizes=ModelSizes(embedding=64, feed_forward=128))
    said = python(GENERATE, "generate", "-m", str(model), "--raw", "-p", "a", "-n", "2", "--device", "cpu")
    assert said.endswith(f"left {len(torch_import.DEFERRED)}\n")


def test_a_module_that_is_used_is_what_it_always_is() -> None:
    python(USED)


def test_generators_of_random_numbers_need_none_of_the_modules() -> None:
    python(GENERATORS)


def test_the_installed_torch_has_all_modules_and_is_one_that_was_tried() -> None:
    assert torch.__version__.startswith(torch_import.VERSIONS)
    assert all(importlib.util.find_spec(name) is not None for name in torch_import.DEFERRED)
    assert torch_import._version() == torch.__version__


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


def test_a_process_that_has_torch_is_left_as_it_is() -> None:
    before = list(sys.meta_path)
    torch_import.defer_modules()
    assert sys.meta_path == before
