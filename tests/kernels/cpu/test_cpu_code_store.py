"""Where compiled kernels are kept: what is found again, and by whom."""

import logging
import os
import re
import stat
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from quengine.kernels.cpu.runtime import code_store as module
from quengine.kernels.cpu.runtime import kernel_table
from quengine.kernels.cpu.runtime.code_store import CodeStore, code_store
from quengine.kernels.private_folder import KEY_NAME
from tests.quick_python import run


def test_contents_are_found_by_name_and_version(tmp_path: Path) -> None:
    store = CodeStore([tmp_path / "a" / "b"], "1")
    store.write("x", b"code")
    assert store.read("x") == b"code"
    assert store.read("y") is None
    assert CodeStore(store.folders, "2").read("x") is None
    store.write("x", b"")
    assert store.read("x") == b""
    assert sorted(path.name for path in store.folders[0].iterdir()) == [KEY_NAME, "x"]
    assert stat.S_IMODE(store.folders[0].stat().st_mode) == 0o700


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    store = CodeStore([tmp_path], "1")
    store.write("x", b"some code")
    whole = (tmp_path / "x").read_bytes()
    first = bytes([whole[0] ^ 1])  # of a digest, whose secret is drawn: it may be any byte
    for damaged in (b"", whole[:-1], whole + b"\0", whole[:40] + b"!" + whole[41:], first + whole[1:]):
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


@pytest.mark.parametrize("kept", [True, False])
def test_later_runs_are_said_to_find_kernels_where_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    (tmp_path / "file").touch()
    store = CodeStore([tmp_path / ("folder" if kept else "file") / "kernels"], "1")
    monkeypatch.setattr(kernel_table, "code_store", lambda: store)
    with caplog.at_level(logging.WARNING, "quengine"):
        kernel_table.say_once.__wrapped__()
    (record,) = caplog.records
    assert ("later runs find them" in record.getMessage()) is kept


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Path) -> Path:
        raise OSError

    monkeypatch.setattr(Path, "replace", fail)
    CodeStore([tmp_path], "1").write("x", b"code")
    assert [path.name for path in tmp_path.iterdir()] == [KEY_NAME]


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


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Never beside the package: what an uninstallation leaves there is imported in place of a later installation.
    assert module._folders("kernels") == [tmp_path / "quengine" / "kernels"]
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert module._folders("kernels") == [tmp_path / "chosen" / "kernels"]
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it does where there is no home folder
    assert module._folders("kernels") == []


def test_packages_in_two_places_do_not_replace_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = module._machine()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "kernels" / "cpu" / "runtime" / "code_store.py"))
    assert module._machine() != found


def plain_digest(version: str, name: str, content: bytes) -> bytes:
    """What anybody can compute who has read the sources."""
    return sha256(f"{version}\0{name}\0".encode() + content).digest()


def test_a_file_whose_digest_needs_no_secret_is_not_loaded(tmp_path: Path) -> None:
    store = CodeStore([tmp_path], "1")
    store.write("x", b"code")
    (tmp_path / "x").write_bytes(plain_digest("1", "x", b"planted") + b"planted")
    assert store.read("x") is None
    assert CodeStore([tmp_path], "1").read("x") is None


def test_a_file_is_of_its_folders_secret(tmp_path: Path) -> None:
    """One user's kernels, copied to where another loads from, are not that user's."""
    first, second = CodeStore([tmp_path / "a"], "1"), CodeStore([tmp_path / "b"], "1")
    first.write("x", b"code")
    second.write("y", b"code")
    (tmp_path / "b" / "x").write_bytes((tmp_path / "a" / "x").read_bytes())
    assert second.read("x") is None and second.read("y") == b"code"


def given_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder and all in it belong to another user; without root's right to do that, we are another user."""
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
        return
    for path in (folder, *folder.iterdir()):
        os.chown(path, 54321, 54321)


def test_a_folder_of_another_user_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted, own = tmp_path / "planted", tmp_path / "own"
    attacker = CodeStore([planted], "1")
    attacker.write("x", b"planted")  # with the secret that lies beside it
    planted.chmod(0o777)
    given_away(planted, monkeypatch)
    store = CodeStore([planted, own], "1")
    with caplog.at_level(logging.WARNING, "quengine"):
        assert store.read("x") is None
        if os.geteuid() == 0:
            store.write("x", b"code")
            assert store.read("x") == b"code" and (own / "x").is_file()
    assert planted.joinpath("x").read_bytes()[-7:] == b"planted"
    assert f"{planted} are not used: it belongs to user" in caplog.records[0].getMessage()
    assert len(caplog.records) == 1


def test_a_chosen_place_of_another_user_leaves_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "shared"))
    (tmp_path / "shared" / "kernels").mkdir(parents=True)
    given_away(tmp_path / "shared" / "kernels", monkeypatch)
    assert module._folders("kernels")[-1] == tmp_path / "quengine" / "kernels"


def test_users_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = module._machine()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert module._machine() != found


PLANTED = """
import sys
from quengine.kernels.cpu.runtime.target import host_target
print(host_target().cpu)
"""


def test_a_process_does_not_take_what_was_planted(tmp_path: Path) -> None:
    """The kind of processor is the smallest thing that is kept; a kernel's code is taken from there in the same way."""
    folder = tmp_path / module._machine()
    folder.mkdir()
    folder.chmod(0o777)
    content = b"x86_64\nplanted\n"
    (folder / "target").write_bytes(plain_digest(module._version(), "target", content) + content)
    if os.geteuid() == 0:
        given_away(folder, pytest.MonkeyPatch())
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "own")}
    command = [sys.executable, "-c", PLANTED]
    done = run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() not in ("", "planted")
    if os.geteuid() == 0:
        assert "are not used: it belongs to user 54321" in done.stderr


def test_a_changed_source_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cpu" / "runtime"
    folder.mkdir(parents=True)
    (tmp_path / "cpu" / "ir").mkdir()
    for name in module._OTHER_SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (folder / "code_store.py").touch()
    monkeypatch.setattr(module, "__file__", str(folder / "code_store.py"))
    versions = []
    for changed in ("cpu/runtime/code_store.py", "cpu/ir/new.py", *module._OTHER_SOURCES):
        (tmp_path / changed).write_text("# changed")
        module.source_stamp.cache_clear()
        versions.append(module._version())
    module.source_stamp.cache_clear()
    assert len(set(versions)) == len(versions)


def test_all_that_kernels_are_made_from_is_watched() -> None:
    folder = Path(module.__file__).parents[1]
    makers = [
        *folder.rglob("*_kernels.py"),
        *folder.rglob("*_ir.py"),
        folder / "gemm" / "tiles.py",
        folder / "runtime" / "compiled.py",
    ]
    assert len(makers) > 20
    imports = re.compile(r"^from quengine\.kernels\.(?!cpu\b)([\w.]+) import", re.MULTILINE)
    read = {f"{name.replace('.', '/')}.py" for path in makers for name in imports.findall(path.read_text())}
    assert read and read <= set(module._OTHER_SOURCES)


def test_a_process_has_one_store() -> None:
    assert code_store() is code_store()
