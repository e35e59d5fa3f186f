"""Kernels loaded from disk or compiled: who imports numba, and what happens to files that are no use."""

import logging
import os
import sys
from pathlib import Path

import pytest

from quengine.kernels.cpu.runtime import kernel_table
from quengine.kernels.cpu.runtime.code_store import CodeStore
from quengine.kernels.private_folder import KEY_NAME
from tests.quick_python import run

NAME = ("ops.add_kernels", "add_kernel")
SCRIPT = """
import sys
import torch
from quengine.kernels.cpu import rms_norm, set_threads

set_threads(1)
x = torch.arange(50.0).reshape(2, 25)
print(rms_norm(x, x[1], 1e-5).sum().item(), "numba" in sys.modules)
"""


def load(store: CodeStore) -> bool:
    """Loads a kernel as a new process would; whether it was compiled."""
    compiled = []
    import_module = kernel_table.import_module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_table, "code_store", lambda: store)
        patch.setattr(
            kernel_table, "import_module", lambda name: compiled.append(name) or import_module(name)
        )
        assert kernel_table.kernel.__wrapped__(*NAME) > 0
    return bool(compiled)


def test_a_second_process_does_not_import_numba(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    results = []
    for _ in range(2):
        done = run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        results.append((*done.stdout.split(), "compiling kernels" in done.stderr))
    assert results[0][1:] == ("True", True) and results[1] == (results[0][0], "False", False)


def test_a_kernel_is_compiled_once_and_then_loaded(tmp_path: Path) -> None:
    store = CodeStore([tmp_path], "1")
    assert [load(store), load(store)] == [True, False]
    assert {path.name for path in tmp_path.iterdir()} == {KEY_NAME, "-".join(NAME)}


def test_a_kernel_that_is_compiled_is_logged_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CodeStore([tmp_path], "1")
    with caplog.at_level(logging.INFO, "quengine"):
        load(store)
        load(store)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(told) == 1 and told[0].startswith("compiled ops.add_kernels-add_kernel in ")


@pytest.mark.parametrize("what", ["damaged", "of another version", "no object file"])
def test_a_file_that_is_no_use_is_compiled_anew(what: str, tmp_path: Path) -> None:
    store = CodeStore([tmp_path], "1")
    name = "-".join(NAME)
    if what == "no object file":
        store.write(name, b"\x7fELF, but not for long")
    elif what == "damaged":
        store.write(name, b"code")
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    else:
        CodeStore([tmp_path], "0").write(name, b"code")
    assert load(store)
    code = store.read(name)
    assert code is not None and len(code) > 500


def test_kernels_are_compiled_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = CodeStore([tmp_path / "file" / "folder"], "1")
    assert [load(store), load(store)] == [True, True]


def test_compiling_is_said_once_and_not_when_kernels_are_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, said = CodeStore([tmp_path], "1"), []
    for _ in range(2):
        kernel_table.say_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "quengine"):
            load(store)
            load(store)
        said.append(sum("compiling kernels" in record.getMessage() for record in caplog.records))
    kernel_table.say_once()
    assert said == [1, 0]
