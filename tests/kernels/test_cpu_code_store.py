"""Where compiled kernels are kept: what is found again, and by whom."""

import logging
import re
from pathlib import Path

import pytest

from quengine.kernels.cpu import code_store as module
from quengine.kernels.cpu.code_store import CodeStore, code_store


def test_contents_are_found_by_name_and_version(tmp_path: Path) -> None:
    store = CodeStore([tmp_path / "a" / "b"], "1")
    store.write("x", b"code")
    assert store.read("x") == b"code"
    assert store.read("y") is None
    assert CodeStore(store.folders, "2").read("x") is None
    store.write("x", b"")
    assert store.read("x") == b""
    assert [path.name for path in store.folders[0].iterdir()] == ["x"]


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    store = CodeStore([tmp_path], "1")
    store.write("x", b"some code")
    whole = (tmp_path / "x").read_bytes()
    for damaged in (b"", whole[:-1], whole + b"\0", whole[:40] + b"!" + whole[41:], b"\0" + whole[1:]):
        (tmp_path / "x").write_bytes(damaged)
        assert store.read("x") is None
    store.write("x", b"some code")
    (tmp_path / "x").rename(tmp_path / "y")
    assert store.read("y") is None  # another kernel's


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = CodeStore([tmp_path / "one"], "1"), tmp_path / "two"
    first.write("x", b"code")
    store = CodeStore([tmp_path / "file" / "folder", tmp_path / "one", second], "1")
    assert store.read("x") == b"code"
    CodeStore([tmp_path / "file" / "folder", second], "1").write("y", b"more")
    assert store.read("y") == b"more"


def test_where_no_folder_can_be_written_it_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    store = CodeStore([tmp_path / "file" / "folder"], "1")
    with caplog.at_level(logging.WARNING, "quengine"):
        store.write("x", b"code")
        store.write("y", b"code")
    (record,) = caplog.records
    assert str(tmp_path / "file") in record.getMessage() and "NUMBA_CACHE_DIR" in record.getMessage()
    assert store.read("x") is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Path) -> Path:
        raise OSError

    monkeypatch.setattr(Path, "replace", fail)
    CodeStore([tmp_path], "1").write("x", b"code")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT"])
def test_processors_and_settings_have_folders_of_their_own(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = module._machine()
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")  # no matter for code
    assert module._machine() == found
    monkeypatch.setenv(setting, "1")
    assert module._machine() != found
    monkeypatch.delenv(setting)
    (tmp_path / ".numba_config.yaml").write_text("opt: 0")
    assert module._machine() != found


def test_another_processor_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from llvmlite import binding

    found = module._machine()
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "another")
    assert module._machine() != found


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    beside, user = module._places()
    assert beside == Path(module.__file__).parent / "__pycache__" and user == tmp_path / "quengine"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert module._places() == [tmp_path / "chosen"]


def test_a_changed_source_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    for name in module._OTHER_SOURCES:
        (tmp_path / name).touch()
    (folder / "code_store.py").touch()
    monkeypatch.setattr(module, "__file__", str(folder / "code_store.py"))
    versions = []
    for changed in ("cpu/code_store.py", "cpu/new.py", *module._OTHER_SOURCES):
        (tmp_path / changed).write_text("# changed")
        module.source_stamp.cache_clear()
        versions.append(module._version())
    module.source_stamp.cache_clear()
    assert len(set(versions)) == len(versions)


def test_all_that_kernels_are_made_from_is_watched() -> None:
    folder = Path(module.__file__).parent
    makers = [
        *folder.glob("*_kernels.py"),
        *folder.glob("*_ir.py"),
        folder / "tiles.py",
        folder / "compiled.py",
    ]
    imports = re.compile(r"^from quengine\.kernels\.(\w+) import", re.MULTILINE)
    read = {f"{name}.py" for path in makers for name in imports.findall(path.read_text())}
    assert read and read <= set(module._OTHER_SOURCES)


def test_a_process_has_one_store() -> None:
    assert code_store() is code_store()
